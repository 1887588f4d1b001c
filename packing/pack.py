"""Which piece of which document goes into which pack: pure algorithms over document lengths.

`truncate` and `best_fit` see only the documents' lengths and return a `Layout`; `materialise` then copies the tokens of any range
of packs, so a corpus larger than memory is packed in parts. A layout takes about 90 bytes of memory a piece at its peak.

The order of the packs is not the training order, which `packing.order` draws for each epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packing.order import permute


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


@dataclass(frozen=True)
class PackBlock:
    input_ids: np.ndarray  # [packs, length] uint32, a short pack's tail filled with fill_id
    lengths: np.ndarray  # [pieces] int32, lengths of all packs' pieces; a pack's own sum to its real tokens
    offsets: np.ndarray  # [packs + 1] int64, where each pack's lengths begin
    trained: np.ndarray | None = None  # [packs, length] bool, which tokens are to be learnt; None: all

    def lengths_of(self, pack: int) -> np.ndarray:
        """Lengths of the pieces of one pack of the block, int32."""
        return self.lengths[self.offsets[pack] : self.offsets[pack + 1]]


def truncate(lengths: np.ndarray, length: int) -> Layout:
    """Concatenate all documents in the order given and cut every `length` tokens.

    The rest of a cut document opens the next pack; its positions restart at 0. Empty documents take no place.

    lengths: [documents] integers >= 0. Raises ValueError for a negative one.
    """
    lengths = _checked(lengths)
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
    lengths = _checked(lengths)
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
    layout: Layout, first: int, last: int, tokens: np.ndarray, starts: np.ndarray, fill_id: int, trained: np.ndarray | None = None
) -> PackBlock:
    """Copy the tokens of packs `first` to `last` (exclusive) together.

    tokens: flat integer array that holds every document, memory-mapped or not, any integer type. starts: [documents] int64,
    where each document begins in it, in the order that the layout's lengths were given. trained: bool, which of them
    are to be learnt. Takes about 12 bytes of memory a token.
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

    def rows(values: np.ndarray, fill: int, dtype: type) -> np.ndarray:
        real = np.take(values, index)
        if len(real) == (last - first) * layout.length:
            return real.astype(dtype, copy=False).reshape(last - first, layout.length)
        full = np.full((last - first, layout.length), fill, dtype)
        full[np.arange(layout.length) < filled[:, None]] = real
        return full

    return PackBlock(
        rows(tokens, fill_id, np.uint32),
        sizes.astype(np.int32),
        offsets,
        None if trained is None else rows(trained, False, np.bool_),
    )


def _checked(lengths: np.ndarray) -> np.ndarray:
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"document {int(lengths.argmin())} has a negative length")
    return lengths


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
    rooms, pack_of = _Rooms(), np.arange(len(sizes))
    # Spare room fits 16 bits for packs of up to 65,535 tokens, where numpy's stable sort is a radix sort, hence linear.
    spare = (capacity - sizes).astype(np.min_scalar_type(capacity))
    longest_first = np.argsort(spare, kind="stable")
    spares, counts = np.unique(spare, return_counts=True)
    packs, at = 0, 0
    for size, count in zip((capacity - spares.astype(np.int64)).tolist(), counts.tolist(), strict=True):
        while count:
            room = rooms.tightest(size) or capacity
            each = room // size
            wanted = -(-count // each)
            if room < capacity:
                chosen = rooms.take(room, wanted)
            else:
                chosen = list(range(packs, packs + wanted))
                packs += wanted
            placed = min(count, each * len(chosen))
            pack_of[longest_first[at : at + placed]] = np.repeat(chosen, each)[:placed]
            in_last = placed - each * (len(chosen) - 1)
            rooms.leave(room - each * size, chosen[:-1])
            rooms.leave(room - in_last * size, chosen[-1:])
            at += placed
            count -= placed
    return pack_of, packs


class _Rooms:
    """The open packs, by how many more tokens each can hold.

    The amounts of room that exist are the bits of one integer: its lowest set bit from a size on is the tightest.
    """

    def __init__(self) -> None:
        self._packs: dict[int, list[int]] = {}
        self._existing = 0  # bit r is set: some pack has room for exactly r tokens

    def tightest(self, size: int) -> int:
        """The least room of at least `size` >= 1 tokens that any pack has; 0 where none has."""
        fitting = self._existing >> size
        return size + (fitting & -fitting).bit_length() - 1 if fitting else 0

    def take(self, room: int, wanted: int) -> list[int]:
        """Remove and return 1 to `wanted` of the packs with exactly this room."""
        packs = self._packs[room]
        taken = packs[-wanted:]
        del packs[-wanted:]
        if not packs:
            self._existing ^= 1 << room
        return taken

    def leave(self, room: int, packs: list[int]) -> None:
        """Add packs that have this much room left; full ones are not kept."""
        if packs and room:
            self._packs.setdefault(room, []).extend(packs)
            self._existing |= 1 << room
