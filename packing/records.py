"""What a record becomes by the `data` settings, and its ids: a text, a chat, or the tokens that it holds already.

Each of the three classes has the `columns` that it reads, `fill`, which makes a document of a record with all of them (something
false where there is none; ValueError for a malformed record), and `encode`, which gives the ids of documents, [tokens] uint32,
those that are not to be learnt with `UNTRAINED`, and leaves out documents without any to learn.

Chats are written out by a chat template: Jinja, which transformers runs in a sandbox (and without loading torch). There is no
clock: a template that asks for today's date would make other packs every day. Those that first look whether there is a clock, as
Llama's, use the date that they name instead.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer

from foundation.errors import InputError
from foundation.reading import load_object, one_line, refusing
from packing.arrow import IGNORE, same_or_ignored
from packing.settings import DataSettings
from packing.tokenizer import REMEDY, TextTokenizer, file_of

# a bit in the id of a token that is not to be learnt, until it is in a pack
UNTRAINED = np.uint32(1 << 31)
CHAT_TEMPLATE = "chat_template.jinja"  # its file, beside a tokenizer.json
# an undefined name; `+` leaves a line break behind it
_NO_CLOCK = "{% set strftime_now = there_is_no_clock +%}"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What a template can end with: its own refusal, or a chat of another shape.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
_MARK = "mark the answers with {% generation %} in a template of your own (`data.chat_template`)"


@dataclass(frozen=True)
class TextTemplate:
    """Makes a text of a record: from one column, or by a template such as "{title}\\n\\n{body}".

    Null counts as no text and numbers are written out; lists, mappings and bytes would stand there as Python writes them, and are
    refused.
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
        values = {
            column: "" if record[column] is None else record[column] for column in self.columns
        }
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
class ChatColumns:
    """Makes a chat of a record, from a column of messages or from two that are a prompt and its response: its text, and where the
    answers stand in it, from a character to one, in order."""

    columns: tuple[str, ...]
    pair: tuple[TextTemplate, ...]  # a prompt and its response; empty: the column holds messages
    template: str  # Jinja
    # what templates know of the tokenizer: ("bos_token", "<s>"), ...
    tokens: tuple[tuple[str, str], ...]

    def fill(self, record: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The chat that `record` holds, written out. Raises ValueError, also where nobody answers."""
        if self.pair:
            roles = zip(("user", "assistant"), self.pair, strict=True)
            chat = [{"role": role, "content": template.fill(record)} for role, template in roles]
        else:
            chat = _messages(record, self.columns[0])
        answers = [
            number
            for number, message in enumerate(chat)
            if message["role"] == "assistant"
            and (message.get("content", "").strip() or message.get("tool_calls"))
        ]
        if not answers:
            raise ValueError(
                "a chat without an answer: no message of the role `assistant` holds any text"
            )
        text, spans = self._render(chat)
        if not _MARKED.search(self.template):
            spans = self._after_prompts(chat, answers, text)
        if not (spans := [(begin, end) for begin, end in spans if begin < end]):
            raise ValueError(f"the chat template writes nothing for the answers; {_MARK}")
        text.encode()  # raises for half a surrogate pair
        return text, spans

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

    def _after_prompts(
        self, chat: list[dict[str, Any]], answers: list[int], text: str
    ) -> list[tuple[int, int]]:
        """Where each answer stands by a template that does not mark them: behind the prompt for it."""
        spans = []
        for number in answers:
            before, _ = self._render(chat[:number], add_generation_prompt=True)
            with_answer = text if number + 1 == len(chat) else self._render(chat[: number + 1])[0]
            if not (text.startswith(with_answer) and with_answer.startswith(before)):
                raise ValueError(
                    f"the chat template writes message {number + 1} otherwise once others follow; {_MARK}"
                )
            spans.append((len(before), len(with_answer)))
        return spans

    def _render(
        self, chat: list[dict[str, Any]], **more: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        mask = _MARKED.search(self.template) is not None
        try:
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
            raise ValueError(
                f"the chat template does not take this chat: {one_line(error, named=True)}"
            ) from None
        return texts[0], spans[0] if spans else []


def _messages(record: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """The messages of a record, without keys that are null: tables give every message the keys of all."""
    value = record[column]
    # ShareGPT's
    if isinstance(value, list) and all(
        isinstance(message, dict) and message.get("from") for message in value
    ):
        value = [
            {"role": _ROLES.get(each["from"], each["from"]), "content": each.get("value")}
            for each in value
        ]
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and message.get("role") for message in value
    ):
        raise ValueError(
            f"column `{column}` holds no list of messages, each with a `role` and a `content`"
        )
    if not all(isinstance(message.get("content") or "", str) for message in value):
        raise ValueError(f"column `{column}` has a message whose content is no text")
    return [{key: item for key, item in message.items() if item is not None} for message in value]


@dataclass(frozen=True)
class TokenColumns:
    """Takes a record that is tokenized: its tokens as they are, with nothing put before or after them."""

    input_ids: str
    labels: str | None  # the tokens themselves, with `IGNORE` where there is no loss
    vocabulary: int  # ids of the tokenizer

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(filter(None, (self.input_ids, self.labels))))

    def fill(self, record: dict[str, Any]) -> list[np.ndarray]:
        try:
            tokens = np.array(record[self.input_ids] or [], np.int64)
            labels = np.array(record[self.labels] or [], np.int64) if self.labels else tokens
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"{' and '.join(f'`{name}`' for name in self.columns)}: not a list of ids"
            ) from None
        if len(wrong := tokens[(tokens < 0) | (tokens >= self.vocabulary)]):
            raise ValueError(
                f"column `{self.input_ids}` holds the id {wrong[0]}, and the tokenizer has {self.vocabulary:,} ids"
            )
        if not same_or_ignored(labels, tokens):
            raise ValueError(
                f"column `{self.labels}` is neither `{self.input_ids}` nor {IGNORE}; write it unshifted, or leave data.labels out"
            )
        return (
            [
                np.where(
                    labels == IGNORE, tokens.astype(np.uint32) | UNTRAINED, tokens.astype(np.uint32)
                )
            ]
            if len(tokens)
            else []
        )

    def encode(
        self, tokenizer: Tokenizer, documents: list[list[np.ndarray]]
    ) -> Iterator[np.ndarray]:
        yield from (ids for document in documents for ids in document)


Records = TextTemplate | ChatColumns | TokenColumns


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
    """The text of `data.chat_template`, or of the tokenizer's own where that is None. InputError where there is none."""
    if given == "chatml":
        return CHATML
    if given is not None and ("{" in given or "\n" in given):
        return given
    if given is not None and not Path(given).is_file():
        raise InputError(
            f"data.chat_template: {given}: no such file; name a Jinja file, or write the template itself"
        )
    if file := Path(given) if given else file_of(tokenizer, CHAT_TEMPLATE, needed=False):
        return file.read_text(encoding="utf-8")
    config = file_of(tokenizer, "tokenizer_config.json", needed=False)
    template = load_object(config, REMEDY).get("chat_template") if config else None
    if template is None:
        raise InputError(
            f"data.chat_template: {tokenizer} has none; set it to chatml or a Jinja file, or take an instruct model's tokenizer"
        )
    return template
