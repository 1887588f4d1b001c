"""Tokenised documents as packs: in which order, in which split and in which pack each comes, and their way to the disk.

`truncate` and `best_fit` see only the documents' lengths and return a `Layout`; `materialise` then copies the tokens of any range
of packs, so a corpus larger than memory is packed in parts. A layout takes about 90 bytes of memory a piece at its peak.
`Arranged` says which documents each split has, and writes its packs.

The order of the packs is not the training order, which `packing.order` draws for each epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foundation.errors import InputError
from packing.arrow import Pack, PackWriter, Split
from packing.order import permute
from packing.records import UNTRAINED
from packing.settings import DataSettings
from packing.sources import Tokens

# of the documents' order and of the held-out choice; runs with seeds of their own share packs
SEED = 42
_MOST_UNKNOWN = 0.01  # share of the tokenizer's unknown token above which there is a warning
_PACKS_TOKENS = 2**22  # tokens of the packs that are put together at once


@dataclass(frozen=True)
class Layout:
    """The pieces of documents that each pack holds, as flat arrays; pack p owns pieces offsets[p] to offsets[p + 1], in order."""

    length: int  # tokens a pack
    document: np.ndarray  # [pieces] int64, the document's place in the order given
    start: np.ndarray  # [pieces] int64, the piece's first token within its document
    stop: np.ndarray  # [pieces] int64, one past its last
    offsets: np.ndarray  # [packs + 1] int64
    cut_documents: int  # documents that stand in more than one piece

    def __len__(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1


def truncate(lengths: np.ndarray, length: int) -> Layout:
    """Concatenate all documents in the order given and cut every `length` tokens.

    The rest of a cut document opens the next pack; its positions restart at 0. Empty documents take no place.

    lengths: [documents] integers >= 0.
    """
    lengths = np.asarray(lengths, np.int64)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    first_pack = begins // length
    pieces = np.where(lengths > 0, (ends - 1) // length - first_pack + 1, 0)
    document, nth = _enumerate(pieces)
    pack = first_pack[document] + nth
    start = np.maximum(pack * length, begins[document]) - begins[document]
    stop = np.minimum((pack + 1) * length, ends[document]) - begins[document]
    packs = -(-int(lengths.sum()) // length)
    return _layout(length, (document, start, stop), pack, packs)


def best_fit(lengths: np.ndarray, length: int) -> Layout:
    """Best-fit decreasing: the longest document first, each into the pack where it leaves the least room.

    Only a document longer than a pack is cut: into full packs and a rest, which is packed as a document of its own. Within a pack
    the rest of a long document comes first, then documents in the order given.

    lengths: as for `truncate`.
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
    # Packs are numbered as they were opened, longest documents first: scatter them, by a permutation that never changes.
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
    """Copy the tokens of packs `first` to `last` (exclusive) together; a short pack's tail is filled with `fill_id`.

    tokens: flat integer array that holds every document, memory-mapped or not, any integer type. starts: [documents] int64,
    where each document begins in it, in the order that the layout's lengths were given. masked: tokens that are not to be learnt
    are marked with `UNTRAINED`. Takes about 12 bytes of memory a token.
    """
    own = slice(layout.offsets[first], layout.offsets[last])
    sizes = layout.stop[own] - layout.start[own]
    ends = np.cumsum(sizes)
    source = starts[layout.document[own]] + layout.start[own]
    # Token i of the range comes from i plus its piece's offset: one gather for any number of pieces.
    index = np.repeat(source - (ends - sizes), sizes)
    index += np.arange(len(index))
    offsets = layout.offsets[first : last + 1] - layout.offsets[first]
    filled = np.diff(np.concatenate([[0], ends])[offsets])

    real, shape = np.take(tokens, index), (last - first, layout.length)
    if len(real) == shape[0] * shape[1]:
        rows = real.astype(np.uint32, copy=False).reshape(shape)
    else:
        rows = np.full(shape, fill_id | int(UNTRAINED) * masked, np.uint32)
        rows[np.arange(layout.length) < filled[:, None]] = real
    lengths = np.split(sizes.astype(np.int32), offsets[1:-1])[: last - first]
    if not masked:
        return [Pack(ids, its) for ids, its in zip(rows, lengths, strict=True)]
    return [
        Pack(ids & ~UNTRAINED, its, 0, ids < UNTRAINED)
        for ids, its in zip(rows, lengths, strict=True)
    ]


def _enumerate(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for counts of pieces, each piece's owner and its place within the owner: [2, 3] gives (0 0 1 1 1), (0 1 0 1 2)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _layout(length: int, pieces: tuple[np.ndarray, ...], pack: np.ndarray, packs: int) -> Layout:
    """Group pieces (document, start, stop) by the pack each goes to, keeping their order within one."""
    if np.any(pack[1:] < pack[:-1]):
        by_pack = np.argsort(pack, kind="stable")
        pieces = tuple(column[by_pack] for column in pieces)
    document, start, stop = pieces
    offsets = np.concatenate([[0], np.cumsum(np.bincount(pack, minlength=packs))])
    cut_documents = len(np.unique(document[start > 0]))
    return Layout(length, document, start, stop, offsets, cut_documents)


def _best_fit_decreasing(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """The pack of each piece, and the number of packs.

    Pieces of one size are placed together. If the tightest pack for such a piece has room for `each` of them, it is still the
    tightest after the first, so it takes all; and so does every pack with as much room. The result is that of placing one by one.
    """
    packs_with: dict[int, list[int]] = {}  # the open packs, by how many more tokens each can hold
    # bit r is set: some pack has room for exactly r tokens. The lowest set bit from a size on is
    # the tightest.
    existing = 0
    pack_of = np.arange(len(sizes))
    # Spare room fits 16 bits for packs of up to 65,535 tokens, where numpy's stable sort is a radix sort, hence linear.
    spare = (capacity - sizes).astype(np.min_scalar_type(capacity))
    longest_first = np.argsort(spare, kind="stable")
    spares, counts = np.unique(spare, return_counts=True)
    packs, at = 0, 0
    for size, count in zip(
        (capacity - spares.astype(np.int64)).tolist(), counts.tolist(), strict=True
    ):
        while count:
            fitting = existing >> size
            room = size + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            each = room // size
            wanted = -(-count // each)
            if fitting:
                chosen = packs_with[room][-wanted:]
                del packs_with[room][-wanted:]
                existing ^= 0 if packs_with[room] else 1 << room
            else:
                chosen = list(range(packs, packs + wanted))
                packs += wanted
            placed = min(count, each * len(chosen))
            pack_of[longest_first[at : at + placed]] = np.repeat(chosen, each)[:placed]
            in_last = placed - each * (len(chosen) - 1)
            for left, some in (
                (room - each * size, chosen[:-1]),
                (room - in_last * size, chosen[-1:]),
            ):
                if left and some:
                    packs_with.setdefault(left, []).extend(some)
                    existing |= 1 << left
            at += placed
            count -= placed
    return pack_of, packs


class Arranged:
    """Says which document comes into which pack of which split."""

    def __init__(self, tokens: Tokens, settings: DataSettings, *, one_file: bool = False) -> None:
        """`one_file`: a document is a text file, and of a single one the tail is held out."""
        self.tokens, self.settings, lengths = tokens, settings, tokens.lengths
        self.masked = settings.masks or tokens.counts.trained < tokens.counts.tokens
        alone = one_file and len(lengths) == 1 and settings.held_out
        tail = max(1, round(int(lengths[0]) * settings.held_out)) if alone else 0
        if tail:
            lengths = np.array([lengths[0] - tail, tail])
        # [pieces] int64, where each begins among the tokens
        self.begins = np.cumsum(lengths) - lengths
        # Of each split, the documents in the order in which they are packed.
        self.places = (
            {"train": np.array([0]), "held_out": np.array([1])}
            if tail
            else split_documents(len(lengths), settings)
        )
        lay_out = {"truncate": truncate, "best_fit": best_fit}[settings.packing]
        self.layouts = {
            split: lay_out(lengths[order], settings.length) for split, order in self.places.items()
        }

    def bytes(self) -> int:
        """Returns what the packs take on disk, but for less than a thousandth."""
        length, masks = self.settings.length, self.masked
        return sum(
            4 * (len(layout) * (length + 2) + len(layout.document))
            + masks * len(layout) * -(-length // 8)
            for layout in self.layouts.values()
        )

    def write(self, writer: PackWriter, split: Split, padding: int) -> None:
        """Write the packs of `split`."""
        layout, tokens, masked = self.layouts[split], self.tokens.tokens, self.masked
        starts, step = (
            self.begins[self.places[split]],
            max(1, _PACKS_TOKENS // self.settings.length),
        )
        for first in range(0, len(layout), step):
            last = min(first + step, len(layout))
            writer.add(
                split, *materialise(layout, first, last, tokens, starts, padding, masked=masked)
            )

    def statistics(self) -> dict[str, Any]:
        """Returns what the manifest says of all of it."""
        counts, packs = self.tokens.counts, sum(map(len, self.layouts.values()))
        unknown = f"{counts.unknown / counts.tokens:.2%} of all"
        if counts.unknown > _MOST_UNKNOWN * counts.tokens:
            unknown += "; warning: the tokenizer lacks this text, name another"
        return {
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
            **({"trained_tokens": counts.trained} if self.masked else {}),
            **({"unknown_tokens": unknown} if counts.unknown else {}),
            **({"columns_not_read": ", ".join(counts.unread)} if counts.unread else {}),
        }


def split_documents(count: int, settings: DataSettings) -> dict[Split, np.ndarray]:
    """The documents of each split in the order they are packed, int64 indices into the source's order.

    One permutation by `SEED` decides both: its first part is held out, the rest is the training order. InputError if nothing
    would be left to train on.
    """
    shuffled = permute(np.arange(count), count, SEED)
    held_out = max(1, round(count * settings.held_out)) if settings.held_out else 0
    if held_out >= count:
        raise InputError(
            f"data.held_out: {settings.held_out} of {count} documents leaves none to train on; set it to 0"
        )
    parts = {"train": shuffled[held_out:], "held_out": shuffled[:held_out]}
    return {split: part for split, part in parts.items() if len(part)}
