"""Packing algorithms equal concatenation with reshape and a plain best-fit decreasing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from packing.arrow import Pack
from packing.pack import Layout, best_fit, fill_pack, truncate

FILL = 999_999_999
Strategy = Callable[[np.ndarray, int], Layout]

document_lengths = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 8)), max_size=60)
pack_lengths = st.integers(1, 24)
strategies = st.sampled_from([truncate, best_fit])


def corpus(lengths: list[int]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return flat tokens that are all different, the starts of documents, and the documents.

    The documents are stored in another order than they are listed.
    """
    flat = np.arange(1, sum(lengths) + 1, dtype=np.uint32)
    on_disk = np.random.default_rng(0).permutation(len(lengths))
    sizes = np.asarray(lengths, dtype=np.int64)
    starts = np.zeros(len(lengths), dtype=np.int64)
    starts[on_disk] = np.cumsum(sizes[on_disk]) - sizes[on_disk]
    return (
        flat,
        starts,
        [flat[start : start + size] for start, size in zip(starts, lengths, strict=True)],
    )


def all_packs(layout: Layout, flat: np.ndarray, starts: np.ndarray) -> list[Pack]:
    return [
        fill_pack(layout, number, flat, starts, FILL, masked=False) for number in range(len(layout))
    ]


def naive_best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Return the sorted room left in every pack by textbook best-fit decreasing."""
    room: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [pack for pack, left in enumerate(room) if left >= size]
        if fitting:
            room[min(fitting, key=lambda pack: room[pack])] -= size
        else:
            room.append(capacity - size)
    return sorted(room)


@given(document_lengths, pack_lengths, strategies)
def test_every_token_occurs_once_and_in_order_in_its_document(
    lengths: list[int], length: int, strategy: Strategy
) -> None:
    flat, starts, documents = corpus(lengths)
    layout = strategy(lengths, length)
    packs = all_packs(layout, flat, starts)
    pieces: dict[int, list[tuple[int, np.ndarray]]] = {}
    for pack in range(len(layout)):
        ids = packs[pack].input_ids
        sizes = packs[pack].lengths
        ends = np.cumsum(sizes)
        assert 0 < ends[-1] <= length and np.all(ids[ends[-1] :] == FILL)
        for piece, end, size in zip(
            range(*layout.offsets[pack : pack + 2]), ends, sizes, strict=True
        ):
            tokens = ids[end - size : end]
            pieces.setdefault(int(layout.document[piece]), []).append(
                (int(layout.start[piece]), tokens)
            )
    for number, document in enumerate(documents):
        in_order = [
            tokens for _, tokens in sorted(pieces.get(number, []), key=lambda piece: piece[0])
        ]
        np.testing.assert_array_equal(np.concatenate([*in_order, flat[:0]]), document)
    assert layout.cut_documents == sum(len(parts) > 1 for parts in pieces.values())


@given(document_lengths, pack_lengths)
def test_truncate_equals_concatenation_and_reshape(lengths: list[int], length: int) -> None:
    flat, starts, documents = corpus(lengths)
    joined = np.concatenate([*documents, flat[:0]])
    packs = all_packs(truncate(lengths, length), flat, starts)
    expected = np.append(joined, np.full(-len(joined) % length, FILL)).reshape(-1, length)
    assert [pack.input_ids.tolist() for pack in packs] == expected.tolist()
    assert all(pack.input_ids.dtype == np.uint32 for pack in packs)
    assert all(int(pack.lengths.sum()) == length for pack in packs[:-1])


@example(np.random.default_rng(1).integers(1, 4096, 4000).tolist(), 4096)
@example(np.random.default_rng(1).integers(1, 200_000, 300).tolist(), 100_000)
@given(document_lengths, pack_lengths)
def test_best_fit_cuts_only_documents_longer_than_a_pack(lengths: list[int], length: int) -> None:
    layout = best_fit(lengths, length)
    assert layout.cut_documents == sum(size > length for size in lengths)
    assert not np.any(layout.start % length)
    sizes = np.split(layout.stop - layout.start, layout.offsets[1:-1])
    room = sorted(length - int(sizes_of_pack.sum()) for sizes_of_pack in sizes[: len(layout)])
    pieces = [min(length, n - start) for n in lengths for start in range(0, n, length)]
    assert room == naive_best_fit(pieces, length)
