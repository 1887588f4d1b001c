"""What a record becomes by the `data` settings, and its ids: a text, a chat, or the tokens that it holds already.

Chats are written out by a chat template: Jinja, which transformers runs in a sandbox (and without loading torch). There is no
clock: a template that asks for today's date would make other packs every day. Those that first look whether there is a clock, as
Llama's, use the date that they name instead.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from foundation.errors import InputError
from foundation.reading import load_object, one_line
from packing.arrow import IGNORE, same_or_ignored
from packing.settings import DataSettings
from packing.sources import Chunk, Encoded, Place, Records, open_stream
from packing.tokenizer import REMEDY, TextTokenizer, file_of

CHAT_TEMPLATE = "chat_template.jinja"  # its file, beside a tokenizer.json
_NO_CLOCK = "{% set strftime_now = there_is_no_clock +%}"  # an undefined name; `+` leaves a line break behind it
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What a template can end with: its own refusal, or a chat of another shape.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
_MARK = "mark the answers with {% generation %} in a template of your own (`data.chat_template`)"


class BadRecord(ValueError):
    """A record gives no document; the message says why, the caller adds where."""


@dataclass(frozen=True)
class Counts:
    """What records are made into, and what is left out of them."""

    documents: int = 0
    tokens: int = 0
    trained: int = 0  # of the tokens, those that are to be learnt
    skipped: int = 0  # malformed records, with on_bad_line: skip
    empty: int = 0  # records without any text
    first_skipped: str | None = None  # where, and why

    def __add__(self, other: Counts) -> Counts:
        names = ("documents", "tokens", "trained", "skipped", "empty")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Counts(**sums, first_skipped=self.first_skipped or other.first_skipped)


@dataclass(frozen=True)
class Tokens:
    """Documents as ids, in the order of their source: those of a chunk, or of all."""

    tokens: np.ndarray  # [sum of lengths] uint32
    lengths: np.ndarray  # [documents] int64, EOS included
    trained: np.ndarray | None  # [sum of lengths] bool, which tokens are to be learnt; None: all
    counts: Counts
    progress: float | None = None  # as of its chunk
    after: Place = field(default_factory=dict)  # as of its chunk


def joined(parts: Sequence[Tokens], masked: bool, place: Place) -> Tokens:
    """The documents of `parts`, one after another; of none at `place`."""
    tokens = np.concatenate([np.zeros(0, np.uint32), *(part.tokens for part in parts)])
    lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
    trained = np.concatenate([np.zeros(0, np.bool_), *(part.trained for part in parts)]) if masked else None
    counts = sum((part.counts for part in parts), Counts())
    return Tokens(tokens, lengths, trained, counts, after=parts[-1].after if parts else place)


def tokenize(chunk: Chunk, tokenizer: Tokenizer, records: Records, settings: DataSettings) -> Tokens:
    """The documents of `chunk` as ids."""
    documents, left_out = read_chunk(chunk, records, settings.on_bad_line == "skip")
    encoded = list(records.encode(tokenizer, documents))
    lengths = np.array([len(ids) for ids, _ in encoded], np.int64)
    tokens = np.concatenate([np.zeros(0, np.uint32), *(ids for ids, _ in encoded)])
    trained = np.concatenate([np.zeros(0, np.bool_), *(mask for _, mask in encoded)]) if settings.masks else None
    learnt = len(tokens) if trained is None else int(np.count_nonzero(trained))
    counts = left_out + Counts(len(encoded), len(tokens), learnt, empty=len(documents) - len(encoded))
    return Tokens(tokens, lengths, trained, counts, chunk.progress, chunk.after)


def read_chunk(chunk: Chunk, records: Records, skip_bad: bool) -> tuple[list[Any], Counts]:
    """The documents of `chunk`, as `records` fill them, and counts of what was left out. A malformed record raises InputError
    with its place, or is counted with `skip_bad`."""
    documents, skipped, empty = [], [], 0
    for place, record in _records(chunk, records):
        try:
            if isinstance(record, Path):
                document = _read_text(record)
            else:
                document = records.fill(_parsed(record, records) if isinstance(record, bytes) else record)
        except (BadRecord, UnicodeError) as error:
            if not skip_bad:
                raise InputError(f"{place}: {error}; or set data.on_bad_line: skip to leave such records out") from None
            skipped.append(f"{place}: {error}")
            continue
        if document:
            documents.append(document)
        else:
            empty += 1
    return documents, Counts(skipped=len(skipped), empty=empty, first_skipped=skipped[0] if skipped else None)


def _records(chunk: Chunk, records: Records) -> Iterator[tuple[str, bytes | Path | dict[str, Any]]]:
    """Every record, a line not yet parsed and a text file not yet read, with its place."""
    if chunk.kind == "jsonl":
        lines = enumerate(chunk.payload.split(b"\n"), chunk.first)
        yield from ((f"{chunk.origin}:{number}", line) for number, line in lines if line.strip())
    elif chunk.kind == "files":
        yield from ((path, Path(path)) for path in json.loads(chunk.payload))
    else:
        table = pa.ipc.open_stream(chunk.payload).read_all().select(records.columns)
        yield from ((f"{chunk.origin}, row {row}", record) for row, record in enumerate(table.to_pylist(), chunk.first))


def _parsed(line: bytes, records: Records) -> dict[str, Any]:
    """The record that a line holds, with all columns."""
    try:
        value = json.loads(str(line, "utf-8-sig"))
    except ValueError as error:
        raise BadRecord(f"the line is not valid JSON: {error}; each is one whole record, as `jq -c .[]` writes a list") from None
    columns = list(value) if isinstance(value, dict) else []
    if absent := [column for column in records.columns if column not in columns]:
        raise BadRecord(f"no column `{absent[0]}`; the columns are: {', '.join(columns)}. Set {records.keys} to one of them")
    return value


def _read_text(path: Path) -> str:
    try:
        stream, raw = open_stream(path)
        with raw, stream:
            return str(stream.read(), "utf-8-sig")
    except OSError as error:
        raise BadRecord(f"cannot be read: {error}") from None


@dataclass(frozen=True)
class TextTemplate:
    """Makes a text of a record: from one column as it is, or by a template such as "{title}\\n\\n{body}".

    In a template, null counts as no text and numbers are written out; lists, mappings and bytes would stand there as Python
    writes them, and are refused.
    """

    columns: tuple[str, ...]
    pieces: tuple[tuple[str, str | None], ...]  # literal text, then a column
    keys: str = "data.text"  # the setting it comes from
    is_column: bool = False
    end: tuple[int, ...] = ()  # ids that come after each text

    @classmethod
    def parse(cls, text: str, key: str = "data.text", end: tuple[int, ...] = ()) -> TextTemplate:
        if "{" not in text and "}" not in text:
            return cls((text,), (("", text),), key, True, end)
        try:
            pieces = tuple((literal, name) for literal, name, _, _ in string.Formatter().parse(text))
        except ValueError as error:
            raise InputError(f"{key}: {text!r}: {error}; write columns as {{title}}, braces as {{{{ and }}}}") from None
        return cls(tuple(dict.fromkeys(name for _, name in pieces if name is not None)), pieces, key, False, end)

    def fill(self, record: dict[str, Any]) -> str:
        values = {column: "" if record[column] is None else record[column] for column in self.columns}
        for column, value in values.items():
            if not isinstance(value, str if self.is_column else (str, int, float)):
                raise BadRecord(f"column `{column}` holds {type(value).__name__}, not text; set {self.keys} to a column of text")
        if all(value == "" for value in values.values()):
            return ""
        text = "".join(literal + str(values.get(name, "")) for literal, name in self.pieces)
        text.encode()  # raises for half a surrogate pair (`\ud800`), which JSON can hold and no tokenizer takes
        return text

    def encode(self, tokenizer: Tokenizer, texts: list[str]) -> Iterator[Encoded]:
        """A text without tokens of its own is left out: many tokenizers give none for blanks."""
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):  # computes no character offsets
            if ids := encoding.ids:
                yield np.array([*ids, *self.end], np.uint32), None


@dataclass(frozen=True)
class ChatColumns:
    """Makes a chat of a record, from a column of messages or from two that are a prompt and its response: its text, and where the
    answers stand in it, from a character to one, in order."""

    keys: str
    columns: tuple[str, ...]
    pair: tuple[TextTemplate, ...]  # a prompt and its response; empty: the column holds messages
    template: str  # Jinja
    tokens: tuple[tuple[str, str], ...]  # what templates know of the tokenizer: ("bos_token", "<s>"), ...

    def fill(self, record: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The chat that `record` holds, written out. Raises BadRecord, also where nobody answers."""
        if self.pair:
            roles = zip(("user", "assistant"), self.pair, strict=True)
            chat = [{"role": role, "content": template.fill(record)} for role, template in roles]
        else:
            chat = _messages(record, self.columns[0])
        answers = [number for number, message in enumerate(chat) if message["role"] == "assistant" and _says_something(message)]
        if not answers:
            raise BadRecord("a chat without an answer: no message of the role `assistant` holds any text")
        text, spans = self._render(chat)
        for number, message in enumerate(chat, 1):
            if isinstance(content := message.get("content"), (list, dict)) and content and str(content) in text:
                raise BadRecord(f"message {number}: its content is no text, and the chat template writes it as Python does")
        if not _MARKED.search(self.template):
            spans = self._after_prompts(chat, answers, text)
        if not (spans := [(begin, end) for begin, end in spans if begin < end]):
            raise BadRecord(f"the chat template writes nothing for the answers; {_MARK}")
        text.encode()  # raises for half a surrogate pair
        return text, spans

    def encode(self, tokenizer: Tokenizer, chats: list[tuple[str, list[tuple[int, int]]]]) -> Iterator[Encoded]:
        """A token is trained on where it has a character of an answer. A chat of which no token is has nothing to teach."""
        encodings = tokenizer.encode_batch([text for text, _ in chats], add_special_tokens=False)
        for (_, answers), encoding in zip(chats, encodings, strict=True):
            begins, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            trained = np.logical_or.reduce([(begins < stop) & (stops > begin) for begin, stop in answers])
            if trained.any():
                yield np.array(encoding.ids, np.uint32), trained

    def _after_prompts(self, chat: list[dict[str, Any]], answers: list[int], text: str) -> list[tuple[int, int]]:
        """Where each answer stands by a template that does not mark them: behind the prompt for it."""
        spans = []
        for number in answers:
            before, _ = self._render(chat[:number], add_generation_prompt=True)
            with_answer = text if number + 1 == len(chat) else self._render(chat[: number + 1])[0]
            if not (text.startswith(with_answer) and with_answer.startswith(before)):
                raise BadRecord(f"the chat template writes message {number + 1} otherwise once others follow; {_MARK}")
            spans.append((len(before), len(with_answer)))
        return spans

    def _render(self, chat: list[dict[str, Any]], **more: bool) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        mask = _MARKED.search(self.template) is not None
        try:
            texts, spans = render_jinja_template(
                [chat], chat_template=_NO_CLOCK + self.template, return_assistant_tokens_mask=mask, **more, **dict(self.tokens)
            )
        except jinja2.TemplateSyntaxError as error:
            raise InputError(f"data.chat_template: no Jinja that can be used: {error}; correct it, or name another") from None
        except _REFUSALS as error:
            raise BadRecord(f"the chat template does not take this chat: {one_line(error, named=True)}") from None
        return texts[0], spans[0] if spans else []


def _says_something(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content) or bool(message.get("tool_calls"))


def _messages(record: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """The messages of a record, without keys that are null: tables give every message the keys of all."""
    value = record[column]
    if not isinstance(value, list) or not all(isinstance(message, dict) and message.get("role") for message in value):
        raise BadRecord(f"column `{column}` holds no list of messages, each with a `role` and a `content`")
    return [{key: item for key, item in message.items() if item is not None} for message in value]


@dataclass(frozen=True)
class TokenColumns:
    """Takes a record that is tokenized: its tokens as they are, with nothing put before or after them."""

    input_ids: str
    labels: str | None  # the tokens themselves, with `IGNORE` where there is no loss
    vocabulary: int  # ids are below
    keys: ClassVar[str] = "data.input_ids and data.labels"

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(filter(None, (self.input_ids, self.labels))))

    def fill(self, record: dict[str, Any]) -> Encoded | None:
        tokens = _numbers(record, self.input_ids)
        if len(wrong := tokens[(tokens < 0) | (tokens >= self.vocabulary)]):
            has = f"column `{self.input_ids}` holds the id {wrong[0]}, and the tokenizer has {self.vocabulary:,} ids"
            raise BadRecord(f"{has}; name the one that it was made with (data.tokenizer)")
        labels = _numbers(record, self.labels) if self.labels else tokens
        if not same_or_ignored(labels, tokens):
            raise BadRecord(
                f"column `{self.labels}` is neither `{self.input_ids}` itself nor {IGNORE}; write it as the tokens themselves, "
                "not shifted (the loss shifts them), or leave data.labels out"
            )
        return (tokens.astype(np.uint32), labels != IGNORE if self.labels else None) if len(tokens) else None

    def encode(self, tokenizer: Tokenizer, documents: list[Encoded]) -> Iterator[Encoded]:
        yield from documents


def _numbers(record: dict[str, Any], column: str) -> np.ndarray:
    """The whole numbers of a column, [n] int64."""
    values = record[column] or []
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise BadRecord(f"column `{column}` holds no list of whole numbers")
    return np.array(values, np.int64)


def records_of(settings: DataSettings, tokenizer: TextTokenizer) -> Records:
    """Returns what makes documents of the records of `settings.source`, for chats with the template that writes them. InputError
    where there is none, or where it writes an EOS token that the tokenizer does not have."""
    if settings.input_ids is not None:
        return TokenColumns(settings.input_ids, settings.labels, tokenizer.vocab_size)
    if not settings.is_chat:
        return TextTemplate.parse(settings.text, end=(tokenizer.end_of_text,))
    template = chat_template(settings.chat_template, tokenizer.name)
    tokens = {f"{role}_token": tokenizer.tokenizer.id_to_token(number) for role, number in tokenizer.special.items()}
    if "eos_token" in template and "eos_token" not in tokens:
        raise InputError(
            f"data.chat_template: writes `eos_token`, which {tokenizer.name} does not have, so answers would have no end; name "
            "one in its tokenizer_config.json, or set a template without it"
        )
    named = tuple(sorted(tokens.items()))
    if settings.messages is not None:
        return ChatColumns("data.messages", (settings.messages,), (), template, named)
    pair = TextTemplate.parse(settings.prompt, "data.prompt"), TextTemplate.parse(settings.response, "data.response")
    columns = tuple(dict.fromkeys(pair[0].columns + pair[1].columns))
    return ChatColumns("data.prompt and data.response", columns, pair, template, named)


def chat_template(given: str | None, tokenizer: str) -> str:
    """The text of `data.chat_template`, or of the tokenizer's own where that is None. InputError where there is none."""
    if given is not None and ("{" in given or "\n" in given):
        return given
    if given is not None and not Path(given).is_file():
        raise InputError(f"data.chat_template: {given}: no such file; name a Jinja file, or write the template itself")
    if file := Path(given) if given else file_of(tokenizer, CHAT_TEMPLATE, needed=False):
        return file.read_text(encoding="utf-8")
    config = file_of(tokenizer, "tokenizer_config.json", needed=False)
    template = load_object(config, REMEDY).get("chat_template") if config else None
    if template is None:
        raise InputError(
            f"data.chat_template: the tokenizer {tokenizer} has no chat template to write chats with; set data.chat_template to "
            "a Jinja file, or name a tokenizer that has one, as those of instruct models do"
        )
    return template
