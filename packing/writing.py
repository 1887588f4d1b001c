"""Tokenised documents as packs: in which order, in which split and in which pack each comes, and their way to the disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from foundation.errors import InputError
from packing.arrow import PackWriter
from packing.manifest import Split
from packing.order import permute
from packing.pack import Layout, best_fit, materialise, truncate
from packing.settings import DataSettings
from packing.workers import Tokenized

SEED = 42  # of the documents' order and of the held-out choice; runs with seeds of their own share packs
_PACKS_TOKENS = 2**22  # tokens of the packs that are put together at once


@dataclass
class TokenCounts:
    """What is tokenised."""

    chunks: int = 0  # of the source, done from the first on
    documents: int = 0
    tokens: int = 0
    trained: int = 0  # of the tokens, those that are to be learnt; 0 where all are
    skipped: int = 0  # malformed records
    first_skipped: str | None = None
    empty: int = 0
    complete: bool = False  # the source's end is reached

    def with_chunk(self, result: Tokenized, masked: bool) -> TokenCounts:
        """Returns these counts with those of one more chunk added."""
        return TokenCounts(
            chunks=self.chunks + 1,
            documents=self.documents + len(result.lengths),
            tokens=self.tokens + len(result.tokens),
            trained=self.trained + (int(mask_of(result).sum()) if masked else 0),
            skipped=self.skipped + result.skipped,
            first_skipped=self.first_skipped or result.first_skipped,
            empty=self.empty + result.empty,
        )

    def record(self) -> dict[str, Any]:
        return asdict(self)


def mask_of(result: Tokenized) -> np.ndarray:
    """[tokens] bool; a chunk without documents knows of no mask."""
    return np.ones(len(result.tokens), bool) if result.trained is None else result.trained


class Tokens(Protocol):
    """Documents as ids, in the order of their source."""

    counts: TokenCounts
    masked: bool  # some tokens are not to be learnt

    def tokens(self) -> np.ndarray:
        """[tokens] uint32."""

    def lengths(self) -> np.ndarray:
        """[documents] int64."""

    def trained(self) -> np.ndarray | None:
        """[tokens] bool; None: all are to be learnt."""


@dataclass(frozen=True)
class Arranged:
    """Which document comes into which pack of which split."""

    log: Tokens
    settings: DataSettings
    begins: np.ndarray  # [pieces] int64, where each begins among the tokens
    places: dict[Split, np.ndarray]  # of each split, the documents in the order in which they are packed
    layouts: dict[Split, Layout]
    tail: int | None  # tokens at the end of the only document, where these are held out

    @classmethod
    def of(cls, log: Tokens, settings: DataSettings, *, one_file: bool = False) -> Arranged:
        """`one_file`: a document is a text file, and of a single one the tail is held out."""
        lengths = log.lengths()
        pieces = without_tail(lengths, settings.held_out) if one_file else lengths
        cut = pieces is not lengths
        places = {"train": np.array([0]), "held_out": np.array([1])} if cut else split_documents(len(pieces), settings)
        lay_out = {"truncate": truncate, "best_fit": best_fit}[settings.packing]
        layouts = {split: lay_out(pieces[order], settings.length) for split, order in places.items()}
        return cls(log, settings, np.cumsum(pieces) - pieces, places, layouts, int(pieces[1]) if cut else None)

    @property
    def packs(self) -> int:
        return sum(map(len, self.layouts.values()))

    def bytes(self) -> int:
        """Returns what the packs take on disk, but for less than a thousandth."""
        length, masks = self.settings.length, self.settings.masks
        return sum(
            4 * (len(layout) * (length + 2) + len(layout.document)) + masks * len(layout) * -(-length // 8)
            for layout in self.layouts.values()
        )

    def write(self, writer: PackWriter, split: Split, padding: int, most: int | None = None) -> Iterator[int]:
        """Write the packs of `split`, or its first `most`; yields how many were written at a time."""
        layout, tokens, trained = self.layouts[split], self.log.tokens(), self.log.trained()
        starts, step = self.begins[self.places[split]], max(1, _PACKS_TOKENS // self.settings.length)
        count = len(layout) if most is None else min(most, len(layout))
        for first in range(0, count, step):
            last = min(first + step, count)
            block = materialise(layout, first, last, tokens, starts, padding, trained)
            lengths_of = [block.lengths_of(i) for i in range(last - first)]
            writer.write(split, block.input_ids, lengths_of, trained=block.trained)
            yield last - first

    def statistics(self) -> dict[str, Any]:
        """Returns what the manifest says of all of it."""
        counts = self.log.counts
        return {
            "documents": counts.documents,
            "tokens": counts.tokens,
            "packs": self.packs,
            "fill": counts.tokens / (self.packs * self.settings.length),
            "cut_documents": sum(layout.cut_documents for layout in self.layouts.values()),
            "held_out_documents": len(self.places.get("held_out", ())) if self.tail is None else 0,
            **({} if self.tail is None else {"held_out_tail": self.tail}),
            "held_out_packs": len(self.layouts.get("held_out", ())),
            "skipped_lines": counts.skipped,
            "first_skipped": counts.first_skipped,
            "empty_documents": counts.empty,
            "lengths": length_statistics(self.log.lengths()),
            **({"trained_tokens": counts.trained} if self.log.masked else {}),
        }


def without_tail(lengths: np.ndarray, share: float) -> np.ndarray:
    """`lengths` of text files; of a single one those of the part to train on and of the tail, a `share`, to hold out."""
    tail = max(1, round(int(lengths[0]) * share)) if len(lengths) == 1 and share else 0
    return np.array([lengths[0] - tail, tail]) if 0 < tail < lengths[0] else lengths


def split_documents(count: int, settings: DataSettings) -> dict[Split, np.ndarray]:
    """The documents of each split in the order they are packed, int64 indices into the source's order.

    One permutation by `SEED` decides both: its first part is held out, the rest is the training order. InputError if nothing
    would be left to train on.
    """
    shuffled = permute(np.arange(count), count, SEED)
    held_out = max(1, round(count * settings.held_out)) if settings.held_out else 0
    if held_out >= count:
        remedy = "set a larger data.streaming.window" if settings.stream else f"add documents to {settings.source}"
        raise InputError(
            f"data.held_out: {settings.held_out} of {count} documents leaves none to train on; set it to 0, or {remedy}"
        )
    parts = {"train": shuffled[held_out:], "held_out": shuffled[:held_out]}
    return {split: np.sort(part) if settings.in_source_order else part for split, part in parts.items() if len(part)}


def length_statistics(lengths: np.ndarray) -> dict[str, float]:
    """Quantiles of `lengths` [documents]."""
    quantiles = np.quantile(lengths, (0.0, 0.1, 0.5, 0.9, 1.0), method="lower").tolist()
    named = dict(zip(("shortest", "percentile_10", "median", "percentile_90", "longest"), quantiles, strict=True))
    return named | {"mean": float(lengths.mean())}
