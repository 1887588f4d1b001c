"""Lay out tokenised documents in packs, and fill the packs of each split.

`truncate` and `best_fit` compute a `Layout` from the lengths of the documents alone. `fill_pack`
copies the tokens of one pack. So a corpus that is larger than memory can be packed. A layout needs
about 110 bytes of memory for each piece of a document. `Arranged` divides the documents into
splits.

The order of packs in the files is not the order of training, which `packing.order` computes for
each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from foundation.errors import InputError
from packing.arrow import Pack, Split
from packing.chunks import Tokens
from packing.order import permute
from packing.records import UNTRAINED
from packing.settings import DataSettings

# Seed of the order of documents and of the choice of held-out documents. It is not the seed of a
# run, so runs with different seeds use the same packs.
SEED = 42
# Number of tokens that are copied at once.
_PACKS_TOKENS = 2**22


@dataclass(frozen=True)
class Layout:
    """Pieces of documents in each pack, as flat arrays. A piece is a document or a part of it.

    Pack p consists of the pieces offsets[p] to offsets[p + 1] (exclusive), in this order.
    """

    # Number of tokens in a pack.
    length: int
    # [pieces] int64, index of the piece's document.
    document: np.ndarray
    # [pieces] int64, index of the piece's first token in its document.
    start: np.ndarray
    # [pieces] int64, index after the piece's last token in its document.
    stop: np.ndarray
    # [packs + 1] int64, first piece of each pack, then the number of pieces.
    offsets: np.ndarray
    # Number of documents with more than one piece.
    cut_documents: int

    def __len__(self) -> int:
        """Return the number of packs."""
        return len(self.offsets) - 1


def truncate(lengths: np.ndarray, length: int) -> Layout:
    """Return the layout of documents that are concatenated and cut after every `length` tokens.

    `lengths` are the numbers of tokens of the documents, [documents] integers >= 0. The documents
    keep their order. The rest of a cut document is the first piece of the next pack, and its
    positions restart at 0. Empty documents have no piece.
    """
    lengths = np.asarray(lengths, np.int64)
    ends = np.cumsum(lengths)
    cuts = np.arange(0, lengths.sum(), length)
    # A stable sort merges the two sorted arrays in linear time.
    bounds = np.sort(np.concatenate([cuts, ends]), kind="stable")
    is_piece = np.diff(bounds) > 0
    # Index of each piece's first token, and the index after its last token, in all documents.
    starts, stops = bounds[:-1][is_piece], bounds[1:][is_piece]
    document = np.searchsorted(ends, starts, "right")
    before = (ends - lengths)[document]
    return _layout(length, (document, starts - before, stops - before), starts // length)


def best_fit(lengths: np.ndarray, length: int) -> Layout:
    """Return the layout of documents by the best-fit-decreasing algorithm.

    `lengths` are as for `truncate`. The documents are placed from the longest to the shortest. Each
    one is placed in the fullest pack with enough room. Only a document that is longer than a pack
    is cut: into full packs and a rest, and the rest is placed like a document. Within a pack, the
    rest of a long document comes first, and other documents follow in their original order.
    """
    lengths = np.asarray(lengths, np.int64)
    pieces = -(-lengths // length)
    document = np.repeat(np.arange(len(lengths)), pieces)
    # Number of each piece within its document.
    first_pieces = np.cumsum(pieces) - pieces
    number = np.arange(len(document)) - first_pieces[document]
    start = number * length
    stop = np.minimum(start + length, lengths[document])

    is_rest = (start > 0) & (stop - start < length)
    rests_first = np.concatenate([np.flatnonzero(is_rest), np.flatnonzero(~is_rest)])
    document, start, stop = document[rests_first], start[rests_first], stop[rests_first]

    pack, packs = _best_fit_decreasing(stop - start, length)
    # Packs are numbered in the order in which they were opened, so the packs with the longest
    # documents come first. A fixed permutation shuffles the packs.
    pack = permute(np.arange(packs), packs, key=0)[pack]
    return _layout(length, (document, start, stop), pack)


def fill_pack(
    layout: Layout,
    number: int,
    tokens: np.ndarray,
    starts: np.ndarray,
    padding: int,
    *,
    masked: bool,
) -> Pack:
    """Fill pack `number` of the layout with tokens, and return it.

    `tokens` is a flat integer array with the tokens of all documents. It may be memory-mapped.
    `starts` has the index of each document's first token in `tokens`, [documents] int64. The
    documents have the order of `lengths` in `truncate` and `best_fit`. `padding` fills the rest.

    With `masked`, tokens without a loss have the bit `UNTRAINED` in `tokens`, and so has `padding`.
    The pack has a mask (`Pack.trained`) instead of this bit.
    """
    pieces = slice(layout.offsets[number], layout.offsets[number + 1])
    begins = starts[layout.document[pieces]]
    firsts = begins + layout.start[pieces]
    ends = begins + layout.stop[pieces]
    row = np.full(layout.length, padding, np.uint32)
    # Concatenate the pieces.
    filled = 0
    for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
        row[filled : filled + end - first] = tokens[first:end]
        filled += end - first
    lengths = (ends - firsts).astype(np.int32)
    if not masked:
        return Pack(row, lengths)
    ids = row & ~UNTRAINED
    has_loss = row < UNTRAINED
    return Pack(ids, lengths, has_loss)


def _layout(length: int, pieces: tuple[np.ndarray, ...], pack: np.ndarray) -> Layout:
    """Return the layout of `pieces`, three arrays: document, start and stop.

    `pack` has the number of each piece's pack. Pieces of a pack keep their order.
    """
    by_pack = np.argsort(pack, kind="stable")
    document, start, stop = (column[by_pack] for column in pieces)
    offsets = np.append(0, np.cumsum(np.bincount(pack)))
    cut_documents = len(np.unique(document[start > 0]))
    return Layout(length, document, start, stop, offsets, cut_documents)


def _best_fit_decreasing(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Return the pack index of each piece, and the number of packs.

    `sizes` are the numbers of tokens of the pieces, and a pack has `capacity` tokens.

    Each piece is placed in the fullest pack with enough room, from the largest piece to the
    smallest. The function places pieces of equal size together. This has the same result, because
    the fullest pack stays the fullest one until it has no room for another piece of this size.
    """
    open_packs = _OpenPacks(capacity)
    pack_of = np.arange(len(sizes))  # every value is overwritten
    # For packs of up to 65,535 tokens, the spare room of a pack fits 16 bits. NumPy's stable sort
    # of 16-bit numbers is a radix sort, which takes linear time.
    spare = (capacity - sizes).astype(np.min_scalar_type(capacity))
    longest_first = np.argsort(spare, kind="stable")
    spares, counts = np.unique(spare, return_counts=True)
    sizes_in_order = capacity - spares.astype(np.int64)  # the largest size first
    placed = 0
    for size, count in zip(sizes_in_order.tolist(), counts.tolist(), strict=True):
        # Each iteration fills packs with the same room.
        while count:
            room = open_packs.tightest(size)
            per_pack = room // size
            chosen = open_packs.take(room, -(-count // per_pack))
            added = min(count, per_pack * len(chosen))
            pieces = longest_first[placed : placed + added]
            pack_of[pieces] = np.repeat(chosen, per_pack)[:added]
            # The last pack may get fewer pieces than the other ones.
            in_last = added - per_pack * (len(chosen) - 1)
            open_packs.add(room - per_pack * size, chosen[:-1])
            open_packs.add(room - in_last * size, chosen[-1:])
            placed += added
            count -= added
    return pack_of, open_packs.count


class _OpenPacks:
    """Packs that are not full, grouped by their room: the number of tokens that still fit."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Number of packs that were opened.
        self.count = 0
        self._by_room: dict[int, list[int]] = {}
        # Bit r is set if a pack has room for exactly r tokens. A new pack can always be opened.
        self._rooms = 1 << capacity

    def tightest(self, size: int) -> int:
        """Return the room of the fullest pack that can take `size` tokens."""
        # The lowest set bit is the smallest room that suffices.
        fitting = self._rooms >> size
        return size + (fitting & -fitting).bit_length() - 1

    def take(self, room: int, most: int) -> list[int]:
        """Remove at most `most` of the packs with this room, and return them.

        The packs that were added last are removed. Empty packs are opened.
        """
        if room == self._capacity:
            self.count += most
            return list(range(self.count - most, self.count))
        packs = self._by_room[room]
        taken = packs[-most:]
        del packs[-most:]
        if not packs:
            self._rooms ^= 1 << room
        return taken

    def add(self, room: int, packs: list[int]) -> None:
        """Add packs that have this room. Full packs (`room` is 0) are not added."""
        if room and packs:
            self._by_room.setdefault(room, []).extend(packs)
            self._rooms |= 1 << room


class Arranged:
    """Tokenised documents that are laid out in the packs of each split."""

    def __init__(self, tokens: Tokens, settings: DataSettings, *, text_files: bool) -> None:
        """Divide the documents into splits and lay them out.

        Set `text_files` if each document is a text file. If there is only one file, the end of the
        file is held out.
        """
        self.tokens = tokens
        self.settings = settings
        # Packs of chats have masks even if all tokens have a loss.
        has_untrained = tokens.counts.trained < tokens.counts.tokens
        self.masked = settings.messages is not None or has_untrained
        lengths = tokens.lengths
        # Indices of each split's documents, in the order of packing.
        self._documents: dict[Split, np.ndarray]
        if text_files and len(lengths) == 1 and settings.held_out:
            tail = max(1, round(int(lengths[0]) * settings.held_out))
            lengths = np.array([lengths[0] - tail, tail])
            self._documents = {"train": np.array([0]), "held_out": np.array([1])}
        else:
            self._documents = split_documents(tokens, settings)
        # Index of the first token of each document: [documents] int64.
        self._starts = np.cumsum(lengths) - lengths
        lay_out = best_fit if settings.packing == "best_fit" else truncate
        self.layouts = {
            split: lay_out(lengths[order], settings.length)
            for split, order in self._documents.items()
        }

    def bytes(self) -> int:
        """Return the size of the packs on the disk in bytes, with an error of less than 0.1 %."""
        length = self.settings.length
        mask_bytes = -(-length // 8) if self.masked else 0
        packs = sum(map(len, self.layouts.values()))
        pieces = sum(len(layout.document) for layout in self.layouts.values())
        return packs * (4 * (length + 2) + mask_bytes) + 4 * pieces

    def packs(self, split: Split, padding: int) -> Iterator[list[Pack]]:
        """Yield the packs of `split`, many at once. `padding` is the id that fills short packs."""
        layout = self.layouts[split]
        starts = self._starts[self._documents[split]]
        # A slice of an array is created faster than one of a memory map.
        tokens = np.asarray(self.tokens.tokens)
        if self.masked:
            padding |= int(UNTRAINED)
        step = max(1, _PACKS_TOKENS // self.settings.length)
        for first in range(0, len(layout), step):
            yield [
                fill_pack(layout, number, tokens, starts, padding, masked=self.masked)
                for number in range(first, min(first + step, len(layout)))
            ]

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of all splits, for the manifest."""
        counts = self.tokens.counts
        packs = sum(map(len, self.layouts.values()))
        fill = counts.tokens / (packs * self.settings.length)
        cut_documents = sum(layout.cut_documents for layout in self.layouts.values())
        lengths = self.tokens.lengths
        statistics: dict[str, Any] = {
            "documents": counts.documents,
            "tokens": counts.tokens,
            "packs": packs,
            "fill": round(fill, 4),
            "cut_documents": cut_documents,
            "empty_documents": counts.empty,
            "median_document": int(np.median(lengths)),
            "longest_document": int(lengths.max()),
            "columns_not_read": ", ".join(counts.unread),
        }
        if self.masked:
            statistics["trained_tokens"] = counts.trained
        return statistics


def split_documents(tokens: Tokens, settings: DataSettings) -> dict[Split, np.ndarray]:
    """Map each split to the indices of its documents in the order of packing: [documents] int64.

    The documents are shuffled with `SEED`. The documents with the smallest hashes are held out, and
    the others are packed for training. The hash depends only on the tokens of a document. So if the
    source grows, few documents change their split, and copies of a document are in the same split.
    Copies of the last held-out document are held out in addition to the share of `settings`. Raises
    InputError if no document would be left for training.
    """
    count = len(tokens.lengths)
    shuffled = permute(np.arange(count), count, SEED)
    if not settings.held_out:
        return {"train": shuffled}
    # At least one document is held out.
    last = max(1, round(count * settings.held_out)) - 1
    ends = [0, *np.cumsum(tokens.lengths).tolist()]
    ids = tokens.tokens.data
    hashes = np.array(
        [xxh3_64_intdigest(ids[start:end], SEED) for start, end in pairwise(ends)], np.uint64
    )
    largest_held_out = np.partition(hashes, last)[last]
    is_held_out = (hashes <= largest_held_out)[shuffled]
    if is_held_out.all():
        raise InputError(
            f"data.held_out: holding out {settings.held_out} of {count} documents leaves none to "
            "train on; set data.held_out to 0"
        )
    return {"train": shuffled[~is_held_out], "held_out": shuffled[is_held_out]}
