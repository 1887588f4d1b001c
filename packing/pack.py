"""Lay out tokenised documents in packs, and write the packs of each split.

`truncate` and `best_fit` see only the documents' lengths and return a `Layout`. `materialise`
copies the tokens of any range of packs, so a corpus larger than memory is packed in parts. A layout
takes at most 90 bytes of memory for a piece of a document. `Arranged` decides which documents a
split has.

The order of packs is not the training order, which `packing.order` draws for each epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foundation.errors import InputError
from packing.arrow import Pack, PackWriter, Split
from packing.chunks import Tokens
from packing.order import permute
from packing.records import UNTRAINED
from packing.settings import DataSettings

# Seed of the order of documents and of the held-out choice. Runs with other seeds share the packs.
SEED = 42
_MOST_UNKNOWN = 0.01  # share of unknown tokens above which there is a warning
_PACKS_TOKENS = 2**22  # tokens of the packs that are copied at once


@dataclass(frozen=True)
class Layout:
    """The pieces of documents in each pack, as flat arrays.

    Pack p has the pieces offsets[p] to offsets[p + 1], in order.
    """

    length: int  # tokens of a pack
    document: np.ndarray  # [pieces] int64, index of the document
    start: np.ndarray  # [pieces] int64, index of the first token within the document
    stop: np.ndarray  # [pieces] int64, index behind the last token
    offsets: np.ndarray  # [packs + 1] int64
    cut_documents: int  # documents of more than one piece

    def __len__(self) -> int:
        """Return the number of packs."""
        return len(self.offsets) - 1


def truncate(lengths: np.ndarray, length: int) -> Layout:
    """Concatenate all documents in their order, and cut after every `length` tokens.

    The rest of a cut document is the first piece of the next pack; its positions restart at 0.
    Empty documents take no place. `lengths` are integers >= 0, [documents].
    """
    lengths = np.asarray(lengths, np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    first_pack = starts // length
    pieces = np.where(lengths > 0, (ends - 1) // length - first_pack + 1, 0)
    document, nth = _enumerate(pieces)
    pack = first_pack[document] + nth
    start = np.maximum(pack * length, starts[document]) - starts[document]
    stop = np.minimum((pack + 1) * length, ends[document]) - starts[document]
    packs = -(-int(lengths.sum()) // length)
    return _layout(length, (document, start, stop), pack, packs)


def best_fit(lengths: np.ndarray, length: int) -> Layout:
    """Place documents by best-fit decreasing: longest first, into the pack with the least room.

    Only a document longer than a pack is cut: into full packs and a rest, which is placed like a
    document. Within a pack the rest of a long document comes first, and then documents in their
    order. `lengths` are as for `truncate`.
    """
    lengths = np.asarray(lengths, np.int64)
    pieces = -(-lengths // length)
    document, nth = _enumerate(pieces)
    start = nth * length
    stop = np.minimum(start + length, lengths[document])

    is_rest = (start > 0) & (stop - start < length)
    rests_first = np.concatenate([np.flatnonzero(is_rest), np.flatnonzero(~is_rest)])
    document, start, stop = document[rests_first], start[rests_first], stop[rests_first]

    pack, packs = _best_fit_decreasing(stop - start, length)
    # Packs are numbered by the time of their first document, longest documents first. A fixed
    # permutation scatters them.
    pack = permute(np.arange(packs), packs, key=0)[pack]
    return _layout(length, (document, start, stop), pack, packs)


def materialise(
    layout: Layout,
    first: int,
    last: int,
    tokens: np.ndarray,
    starts: np.ndarray,
    fill_id: int,
    *,
    masked: bool = False,
) -> list[Pack]:
    """Return packs `first` to `last` (exclusive) with their tokens. `fill_id` fills short packs.

    `tokens` is a flat integer array of all documents, which may be memory-mapped. `starts` has the
    index of the first token of each document, in the order of the layout's lengths: [documents]
    int64. With `masked`, tokens without a loss have the bit `UNTRAINED`. Takes about 12 bytes of
    memory for a token.
    """
    pieces = slice(layout.offsets[first], layout.offsets[last])
    sizes = layout.stop[pieces] - layout.start[pieces]
    ends = np.cumsum(sizes)
    source = starts[layout.document[pieces]] + layout.start[pieces]
    # Token i of the range comes from i plus the offset of its piece. So one gather suffices.
    index = np.repeat(source - (ends - sizes), sizes)
    index += np.arange(len(index))
    offsets = layout.offsets[first : last + 1] - layout.offsets[first]
    filled = np.diff(np.concatenate([[0], ends])[offsets])

    ids = np.take(tokens, index)
    shape = (last - first, layout.length)
    if len(ids) == shape[0] * shape[1]:
        rows = ids.astype(np.uint32, copy=False).reshape(shape)
    else:
        rows = np.full(shape, fill_id | int(UNTRAINED) * masked, np.uint32)
        rows[np.arange(layout.length) < filled[:, None]] = ids
    lengths = np.split(sizes.astype(np.int32), offsets[1:-1])[: last - first]
    return [
        Pack(row & ~UNTRAINED, of_row, 0, row < UNTRAINED) if masked else Pack(row, of_row)
        for row, of_row in zip(rows, lengths, strict=True)
    ]


def _enumerate(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the owner of each piece, and its number within the owner, for `counts` of pieces.

    [2, 3] gives (0 0 1 1 1) and (0 1 0 1 2).
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _layout(length: int, pieces: tuple[np.ndarray, ...], pack: np.ndarray, packs: int) -> Layout:
    """Return the layout of pieces (document, start, stop) in these packs. Keep their order."""
    if np.any(pack[1:] < pack[:-1]):
        by_pack = np.argsort(pack, kind="stable")
        pieces = tuple(column[by_pack] for column in pieces)
    document, start, stop = pieces
    offsets = np.concatenate([[0], np.cumsum(np.bincount(pack, minlength=packs))])
    cut_documents = len(np.unique(document[start > 0]))
    return Layout(length, document, start, stop, offsets, cut_documents)


def _best_fit_decreasing(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Return the pack of each piece, and the number of packs.

    Pieces of one size are placed together. The tightest pack for a piece stays the tightest until
    it is full, so it takes all pieces that fit. So does every pack with the same room. The result
    is that of placing pieces one by one.
    """
    open_packs = _OpenPacks()
    pack_of = np.arange(len(sizes))
    # Spare room fits 16 bits for packs of up to 65,535 tokens. Then NumPy's stable sort is a radix
    # sort, which is linear.
    spare = (capacity - sizes).astype(np.min_scalar_type(capacity))
    longest_first = np.argsort(spare, kind="stable")
    spares, counts = np.unique(spare, return_counts=True)
    packs = 0
    placed = 0
    for size, count in zip(
        (capacity - spares.astype(np.int64)).tolist(), counts.tolist(), strict=True
    ):
        while count:
            room = open_packs.tightest(size)
            per_pack = (room or capacity) // size
            most_packs = -(-count // per_pack)
            if room:
                chosen = open_packs.take(room, most_packs)
            else:
                room = capacity
                chosen = list(range(packs, packs + most_packs))
                packs += most_packs
            now = min(count, per_pack * len(chosen))
            pack_of[longest_first[placed : placed + now]] = np.repeat(chosen, per_pack)[:now]
            in_last = now - per_pack * (len(chosen) - 1)
            open_packs.add(room - per_pack * size, chosen[:-1])
            open_packs.add(room - in_last * size, chosen[-1:])
            placed += now
            count -= now
    return pack_of, packs


class _OpenPacks:
    """Packs that have room, by the number of tokens that they can still take."""

    def __init__(self) -> None:
        self._by_room: dict[int, list[int]] = {}
        self._rooms = 0  # Bit r is set if a pack has room for exactly r tokens.

    def tightest(self, size: int) -> int:
        """Return the least room of a pack that can take `size` tokens, or 0 if there is none."""
        fitting = self._rooms >> size
        return size + (fitting & -fitting).bit_length() - 1 if fitting else 0

    def take(self, room: int, most: int) -> list[int]:
        """Remove and return the `most` newest packs with this room."""
        packs = self._by_room[room]
        taken = packs[-most:]
        del packs[-most:]
        if not packs:
            self._rooms ^= 1 << room
        return taken

    def add(self, room: int, packs: list[int]) -> None:
        """Add packs that have this room. Full packs are not open."""
        if room and packs:
            self._by_room.setdefault(room, []).extend(packs)
            self._rooms |= 1 << room


class Arranged:
    """Tokenised documents, laid out in the packs of each split."""

    def __init__(self, tokens: Tokens, settings: DataSettings, *, one_file: bool = False) -> None:
        """Lay out the documents.

        With `one_file`, a document is a text file. The tail of a single file is held out.
        """
        self.tokens = tokens
        self.settings = settings
        self.masked = settings.masks or tokens.counts.trained < tokens.counts.tokens
        lengths = tokens.lengths
        if one_file and len(lengths) == 1 and settings.held_out:
            tail = max(1, round(int(lengths[0]) * settings.held_out))
            lengths = np.array([lengths[0] - tail, tail])
            documents: dict[Split, np.ndarray] = {
                "train": np.array([0]),
                "held_out": np.array([1]),
            }
        else:
            documents = split_documents(len(lengths), settings)
        self._documents = documents  # of each split, in their order of packing
        # Index of the first token of each document: [documents] int64.
        self._starts = np.cumsum(lengths) - lengths
        lay_out = {"truncate": truncate, "best_fit": best_fit}[settings.packing]
        self.layouts = {
            split: lay_out(lengths[order], settings.length) for split, order in documents.items()
        }

    def bytes(self) -> int:
        """Return the size of the packs on the disk, exact to a thousandth."""
        length = self.settings.length
        pack = 4 * (length + 2) + self.masked * -(-length // 8)
        return sum(len(part) * pack + 4 * len(part.document) for part in self.layouts.values())

    def write(self, writer: PackWriter, split: Split, padding: int) -> None:
        """Write the packs of `split`. The id `padding` fills short packs."""
        layout = self.layouts[split]
        tokens = self.tokens.tokens
        starts = self._starts[self._documents[split]]
        step = max(1, _PACKS_TOKENS // self.settings.length)
        for first in range(0, len(layout), step):
            last = min(first + step, len(layout))
            packs = materialise(layout, first, last, tokens, starts, padding, masked=self.masked)
            writer.add(split, *packs)

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of all splits, for the manifest."""
        counts = self.tokens.counts
        packs = sum(map(len, self.layouts.values()))
        statistics = {
            "documents": counts.documents,
            "tokens": counts.tokens,
            "packs": packs,
            "fill": round(counts.tokens / (packs * self.settings.length), 4),
            "cut_documents": sum(layout.cut_documents for layout in self.layouts.values()),
            "skipped_lines": counts.skipped,
            "first_skipped": counts.first_skipped,
            "empty_documents": counts.empty,
            "median_document": int(np.median(self.tokens.lengths)),
            "longest_document": int(self.tokens.lengths.max()),
        }
        if self.masked:
            statistics["trained_tokens"] = counts.trained
        if counts.unknown:
            share = counts.unknown / counts.tokens
            warning = "; warning: the tokenizer lacks this text, name another"
            statistics["unknown_tokens"] = f"{share:.2%} of all{warning * (share > _MOST_UNKNOWN)}"
        if counts.unread:
            statistics["columns_not_read"] = ", ".join(counts.unread)
        return statistics


def split_documents(count: int, settings: DataSettings) -> dict[Split, np.ndarray]:
    """Return the documents of each split in their order of packing: [documents] int64.

    One permutation by `SEED` decides both: its first part is held out, and the rest is the training
    order. Raises InputError if no document would be left to train on.
    """
    shuffled = permute(np.arange(count), count, SEED)
    held_out = max(1, round(count * settings.held_out)) if settings.held_out else 0
    if held_out >= count:
        raise InputError(
            f"data.held_out: {settings.held_out} of {count} documents leaves none to train on; "
            "set it to 0"
        )
    parts: dict[Split, np.ndarray] = {"train": shuffled[held_out:]}
    return parts | {"held_out": shuffled[:held_out]} if held_out else parts
