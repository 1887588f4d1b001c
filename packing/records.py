"""What a record becomes by the `data` settings: a text, a chat, or the tokens that it holds already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from packing.arrow import IGNORE
from packing.chat import ChatColumns
from packing.chunks import BadRecord, MissingColumn, Records, TextTemplate, is_list_of, no_column
from packing.settings import DataSettings


@dataclass(frozen=True)
class Ids:
    """Documents that are tokens already."""

    tokens: np.ndarray  # [tokens] uint32
    lengths: np.ndarray  # [documents] int64
    trained: np.ndarray | None  # [tokens] bool; None: all

    def __bool__(self) -> bool:
        return len(self.tokens) > 0


@dataclass(frozen=True)
class TokenColumns:
    """Makes documents of a record that is tokenized: its tokens as they are, with nothing put before or after them."""

    input_ids: str
    labels: str | None  # the tokens themselves, with `IGNORE` where there is no loss
    lengths: str | None  # of the documents; None: a record is one. Tokens beyond them are padding, and left out
    vocabulary: int | None = None  # ids are below; None where only the columns matter

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(filter(None, (self.input_ids, self.labels, self.lengths))))

    def missing(self, names: list[str]) -> str | None:
        return no_column(self.columns, names, "data.input_ids, data.labels and data.document_lengths")

    def mistyped(self, schema: pa.Schema) -> str | None:
        for name in self.columns:
            kind = schema.field(name).type
            if not is_list_of(kind, pa.types.is_integer):
                return f"column `{name}` holds {kind}, not lists of whole numbers; the columns are: {', '.join(schema.names)}"
        return None

    def fill(self, record: dict[str, Any]) -> Ids:
        if problem := self.missing(list(record)):
            raise MissingColumn(problem)
        tokens = _numbers(record, self.input_ids)
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= self.vocabulary):
            wrong = int(tokens.max() if tokens.max() >= self.vocabulary else tokens.min())
            raise BadRecord(
                f"column `{self.input_ids}` holds the id {wrong}, and the tokenizer has {self.vocabulary:,} ids; name the one "
                "that it was made with (data.tokenizer)"
            )
        lengths = np.array([len(tokens)]) if self.lengths is None else _numbers(record, self.lengths)
        total = sum(lengths.tolist())  # which no length makes overflow
        if len(lengths) and lengths.min() < 0:
            raise BadRecord(f"column `{self.lengths}` holds the length {lengths.min():,}, below 0")
        if total > len(tokens):
            raise BadRecord(f"column `{self.lengths}` adds up to {total:,} tokens, and the record has {len(tokens):,}")
        lengths = lengths[lengths > 0]
        real = int(lengths.sum())
        return Ids(tokens[:real].astype(np.uint32), lengths, self._mask(record, tokens, real))

    def _mask(self, record: dict[str, Any], tokens: np.ndarray, real: int) -> np.ndarray | None:
        if self.labels is None:
            return None
        labels = _numbers(record, self.labels)
        if len(labels) != len(tokens) or ((labels != tokens) & (labels != IGNORE))[:real].any():
            raise BadRecord(
                f"column `{self.labels}` is neither `{self.input_ids}` itself nor {IGNORE}; write it as the tokens themselves, "
                "not shifted (the loss shifts them), or leave data.labels out"
            )
        return labels[:real] != IGNORE


def _numbers(record: dict[str, Any], column: str) -> np.ndarray:
    """The whole numbers of a column, [n] int64."""
    try:
        values = np.array(record[column] if record[column] is not None else [])
    except ValueError:  # lists of several lengths
        values = np.zeros(())
    if values.ndim != 1 or (len(values) and values.dtype.kind != "i"):  # unsigned are only those beyond int64
        raise BadRecord(f"column `{column}` holds no list of whole numbers")
    return values.astype(np.int64)


def records_of(settings: DataSettings, vocabulary: int | None = None) -> Records:
    """Returns what makes documents of the records of `settings.source`. Chats can be written after `ChatColumns.written_by`;
    tokens are held against a tokenizer of `vocabulary` ids."""
    if settings.input_ids is not None:
        return TokenColumns(settings.input_ids, settings.labels, settings.document_lengths, vocabulary)
    if settings.messages is not None:
        return ChatColumns(settings.messages, None, None, settings.train_on)
    if settings.prompt is not None:
        prompt, response = (TextTemplate.parse(getattr(settings, key), f"data.{key}") for key in ("prompt", "response"))
        return ChatColumns(None, prompt, response, settings.train_on)
    return TextTemplate.parse(settings.text)
