"""Chats as documents: a chat template writes the messages out, and says by that which characters are the assistant's answers.

A template is Jinja, run in a sandbox as transformers runs it (transformers.utils.chat_template_utils), without that library:
it would load torch into every process that tokenises. There is no clock: a template that asks for today's date (`strftime_now`)
would make other packs every day. Those that first look whether there is one, as Llama's, use the date that they name instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import pyarrow as pa
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from foundation.errors import InputError
from foundation.reading import load_object, one_line, read_regular, reason_of
from packing.chunks import BadRecord, MissingColumn, TextTemplate, encodable, is_list_of, no_column
from packing.settings import HUB_NAME

# Around what a template's {% generation %} block writes. Two of Unicode's noncharacters, which no text holds.
_BEGIN, _END = "\ufdd0", "\ufdd1"
CHAT_TEMPLATE = "chat_template.jinja"  # its file, beside a tokenizer.json
# What a template can end with: its own refusal, a chat of another shape, a macro that calls itself without end.
_REFUSALS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    *(RecursionError, MemoryError),
)
_MARK = "mark the answers with {% generation %} in a template of your own (`data.chat_template`), or set data.train_on: all"


class _Unnamed(jinja2.Undefined):
    """A token that the tokenizer does not name, for which Jinja would write nothing."""

    __str__ = jinja2.StrictUndefined.__str__  # which raises; a template may still ask whether there is such a token


@dataclass(frozen=True)
class Rendered:
    """A chat as text, and where the answers stand in it: from a character to one, in order. None: every token is trained on."""

    text: str
    answers: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class ChatColumns:
    """Makes a chat of a record: from a column of messages, or from two that are a prompt and its response."""

    messages: str | None
    prompt: TextTemplate | None
    response: TextTemplate | None
    train_on: str = "response"
    template: str | None = None  # Jinja; None where only the columns matter
    tokens: tuple[tuple[str, str], ...] = ()  # what templates know of the tokenizer: ("bos_token", "<s>"), ...

    @property
    def columns(self) -> tuple[str, ...]:
        if self.messages is not None:
            return (self.messages,)
        return tuple(dict.fromkeys([*self.prompt.columns, *self.response.columns]))

    def written_by(self, template: str, tokens: Mapping[str, str]) -> ChatColumns:
        """Returns the same columns with a template. Raises InputError where `template` is none."""
        try:
            _compiled(template)
        except jinja2.TemplateError as error:
            raise InputError(f"data.chat_template: no Jinja that can be used: {error}; correct it, or name another") from None
        return replace(self, template=template, tokens=tuple(sorted(tokens.items())))

    def lacks_end(self) -> bool:
        """Whether the template writes an EOS where the tokenizer names none. One that asks first if there is one does not."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        try:
            replace(self, tokens=(("eos_token", _Unnamed(name="eos_token")), *self.tokens))._render(chat)
        except BadRecord as error:
            return "'eos_token' is undefined" in str(error)
        return False

    def missing(self, names: list[str]) -> str | None:
        """The message for a source whose columns `names` lack one of these; None if they have all."""
        setting = "data.messages" if self.messages is not None else "data.prompt and data.response"
        return no_column(self.columns, names, setting)

    def mistyped(self, schema: pa.Schema) -> str | None:
        """The message for a table whose column holds something else than messages; None if it does not."""
        if self.messages is None:
            return self.prompt.mistyped(schema) or self.response.mistyped(schema)
        kind = schema.field(self.messages).type
        if is_list_of(kind, pa.types.is_struct):
            return None
        return f"column `{self.messages}` holds {kind}, not lists of messages; the columns are: {', '.join(schema.names)}"

    def fill(self, record: dict[str, Any]) -> Rendered:
        """The chat that `record` holds, written out. Raises BadRecord, also where nobody answers or nothing is asked."""
        if problem := self.missing(list(record)):
            raise MissingColumn(problem)
        if self.messages is None:
            asked, answered = self.prompt.fill(record), self.response.fill(record)
            if not asked.strip():
                raise BadRecord(f"the prompt (`{', '.join(self.prompt.columns)}`) is empty, so nothing would be masked")
            chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        else:
            chat = _messages(record[self.messages], self.messages)
        said = json.dumps(chat, ensure_ascii=False, default=str)
        if _BEGIN in said or _END in said:
            raise BadRecord(f"holds U+{ord(_BEGIN):X} or U+{ord(_END):X}, which are no characters")
        answers = [number for number, message in enumerate(chat) if message["role"] == "assistant" and _says(message)]
        if not answers:
            raise BadRecord("a chat without an answer: no message of the role `assistant` holds any text")
        if self.train_on == "all":
            return Rendered(encodable(self._render(chat).replace(_BEGIN, "").replace(_END, "")))
        return self._masked(chat, answers)

    def _render(self, chat: list[dict[str, Any]], *, ask: bool = False) -> str:
        try:
            known = {"tools": None, "documents": None, **dict(self.tokens)}
            text = _compiled(self.template).render(messages=chat, add_generation_prompt=ask, **known)
        except _REFUSALS as error:
            raise BadRecord(f"the chat template does not take this chat: {str(error) or type(error).__name__}") from None
        for number, message in enumerate(chat, 1):
            content = message.get("content")
            if isinstance(content, (list, dict)) and str(content) in text:
                raise BadRecord(
                    f"message {number} has a {type(content).__name__} as its content, which the chat template writes as Python "
                    "does; make it text, or set a data.chat_template that takes it"
                )
        return text

    def _masked(self, chat: list[dict[str, Any]], answers: list[int]) -> Rendered:
        """Returns the chat with the places of its answers: those that the template marks, else whatever follows the prompt of
        each answer."""
        text = encodable(self._render(chat))
        if _BEGIN in text:
            text, spans = _without_marks(text)
            return Rendered(text, _not_empty(spans))
        spans = []
        for number in answers:
            asked = self._render(chat[:number], ask=True)
            said = text if number + 1 == len(chat) else self._render(chat[: number + 1])
            if not (text.startswith(said) and said.startswith(asked)):
                raise BadRecord(
                    f"the chat template writes message {number + 1} otherwise once others follow, or after the prompt for it, so "
                    f"where the answer stands cannot be told; {_MARK}"
                )
            if len(said) > len(asked):
                spans.append((len(asked), len(said)))
        return Rendered(text, _not_empty(spans))


def _not_empty(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    if not spans:
        raise BadRecord(f"the chat template writes nothing for the answers; {_MARK}")
    return tuple(spans)


def _says(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content) or bool(message.get("tool_calls"))


def _messages(value: Any, column: str) -> list[dict[str, Any]]:
    """The messages of a record, without keys that are null: tables give every message the keys of all. A content of no parts is
    no text: a template that writes what it finds would write `[]`."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise BadRecord(f"column `{column}` holds {type(value).__name__}, not a list of messages")
    chat = [{key: item for key, item in message.items() if item is not None} for message in value]
    for number, message in enumerate(chat, 1):
        if message.get("content") in ([], {}):
            message["content"] = ""
        if not isinstance(message.get("role"), str):
            keys = ", ".join(map(str, message)) or "no keys"
            raise BadRecord(f"message {number} of column `{column}` has {keys}; a message has a `role` and a `content`")
    return chat


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """`text` without its marks, and what stood between them; a block may hold others."""
    pieces, spans, length, depth = [], [], 0, 0
    for piece in re.split(f"([{_BEGIN}{_END}])", text):
        if piece in (_BEGIN, _END):
            depth += 1 if piece == _BEGIN else -1
            continue
        if depth and piece:
            spans.append((length, length + len(piece)))
        pieces.append(piece)
        length += len(piece)
    return "".join(pieces), spans


class _Generation(Extension):
    """`{% generation %}`, by which a template marks what the assistant writes."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


@lru_cache(maxsize=4)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False):
    """Jinja's own filter of this name writes for HTML, where `<` is `\\u003c`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def chat_template(given: str | None, tokenizer: str) -> str:
    """The text of `data.chat_template`, or of the tokenizer's own where that is None. InputError where there is none."""
    if given is not None and ("{" in given or "\n" in given):
        return given
    if given is not None:
        return _read(Path(given), "data.chat_template")
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    if Path(tokenizer).exists():
        found = [path for name in (CHAT_TEMPLATE, "tokenizer_config.json") if (path := folder / name).is_file()]
    else:
        found = _template_from_hub(tokenizer) if HUB_NAME.fullmatch(tokenizer) else []
    for file in found:
        if file.name == CHAT_TEMPLATE:
            return _read(file, "data.tokenizer")
        template = load_object(file, "fetch the tokenizer again, or name another").get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
            template = named.get("default")
        if isinstance(template, str):
            return template
    raise InputError(
        f"data.chat_template: the tokenizer {tokenizer} has no chat template to write chats with; set data.chat_template to a "
        "Jinja file, or name a tokenizer that has one, as those of instruct models do"
    )


def _read(path: Path, key: str) -> str:
    try:
        return str(read_regular(path), "utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{key}: {path}: no chat template that can be read: {reason_of(error)}") from None


def _template_from_hub(name: str) -> list[Path]:
    """The files of a hub repository that may hold its chat template."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RemoteEntryNotFoundError

    found = []
    for wanted in (CHAT_TEMPLATE, "tokenizer_config.json"):
        try:
            found.append(Path(hf_hub_download(name, wanted)))
        except RemoteEntryNotFoundError:
            continue
        except (OSError, HFValidationError) as error:
            if wanted == CHAT_TEMPLATE and isinstance(error, LocalEntryNotFoundError):
                continue  # most have it in tokenizer_config.json, and without a network the cache knows no more
            raise InputError(f"data.tokenizer: {name}: no {wanted} from the hub: {one_line(error)}") from None
    return found
