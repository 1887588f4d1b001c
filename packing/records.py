"""Turn a record of a source into a document and its token ids.

A record has a text, a chat, or token ids. A chat template turns a chat into text. Templates are
written in Jinja, and transformers runs them in a sandbox (without importing torch). A template
cannot read today's date, because packs would then differ from day to day. A template that first
tests whether it can read the date, such as Llama's, uses a date from its own text instead.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer

from foundation.errors import InputError, as_input_error, one_line, shown
from foundation.reading import load_object
from packing.encoding import encode_texts
from packing.settings import DataSettings, SourceSettings
from packing.token_columns import (
    TOKEN_COLUMNS,
    number_documents,
    token_columns,
    trained_tokens,
    whole_numbers,
)
from packing.tokenizer import REMEDY, TextTokenizer, find_file

# Bit that marks the id of a token without a loss. Packs store a mask instead of this bit.
UNTRAINED = np.uint32(1 << 31)
# Name of a chat template's file, beside a tokenizer.json.
CHAT_TEMPLATE = "chat_template.jinja"
# Prefix of every template. Templates read the date with `strftime_now`. The prefix makes this name
# undefined, because `there_is_no_clock` is undefined. `+` keeps a line break after the statement.
_NO_CLOCK = "{% set strftime_now = there_is_no_clock +%}"
# Template with plain words as marks of roles, so that it needs no special token except EOS. An
# answer that consists of tool calls may have no content.
PLAIN = (
    "{% for message in messages %}"
    "{% set words = message.content or '' if message.role == 'assistant' else message.content %}"
    "{{ message.role.capitalize() + ':\n' + words.strip() }}"
    "{{ eos_token if message.role == 'assistant' else '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_BUILT_IN = {"plain": PLAIN, "chatml": CHATML}
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
# Usual roles. A message may also have another role that the template names.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Names in ShareGPT's messages: {"from": "human", "value": "Hi"}.
_SHAREGPT_KEYS = {"from": "role", "value": "content"}
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# Keys of a message that are read with any template. An answer with `weight: 0` has no loss.
_MESSAGE_KEYS = {"role", "content", "weight"}
# Keys by which other programs exclude an answer from the loss.
_OTHER_WEIGHTS = ("train", "training", "loss")
# Names of the key with the reasoning of an answer. transformers gives templates the reasoning under
# the first two names too.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MESSAGES = "messages, each with a `role` and a `content`"
_TOOLS = 'objects, each with the schema of a function: {"type": "function", "function": {...}}'
_CALLS = "objects, each with the name and the arguments of a function"
_CONVERT = "convert the chats with `datasets.map` (docs/data.md#chats has an example)"
# Pattern that finds a comparison of a content with none. A template with such a comparison accepts
# a message with null as its content, for example an answer that consists of tool calls.
_NULL_CONTENT = re.compile(r"content\W*\s(is|==|!=)(\s+not)?\s+none\b", re.IGNORECASE)
# Text that replaces an answer, to find where the answer starts.
_OTHER_ANSWER = "PLACEHOLDER"
# Pattern of the statement with which a template marks the beginning of an answer.
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Exceptions of a template that rejects a chat, or that expects a chat of another form.
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
_MARK = (
    "set data.chat_template to a template of your own that marks the answers with {% generation %}"
)

# Index of a span's first character in a text, and the index after its last one.
Span = tuple[int, int]


@dataclass(frozen=True)
class RecordRule:
    """Base class of rules that turn a record into a document."""

    # Names of the columns that a record must have.
    columns: tuple[str, ...]
    # Names of the columns that are read if a record has them.
    optional: tuple[str, ...]

    @property
    def read_columns(self) -> list[str]:
        """Names of all columns that are read."""
        return [*self.columns, *self.optional]

    def unread(self, record: dict[str, Any]) -> set[str]:
        """Return the names of the columns that have a value but are not read."""
        names = {name for name, value in record.items() if value is not None}
        return names.difference(self.read_columns)

    def fill(self, record: dict[str, Any]) -> Any:
        """Return the document of a record. If the record is empty, return a false value like "".

        The record has all `columns`. Raises ValueError if the record is malformed.
        """
        raise NotImplementedError

    def encode(self, tokenizer: Tokenizer, documents: list[Any]) -> Iterator[np.ndarray]:
        """Yield the token ids of each document: [tokens] uint32.

        The bit `UNTRAINED` marks tokens without a loss. A text without tokens is skipped, and so is
        a chat whose tokens all have this bit.
        """
        raise NotImplementedError


# Rule for callers that read columns and no documents.
WITHOUT_COLUMNS = RecordRule(columns=(), optional=())


@dataclass(frozen=True)
class TextTemplate(RecordRule):
    """Rule that reads a text from one column, or fills a template such as "{title}\\n\\n{body}".

    Null, NaN and infinity are replaced by the empty text, and other numbers are written as text.
    Lists, mappings and bytes raise ValueError, because they would be written in Python's notation.
    """

    # Pairs: a literal text, and the name of the column whose value follows the text, or None.
    pieces: tuple[tuple[str, str | None], ...]
    # Token ids that are appended to each text.
    end: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str, end: tuple[int, ...] = ()) -> TextTemplate:
        """Return the template for the value of `data.text`. Raise InputError if it is invalid."""
        if "{" not in text and "}" not in text:
            return cls(columns=(text,), optional=(), pieces=(("", text),), end=end)
        with as_input_error(
            (ValueError,),
            f"data: the template {text!r} is not valid",
            "write a column as {title}, and write braces as {{ and }}",
        ):
            parsed = list(string.Formatter().parse(text))
            if any(form or conversion for _, _, form, conversion in parsed):
                raise ValueError("a column may not have a format or a conversion")
        pieces = tuple((literal, name) for literal, name, _, _ in parsed)
        columns = tuple(dict.fromkeys(name for _, name in pieces if name is not None))
        return cls(columns, optional=(), pieces=pieces, end=end)

    def fill(self, record: dict[str, Any]) -> str:
        # The last piece may have no column.
        values: dict[str | None, Any] = {None: ""}
        for column in self.columns:
            value = record.get(column)
            # A table may hold a null as NaN, and a number that overflowed as infinity.
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                value = ""
            if not isinstance(value, (str, int, float)):
                raise ValueError(
                    f"column `{column}` has a value of type {type(value).__name__}, which is not a "
                    "text; for chats set data.messages to the names of their columns, for token "
                    "ids set data.input_ids"
                )
            values[column] = value
        if all(value == "" for value in values.values()):
            return ""
        text = "".join(literal + str(values[column]) for literal, column in self.pieces)
        # JSON can contain half of a surrogate pair (`\ud800`), which no tokenizer accepts. Raise an
        # error for it here.
        text.encode()
        return text

    def encode(self, tokenizer: Tokenizer, texts: list[str]) -> Iterator[np.ndarray]:
        # Use the fast method, which does not compute offsets.
        for parts in encode_texts(tokenizer, texts, tokenizer.encode_batch_fast):
            ids = [np.array(part.ids, np.uint32) for part in parts]
            # Skip texts without tokens: many tokenizers return no tokens for blanks.
            if any(map(len, ids)):
                yield np.concatenate([*ids, np.array(self.end, np.uint32)])


@dataclass(frozen=True)
class ChatColumns(RecordRule):
    """Rule that reads a chat from a column of messages, or from two columns: prompt and response.

    A document is a pair: the text of a chat, and the spans of the answers that have a loss, in
    order. A span is the index of an answer's first character, and the index after its last one.
    """

    # Prompt and response. The tuple is empty for a column of messages.
    pair: tuple[TextTemplate, ...]
    # Text of the chat template, in Jinja.
    template: str
    # Names and texts of the tokenizer's special tokens, such as ("bos_token", "<s>").
    tokens: tuple[tuple[str, str | None], ...]

    def unread(self, record: dict[str, Any]) -> set[str]:
        """Return the names of columns, and of keys of messages, that have a value but no effect."""
        keys = {key for message in self._chat(record) for key in message}
        ignored = {f"message.{key}" for key in keys - _MESSAGE_KEYS if not self._reads(key)}
        return super().unread(record) | ignored

    def fill(self, record: dict[str, Any]) -> tuple[str, list[Span]] | None:
        """Return the text and spans of the chat in `record`.

        Returns None if the record has no messages, or if every answer is empty or has no loss.
        Raises ValueError if the chat is malformed, has no message of the assistant, or has a
        message that the template does not write.
        """
        chat = self._chat(record)
        answers = [number for number, message in enumerate(chat) if message["role"] == "assistant"]
        if chat and not answers:
            raise ValueError("the chat has no answer: it has no message with the role `assistant`")
        trained = [number for number in answers if self._has_loss(chat[number])]
        if not trained:
            return None
        tools = self._tools(record)
        chat = self._with_arguments(chat, tools)
        text, marked_spans = self._render(chat, tools)
        self._check_prompts(chat, text, tools)
        trained = [number for number in trained if self._is_written(chat, number, text, tools)]
        if _MARKED.search(self.template):
            spans = _trained_spans(trained, answers, marked_spans)
        else:
            spans = self._spans_after_prompts(chat, trained, text, tools)
        spans = [(start, end) for start, end in spans if start < end]
        if not spans:
            raise ValueError(f"the chat template writes no text for the answers; {_MARK}")
        # This raises an error for half of a surrogate pair.
        text.encode()
        return text, spans

    def encode(
        self, tokenizer: Tokenizer, chats: list[tuple[str, list[Span]]]
    ) -> Iterator[np.ndarray]:
        encodings = encode_texts(tokenizer, [text for text, _ in chats], tokenizer.encode_batch)
        for (_, spans), parts in zip(chats, encodings, strict=True):
            ids = np.concatenate([_mark_untrained(part.ids, part.offsets, spans) for part in parts])
            if (ids < UNTRAINED).any():
                yield ids

    def _chat(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of a record. An empty column has no messages."""
        if self.pair:
            prompt, response = (template.fill(record) for template in self.pair)
            return [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": response},
            ]
        column = self.columns[0]
        return list(map(self._message, _objects(column, record.get(column), _MESSAGES)))

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with OpenAI's keys and roles, without null values and empty lists.

        A null content is kept if the template compares the content with none. An empty list of tool
        calls is dropped, because some templates write calls if a message has this key.
        """
        keys = _SHAREGPT_KEYS if "from" in message else {}
        values: dict[str, Any] = {"content": None} if _NULL_CONTENT.search(self.template) else {}
        for key, item in message.items():
            if item is not None and item != []:
                values[keys.get(key, key)] = item
        if keys:
            role = values.get("role")
            values["role"] = _SHAREGPT_ROLES.get(str(role), role)
        self._check_message(values)
        return values

    def _check_message(self, values: dict[str, Any]) -> None:
        """Raise ValueError if a message is malformed, or has a key that would be ignored."""
        role = values.get("role")
        if role not in _ROLES and not _has_word(self.template, str(role)):
            raise ValueError(
                f"a message has the role {role}, which is neither a usual role nor in the chat "
                f"template; use {', '.join(_ROLES)}"
            )
        content = values.get("content")
        if content is not None and not isinstance(content, str):
            raise ValueError(
                f"a message has a content that is not a text, but {shown(content)}; {_CONVERT}"
            )
        # Raise ValueError if the calls are a JSON text, because a template would write a call for
        # each of its characters.
        if self._reads("tool_calls"):
            _objects("message.tool_calls", values.get("tool_calls"), _CALLS)
        if values.get("weight", 1) not in (0, 1):
            raise ValueError("a message has a `weight` that is neither 0 nor 1")
        for key in _OTHER_WEIGHTS:
            if values.get(key) in (False, 0):
                raise ValueError(
                    f"a message has the key `{key}`, which is not read; if an answer has no loss, "
                    "set its `weight` to 0"
                )

    def _tools(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the tools of a record, if the template uses them."""
        tools = record.get("tools") if "tools" in self.optional else None
        return _objects("tools", tools, _TOOLS)

    def _has_loss(self, answer: dict[str, Any]) -> bool:
        """Return True if the template writes something of an answer, and its weight is not 0."""
        has_text = _content_of(answer) or any(map(self._reads, answer.keys() - _MESSAGE_KEYS))
        return bool(has_text and answer.get("weight", 1))

    def _reads(self, key: str) -> bool:
        """Return True if the template has the name of a message's key, or another name for it."""
        names = {key, *_REASONING[:2]} if key in _REASONING else {key}
        return any(_has_word(self.template, name) for name in names)

    def _with_arguments(self, chat: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
        """Return `chat` with the arguments of tool calls in the form that the template expects.

        In OpenAI's format, arguments are an object as JSON text. Most templates expect the object,
        and would encode the text again. Other templates expect the text, and reject the object or
        write it in Python's notation. A template that writes both forms alike gets the text.
        """
        objects = _change_arguments(chat, _as_object)
        texts = _change_arguments(objects, _as_text)
        if objects == texts:
            return chat
        with_texts = self._text(texts, tools)
        if with_texts is None:
            return objects
        with_objects = self._text(objects, tools)
        rejects_objects = with_objects is None
        writes_both_alike = with_objects == with_texts
        writes_python = with_objects == self._text(_change_arguments(objects, str), tools)
        if rejects_objects or writes_both_alike or writes_python:
            return _change_arguments(chat, _as_text)
        return objects

    def _check_prompts(self, chat: list[dict[str, Any]], text: str, tools: Any) -> None:
        """Raise ValueError if the template does not write a message that is no answer.

        `_is_written` describes the arguments.
        """
        for number, message in enumerate(chat):
            must_be_written = message["role"] != "assistant" and _content_of(message)
            if must_be_written and not self._is_written(chat, number, text, tools):
                raise ValueError(
                    f"the chat template does not write message {number + 1}, whose role is "
                    f"{message['role']}; either give the message another role, or set "
                    "data.chat_template to another template"
                )

    def _is_written(self, chat: list[dict[str, Any]], number: int, text: str, tools: Any) -> bool:
        """Return True if the template writes the content of message `number` of a chat.

        `text` is the text of the complete chat with its `tools`. If the words of a message are not
        in the text, the template has changed or dropped them. So test whether the text changes with
        the content. A tool's result, such as a number, may also be elsewhere in the chat, so it is
        not searched.
        """
        role = chat[number]["role"]
        content = _content_of(chat[number])
        if role in ("system", "user", "assistant") and content and content in text:
            return True
        blank = {"role": role, "content": ""}
        # A template that rejects a blank message reads the message's content.
        return self._text([*chat[:number], blank, *chat[number + 1 :]], tools) != text

    def _spans_after_prompts(
        self, chat: list[dict[str, Any]], answers: list[int], text: str, tools: Any
    ) -> list[Span]:
        """Return the span of each answer, for a template that does not mark answers.

        `answers` are the indices of the answers in `chat`, and `text` is the text of the complete
        chat. An answer starts where its prompt ends, and ends before the next message.
        """
        spans = []
        for number in answers:
            is_last = number + 1 == len(chat)
            with_answer = text if is_last else self._text(chat[: number + 1], tools) or ""
            prompt = self._prompt(chat[:number], with_answer, tools)
            if prompt is None or not text.startswith(with_answer):
                raise ValueError(
                    f"the chat template writes message {number + 1} in another way if other "
                    "messages follow, rejects the chat without these, or does not begin the "
                    f"message with the prompt for it; {_MARK}"
                )
            spans.append((len(prompt), len(with_answer)))
        return spans

    def _prompt(self, chat: list[dict[str, Any]], with_answer: str, tools: Any) -> str | None:
        """Return the prompt for the answer to a chat, or None if `with_answer` begins otherwise.

        `with_answer` is the text of the chat and the recorded answer. The prompt is the text that
        the template writes when the model has to generate the answer. The prompt may end with the
        start of a thought that the recorded answer does not have, or the template may reject the
        prompt of an empty chat. In these cases, the prompt ends where the template would write a
        placeholder for the answer.
        """
        prompt = self._text(chat, tools, add_generation_prompt=True)
        if prompt is None or not with_answer.startswith(prompt):
            other = [*chat, {"role": "assistant", "content": _OTHER_ANSWER}]
            prompt, mark, _ = (self._text(other, tools) or "").rpartition(_OTHER_ANSWER)
            if not mark:
                return None
        return prompt if with_answer.startswith(prompt) else None

    def _text(self, chat: list[dict[str, Any]], tools: Any, **more: Any) -> str | None:
        """Return the text of a chat, or None if the template rejects the chat.

        `_render` describes the arguments.
        """
        with suppress(ValueError):
            return self._render(chat, tools, **more)[0]
        return None

    def _render(
        self, chat: list[dict[str, Any]], tools: Any, **more: Any
    ) -> tuple[str, list[Span]]:
        """Return the text of a chat, and the spans that the template marks.

        `chat` has the messages, and `tools` the functions that the model may call (`_tools`).
        `more` has further arguments of the renderer. Raises ValueError if the template rejects the
        chat, and InputError if the template is not valid Jinja.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        marks_answers = _MARKED.search(self.template) is not None
        options: dict[str, Any] = dict(self.tokens) | more
        try:
            rendered: Any = render_jinja_template(
                [chat],
                tools or None,
                chat_template=_NO_CLOCK + self.template,
                return_assistant_tokens_mask=marks_answers,
                **options,
            )
        except jinja2.TemplateSyntaxError as error:
            raise InputError(
                f"data.chat_template: the template is not valid Jinja: {error}; either "
                "correct this template, or choose another template"
            ) from None
        except _REFUSALS as error:
            with_tools = " and its `tools`" if tools else ""
            raise ValueError(
                f"the chat template rejects this chat{with_tools}: {one_line(error, named=True)}"
            ) from None
        texts, spans = rendered
        return texts[0], spans[0] if spans else []


def _trained_spans(trained: list[int], answers: list[int], marked_spans: list[Span]) -> list[Span]:
    """Return the marked spans of the answers that have a loss.

    Args:
        trained: Indices of the answers that have a loss.
        answers: Indices of all answers.
        marked_spans: Spans that the template marks in all answers.
    """
    if trained == answers:
        return marked_spans
    if len(marked_spans) != len(answers):
        raise ValueError(
            f"the chat template marks {len(marked_spans)} passages in {len(answers)} answers, so "
            "answers without a loss cannot be identified; mark one passage in each answer"
        )
    by_answer = dict(zip(answers, marked_spans, strict=True))
    return [by_answer[number] for number in trained]


def _mark_untrained(ids: Any, offsets: Any, spans: list[Span]) -> np.ndarray:
    """Return token ids as an array, with the bit `UNTRAINED` in tokens without a loss.

    `offsets` are the first character of each token and the character after it. A token has a loss
    if one of its characters is in `spans`, which are the answers of a chat.
    """
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    trained = np.logical_or.reduce([(starts < end) & (ends > start) for start, end in spans])
    return np.array(ids, np.uint32) | np.where(trained, np.uint32(0), UNTRAINED)


@dataclass(frozen=True)
class TokenColumns(RecordRule):
    """Rule that reads token ids from a record, and adds no special tokens.

    The columns of `packing.token_columns` determine which tokens are padding, which start a
    document, and which have a loss. A record may have several documents.
    """

    # Number of token ids that the tokenizer has.
    vocabulary: int

    def fill(self, record: dict[str, Any]) -> list[np.ndarray]:
        ids = whole_numbers(self.columns[0], record[self.columns[0]] or ())
        columns = token_columns(record)
        numbers = number_documents(len(ids), columns)
        is_real = numbers >= 0
        unknown = ids[is_real & ((ids < 0) | (ids >= self.vocabulary))]
        if len(unknown):
            raise ValueError(
                f"column `{self.columns[0]}` has the id {unknown[0]}, but the tokenizer has only "
                f"{self.vocabulary:,} ids; set data.tokenizer to the tokenizer of these ids"
            )
        trained = trained_tokens(ids, columns)
        if trained is not None:
            ids = np.where(trained, ids, ids | UNTRAINED)
        starts = np.flatnonzero(np.diff(numbers[is_real])) + 1
        documents = np.split(ids[is_real].astype(np.uint32), starts)
        return [document for document in documents if len(document)]

    def encode(
        self, tokenizer: Tokenizer, documents: list[list[np.ndarray]]
    ) -> Iterator[np.ndarray]:
        yield from (ids for document in documents for ids in document)


def record_rule(settings: DataSettings, tokenizer: TextTokenizer) -> RecordRule:
    """Return the rule that turns the records of `settings.source` into documents.

    Raises InputError if a chat has no template, or if the tokenizer lacks EOS or another special
    token that the template writes.
    """
    if settings.input_ids is not None:
        return TokenColumns((settings.input_ids,), TOKEN_COLUMNS, tokenizer.vocab_size)
    if settings.messages is None:
        return TextTemplate.parse(settings.text, end=(tokenizer.end_of_text,))
    template = chat_template(settings.chat_template, tokenizer.name)
    if settings.chat_template == "chatml":
        _require_tokens_of_chatml(tokenizer)
    if "eos_token" in template and "eos" not in tokenizer.special:
        raise InputError(
            f"data.chat_template: the template uses `eos_token`, but {tokenizer.name} has no EOS "
            "token; set `eos_token` in its tokenizer_config.json"
        )
    tokens = {
        f"{role}_token": tokenizer.tokenizer.id_to_token(number)
        for role, number in tokenizer.special.items()
    }
    return chat_columns(settings, template, tuple(sorted(tokens.items())))


def _require_tokens_of_chatml(tokenizer: TextTokenizer) -> None:
    """Raise InputError if the tokenizer lacks a special token of the template CHATML."""
    if None in map(tokenizer.tokenizer.token_to_id, _CHATML_TOKENS):
        raise InputError(
            f"data.chat_template: chatml: {tokenizer.name} lacks the tokens <|im_start|> and "
            "<|im_end|>; either set data.chat_template=plain, which needs only EOS, or train the "
            "tokenizer with `python -m pretrain tokenizer ... --special '<|im_start|>' --special "
            "'<|im_end|>'`"
        )


def chat_columns(
    settings: SourceSettings, template: str, tokens: tuple[tuple[str, str | None], ...]
) -> ChatColumns:
    """Return the rule that reads the chats in the columns `settings.messages`.

    `template` and `tokens` are described in `ChatColumns`.
    """
    optional = ("tools",) if _has_word(template, "tools") else ()
    if isinstance(settings.messages, str):
        return ChatColumns(
            (settings.messages,), optional, pair=(), template=template, tokens=tokens
        )
    pair = tuple(map(TextTemplate.parse, settings.messages or ()))
    columns = tuple(dict.fromkeys(name for part in pair for name in part.columns))
    return ChatColumns(columns, optional, pair=pair, template=template, tokens=tokens)


def _objects(column: str, value: Any, form: str) -> list[dict[str, Any]]:
    """Return the list of objects in a column, or an empty list if the column is empty.

    Raises ValueError if `value` is not such a list. `form` names the objects in the message.
    """
    objects = value or []
    if not isinstance(objects, list) or not all(isinstance(item, dict) for item in objects):
        raise ValueError(
            f"column `{column}` is not a list of {form}, but {shown(value)}; {_CONVERT}"
        )
    return objects


def _content_of(message: dict[str, Any]) -> str:
    """Return the content of a message without blanks at its ends."""
    return (message.get("content") or "").strip()


def _change_arguments(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to the arguments of each tool call inside of it."""
    if isinstance(value, list):
        return [_change_arguments(item, change) for item in value]
    if isinstance(value, dict):
        return {
            key: change(item) if key == "arguments" else _change_arguments(item, change)
            for key, item in value.items()
        }
    return value


def _as_object(arguments: Any) -> Any:
    """Return the arguments of a tool call as an object. Return a text that is no object unchanged.

    An empty text means no arguments.
    """
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(arguments or "{}")
            return value if isinstance(value, dict) else arguments
    return arguments


def _as_text(arguments: Any) -> str:
    """Return the arguments of a tool call as JSON text. Return any text but "" unchanged."""
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps(arguments, ensure_ascii=False)


def _has_word(template: str, word: str) -> bool:
    """Return True if `template` contains `word`.

    A column or a key has no effect if the template does not contain its name.
    """
    return re.search(rf"\b{re.escape(word)}\b", template) is not None


def chat_template(given: str | None, tokenizer: str) -> str:
    """Return the chat template that `given`, the value of `data.chat_template`, selects.

    `given` may be "plain", "chatml", a template, or a Jinja file. None selects the tokenizer's
    template. Raises InputError if there is no such template.
    """
    given = _BUILT_IN.get(given or "", given)
    if given is not None and ("{" in given or "\n" in given):
        return given
    if given is not None:
        with as_input_error(
            (OSError, ValueError),
            f"data.chat_template: {given}: cannot be read",
            "set data.chat_template to plain, chatml or a Jinja file",
        ):
            return Path(given).read_text(encoding="utf-8")
    if file := find_file(tokenizer, CHAT_TEMPLATE):
        return file.read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        file = find_file(tokenizer, name)
        template = load_object(file, REMEDY).get("chat_template") if file else None
        if isinstance(template, str):
            return template
    raise InputError(
        f"data.chat_template: {tokenizer} has no template, or several; either set "
        "data.chat_template to plain (which suits every tokenizer), chatml or a Jinja file, or set "
        "data.tokenizer to the tokenizer of an instruct model"
    )
