"""What a record becomes by the `data` settings, and its ids: a text, a chat, or the tokens that it holds already.

Each of the three classes has the `columns` that it reads, `fill`, which makes a document of a record with all of them (something
false where there is none; ValueError for a malformed record), and `encode`, which gives the ids of documents, [tokens] uint32,
those that are not to be learnt with `UNTRAINED`, and leaves out documents without any to learn.

Chats are written out by a chat template: Jinja, which transformers runs in a sandbox (and without loading torch). There is no
clock: a template that asks for today's date would make other packs every day. Those that first look whether there is a clock, as
Llama's, use the date that they name instead.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer

from foundation.errors import InputError
from foundation.reading import load_object, one_line, refusing
from packing.settings import DataSettings
from packing.token_columns import LABELS, TOKEN_COLUMNS, number_documents, trained_tokens
from packing.tokenizer import REMEDY, TextTokenizer, file_of, without_nulls

# a bit in the id of a token that is not to be learnt, until it is in a pack
UNTRAINED = np.uint32(1 << 31)
CHAT_TEMPLATE = "chat_template.jinja"  # its file, beside a tokenizer.json
# an undefined name; `+` leaves a line break behind it
_NO_CLOCK = "{% set strftime_now = there_is_no_clock +%}"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# From the role of a message to the role that a template takes.
_ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function")},
    **{role: role for role in ("observation", "ipython", "environment")},
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "claude", "bot", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    "human": "user",
}
_SHAREGPT_ROLES = _ROLES | {"observation": "tool", "function_response": "tool"}
_SHAREGPT_KEYS = {"from": "role", "value": "content"}
_LOSS_MARKS = ("weight", "train", "training", "loss")  # 0 or false: the message has no loss
_MESSAGE_KEYS = {"role", "content", *_SHAREGPT_KEYS, *_LOSS_MARKS}  # read with any template
_SYSTEM_COLUMNS = ("system", "system_prompt")  # a chat's first message
_OTHER_ANSWER = "PLACEHOLDER"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What a template can end with: its own refusal, or a chat of another shape.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
_MARK = "mark the answers with {% generation %} in a template of your own (`data.chat_template`)"


class Records:
    """Makes documents of records, by their columns."""

    columns: tuple[str, ...]  # that a record must have
    others: tuple[str, ...] = ()  # that have an effect if a record has them

    def unread(self, record: dict[str, Any]) -> set[str]:
        """Return the names of the columns that have a value and no effect."""
        return {name for name, value in record.items() if value is not None} - {
            *self.columns,
            *self.others,
        }


@dataclass(frozen=True)
class TextTemplate(Records):
    """Makes a text of a record: from one column, or by a template such as "{title}\\n\\n{body}".

    Null and NaN count as no text. Numbers are written out. Lists, mappings and bytes are refused:
    they would stand there as Python writes them.
    """

    columns: tuple[str, ...]
    pieces: tuple[tuple[str, str | None], ...]  # literal text, then a column
    end: tuple[int, ...] = ()  # ids that come after each text

    @classmethod
    def parse(cls, text: str, end: tuple[int, ...] = ()) -> TextTemplate:
        if "{" not in text and "}" not in text:
            return cls((text,), (("", text),), end)
        with refusing(
            (ValueError,),
            f"data: the template {text!r}",
            "write columns as {title}, braces as {{ and }}",
        ):
            parsed = list(string.Formatter().parse(text))
            if any(form or conversion for _, _, form, conversion in parsed):
                raise ValueError("a column is written as it is, without a format")
        pieces = tuple((literal, name) for literal, name, _, _ in parsed)
        return cls(
            tuple(dict.fromkeys(name for _, name in pieces if name is not None)), pieces, end
        )

    def fill(self, record: dict[str, Any]) -> str:
        # NaN, which is no number equal to itself, is a null that a table wrote as one.
        missing = {
            column
            for column in self.columns
            if record[column] is None or record[column] != record[column]
        }
        values = {column: "" if column in missing else record[column] for column in self.columns}
        for column, value in values.items():
            if not isinstance(value, (str, int, float)):
                raise ValueError(
                    f"`{column}` holds {type(value).__name__}: data.messages reads chats, data.input_ids ids"
                )
        if all(value == "" for value in values.values()):
            return ""
        text = "".join(literal + str(values.get(name, "")) for literal, name in self.pieces)
        # raises for half a surrogate pair (`\ud800`), which JSON can hold and no tokenizer takes
        text.encode()
        return text

    def encode(self, tokenizer: Tokenizer, texts: list[str]) -> Iterator[np.ndarray]:
        """A text without tokens of its own is left out: many tokenizers give none for blanks."""
        # computes no character offsets
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            if ids := encoding.ids:
                yield np.array([*ids, *self.end], np.uint32)


@dataclass(frozen=True)
class ChatColumns(Records):
    """Makes a chat of a record, from a column of messages or from two that are a prompt and its response: its text, and where the
    answers stand in it, from a character to one, in order."""

    columns: tuple[str, ...]
    pair: tuple[TextTemplate, ...]  # a prompt and its response; empty: the column holds messages
    template: str  # Jinja
    # what templates know of the tokenizer: ("bos_token", "<s>"), ...
    tokens: tuple[tuple[str, str], ...]

    def _names(self, word: str) -> bool:
        """Return whether the template has a word. Other columns and keys have no effect."""
        return re.search(rf"\b{re.escape(word)}\b", self.template) is not None

    @property
    def others(self) -> tuple[str, ...]:
        return (*_SYSTEM_COLUMNS, "tools") if self._names("tools") else _SYSTEM_COLUMNS

    def unread(self, record: dict[str, Any]) -> set[str]:
        """Return the names of columns, and of keys of messages, with a value and no effect."""
        messages = [] if self.pair else record.get(self.columns[0]) or []
        keys = {key for message in messages for key in message if message[key] is not None}
        ignored = {key for key in keys - _MESSAGE_KEYS if not self._names(key)}
        return super().unread(record) | {f"message.{key}" for key in ignored}

    def fill(self, record: dict[str, Any]) -> tuple[str, list[tuple[int, int]]] | None:
        """Return the chat that `record` holds, written out, or None if no answer is to have a loss.

        Raise ValueError if the chat is malformed or has no answer.
        """
        if self.pair:
            roles = zip(("user", "assistant"), self.pair, strict=True)
            chat = [{"role": role, "content": template.fill(record)} for role, template in roles]
        else:
            chat = self._messages(record[self.columns[0]])
        stated = [message.get("content") for message in chat[:1] if message["role"] == "system"]
        others = [record.get(name) for name in _SYSTEM_COLUMNS if name not in self.columns]
        given = [text for text in others if text and isinstance(text, str)]
        if len({*stated, *given}) > 1:
            raise ValueError(
                f"a chat with several system messages, of its own or in the columns "
                f"{' and '.join(_SYSTEM_COLUMNS)}; leave one"
            )
        chat = [{"role": "system", "content": text} for text in given[:1] if not stated] + chat
        tools = record.get("tools") if "tools" in self.others else None
        text, spans = self._render(chat, tools)
        turns = [number for number, message in enumerate(chat) if message["role"] == "assistant"]
        answers = [number for number in turns if self._is_written(chat, number, text, tools)]
        if not answers:
            raise ValueError(
                "a chat without an answer: the chat template writes nothing of a message of the "
                "role `assistant`"
            )
        trained = [
            number for number in answers if all(chat[number].get(mark, 1) for mark in _LOSS_MARKS)
        ]
        if not _MARKED.search(self.template):
            spans = self._after_prompts(chat, trained, text, tools)
        elif trained != turns:
            if len(spans) != len(turns):
                raise ValueError(
                    f"the chat template marks {len(spans)} passages of {len(turns)} answers: mark "
                    "one of each, so that answers without a loss can be told"
                )
            spans = [span for number, span in zip(turns, spans, strict=True) if number in trained]
        spans = [(begin, end) for begin, end in spans if begin < end]
        if trained and not spans:
            raise ValueError(f"the chat template writes nothing for the answers; {_MARK}")
        text.encode()  # raises for half a surrogate pair
        return (text, spans) if trained else None

    def encode(
        self, tokenizer: Tokenizer, chats: list[tuple[str, list[tuple[int, int]]]]
    ) -> Iterator[np.ndarray]:
        """A token is trained on where it has a character of an answer. A chat of which no token is has nothing to teach."""
        encodings = tokenizer.encode_batch([text for text, _ in chats], add_special_tokens=False)
        for (_, answers), encoding in zip(chats, encodings, strict=True):
            begins, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            trained = np.logical_or.reduce(
                [(begins < stop) & (stops > begin) for begin, stop in answers]
            )
            if trained.any():
                ids = np.array(encoding.ids, np.uint32)
                yield np.where(trained, ids, ids | UNTRAINED)

    def _messages(self, value: Any) -> list[dict[str, Any]]:
        """Return the messages in a column, without null keys, which tables give every message."""
        column = self.columns[0]
        chat = []
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            raise ValueError(
                f"column `{column}` holds no list of messages, each with a `role` and a `content`"
            )
        for message in value:
            keys = _SHAREGPT_KEYS if message.get("from") else {}
            roles = _SHAREGPT_ROLES if message.get("from") else _ROLES
            present = {
                key: item for key, item in message.items() if item == item and item is not None
            }
            kept = {keys.get(key, key): item for key, item in present.items()}
            role = str(kept.get("role", "(none)"))
            if role not in roles and not self._names(role):
                raise ValueError(
                    f"column `{column}` has a message of the role {role}, which is neither usual "
                    "nor in the chat template; write user, assistant, system or tool"
                )
            if not isinstance(kept.get("content", ""), str):
                raise ValueError(f"column `{column}` has a message whose content is no text")
            if any(kept.get(mark, 1) not in (0, 1) for mark in _LOSS_MARKS):
                raise ValueError(
                    f"column `{column}` has a message whose {' or '.join(_LOSS_MARKS)} is neither "
                    "0 nor 1"
                )
            chat.append(kept | {"role": roles.get(role, role)})
        return chat

    def _is_written(self, chat: list[dict[str, Any]], number: int, text: str, tools: Any) -> bool:
        """Return whether `text`, the whole chat, has more of an answer than its begin and end."""
        whole = chat[number].get("content", "")
        content = whole.strip()
        blank = {"role": "assistant", "content": whole.replace(content, "")}
        without = [*chat[:number], blank, *chat[number + 1 :]]
        return bool(content and content in text) or self._render(without, tools)[0] != text

    def _after_prompts(
        self, chat: list[dict[str, Any]], answers: list[int], text: str, tools: Any
    ) -> list[tuple[int, int]]:
        """Where each answer stands by a template that does not mark them: behind the prompt for it.

        A prompt may open a thought that the answer lacks. Such an answer stands behind what the
        template writes before any other answer.
        """
        spans = []
        for number in answers:
            prompt, _ = self._render(chat[:number], tools, add_generation_prompt=True)
            with_answer = (
                text if number + 1 == len(chat) else self._render(chat[: number + 1], tools)[0]
            )
            if not with_answer.startswith(prompt):
                other = [*chat[:number], {"role": "assistant", "content": _OTHER_ANSWER}]
                prompt = self._render(other, tools)[0].rpartition(_OTHER_ANSWER)[0] or prompt
            if not (text.startswith(with_answer) and with_answer.startswith(prompt)):
                raise ValueError(
                    f"the chat template writes message {number + 1} otherwise once others follow, "
                    f"or begins it otherwise than its prompt for it; {_MARK}"
                )
            spans.append((len(prompt), len(with_answer)))
        return spans

    def _render(
        self, chat: list[dict[str, Any]], tools: Any, **more: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """tools: a list of objects, which tables often hold as JSON."""
        from transformers.utils.chat_template_utils import render_jinja_template

        mask = _MARKED.search(self.template) is not None
        try:
            if tools:
                more["tools"] = (
                    json.loads(tools) if isinstance(tools, str) else without_nulls(tools)
                )
            texts, spans = render_jinja_template(
                [chat],
                chat_template=_NO_CLOCK + self.template,
                return_assistant_tokens_mask=mask,
                **more,
                **dict(self.tokens),
            )
        except jinja2.TemplateSyntaxError as error:
            raise InputError(
                f"data.chat_template: no Jinja that can be used: {error}; correct it, or name another"
            ) from None
        except _REFUSALS as error:
            with_tools = " and its `tools`" if tools else ""
            raise ValueError(
                f"the chat template does not take this chat{with_tools}: "
                f"{one_line(error, named=True)}"
            ) from None
        return texts[0], spans[0] if spans else []


@dataclass(frozen=True)
class TokenColumns(Records):
    """Takes a record that is tokenized: its tokens as they are, with nothing before or after them.

    The columns of `packing.token_columns` say which of them are padding, begin a document, or have
    a loss.
    """

    input_ids: str
    # The tokens themselves, with -100 where there is no loss. None: `labels`, if a record has them.
    labels: str | None
    vocabulary: int  # ids of the tokenizer

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(filter(None, (self.input_ids, self.labels))))

    @property
    def others(self) -> tuple[str, ...]:
        return (self.labels or LABELS, *TOKEN_COLUMNS)

    def fill(self, record: dict[str, Any]) -> list[np.ndarray]:
        names = [
            name
            for name in (*self.columns, *self.others)
            if name in self.columns or record.get(name) is not None
        ]
        try:
            columns = {
                name: np.fromiter(map(index, record[name] or ()), np.int64) for name in names
            }
        except (TypeError, OverflowError):
            raise ValueError(
                f"`{'` or `'.join(names)}` holds no list of whole numbers; leave out the column "
                "that has none"
            ) from None
        ids = columns.pop(self.input_ids)
        numbers = number_documents(len(ids), columns)
        real = numbers >= 0
        if len(wrong := ids[real & ((ids < 0) | (ids >= self.vocabulary))]):
            raise ValueError(
                f"column `{self.input_ids}` holds the id {wrong[0]}, and the tokenizer has {self.vocabulary:,} ids"
            )
        trained = trained_tokens(ids, columns, self.labels or LABELS)
        marked = ids if trained is None else np.where(trained, ids, ids | UNTRAINED)
        documents = np.split(
            marked[real].astype(np.uint32), np.flatnonzero(np.diff(numbers[real])) + 1
        )
        return [document for document in documents if len(document)]

    def encode(
        self, tokenizer: Tokenizer, documents: list[list[np.ndarray]]
    ) -> Iterator[np.ndarray]:
        yield from (ids for document in documents for ids in document)


def records_of(settings: DataSettings, tokenizer: TextTokenizer) -> Records:
    """Returns what makes documents of the records of `settings.source`, for chats with the template that writes them. InputError
    where there is none, or where it writes an EOS token that the tokenizer does not have."""
    if settings.input_ids is not None:
        return TokenColumns(settings.input_ids, settings.labels, tokenizer.vocab_size)
    if settings.messages is None:
        return TextTemplate.parse(settings.text, end=(tokenizer.end_of_text,))
    template = chat_template(settings.chat_template, tokenizer.name)
    tokens = {
        f"{role}_token": tokenizer.tokenizer.id_to_token(number)
        for role, number in tokenizer.special.items()
    }
    if "eos_token" in template and "eos_token" not in tokens:
        raise InputError(
            f"data.chat_template: writes `eos_token`, which {tokenizer.name} lacks; name one in its tokenizer_config.json"
        )
    named = tuple(sorted(tokens.items()))
    if isinstance(settings.messages, str):
        return ChatColumns((settings.messages,), (), template, named)
    pair = tuple(map(TextTemplate.parse, settings.messages))
    return ChatColumns(
        tuple(dict.fromkeys(pair[0].columns + pair[1].columns)), pair, template, named
    )


def chat_template(given: str | None, tokenizer: str) -> str:
    """Return the text of `data.chat_template`, or of the tokenizer's own template if that is None.

    Raise InputError if there is none.
    A tokenizer may have several templates by name: `given` chooses one, None the one named default.
    """
    if given == "chatml":
        return CHATML
    if given is not None and ("{" in given or "\n" in given):
        return given
    file = Path(given) if given else file_of(tokenizer, CHAT_TEMPLATE, needed=False)
    if file and file.is_file():
        return file.read_text(encoding="utf-8")
    config = file_of(tokenizer, "tokenizer_config.json", needed=False)
    stored = load_object(config, REMEDY).get("chat_template") if config else None
    if isinstance(stored, list):
        stored = {template["name"]: template["template"] for template in stored}
    named = {"default": stored} if isinstance(stored, str) else stored or {}
    if (given or "default") not in named:
        what = (
            f"{given}: no such file or template"
            if given
            else f"{tokenizer} has none" + " named default" * bool(named)
        )
        names = ", ".join(["chatml", *named])
        raise InputError(
            f"data.chat_template: {what}; set it to {names} or a Jinja file, or take an instruct "
            "model's tokenizer"
        )
    return named[given or "default"]
