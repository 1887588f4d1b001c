"""Packing algorithms against plain ones: concatenate-and-reshape, and best-fit decreasing that looks at every pack."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing.pack import Layout, PackBlock, best_fit, materialise, truncate

FILL = 999_999_999

document_lengths = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 8)), max_size=60)
pack_lengths = st.integers(1, 24)
strategies = st.sampled_from([truncate, best_fit])


def corpus(lengths: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Tokens that are all different, lying in another order than the documents are given in: flat, starts, documents."""
    flat = np.arange(1, sum(lengths) + 1, dtype=np.uint32)
    on_disk = np.random.default_rng(seed).permutation(len(lengths))
    sizes = np.asarray(lengths, dtype=np.int64)
    starts = np.zeros(len(lengths), dtype=np.int64)
    starts[on_disk] = np.cumsum(sizes[on_disk]) - sizes[on_disk]
    return flat, starts, [flat[start : start + size] for start, size in zip(starts, lengths, strict=True)]


def whole(layout: Layout, flat: np.ndarray, starts: np.ndarray) -> PackBlock:
    return materialise(layout, 0, len(layout), flat, starts, FILL)


def naive_best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Room left in each pack after textbook best-fit decreasing, sorted."""
    room: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [pack for pack, left in enumerate(room) if left >= size]
        if fitting:
            room[min(fitting, key=lambda pack: room[pack])] -= size
        else:
            room.append(capacity - size)
    return sorted(room)


@settings(deadline=None)
@given(document_lengths, pack_lengths, strategies)
def test_every_token_stands_exactly_once_and_in_order_within_its_document(lengths, length, strategy):
    flat, starts, documents = corpus(lengths)
    layout = strategy(np.array(lengths, dtype=np.int64), length)
    block = whole(layout, flat, starts)

    found: dict[int, list[tuple[int, np.ndarray]]] = {}
    for pack in range(len(layout)):
        at = 0
        for piece, size in zip(range(*layout.offsets[pack : pack + 2]), block.lengths_of(pack), strict=True):
            found.setdefault(int(layout.document[piece]), []).append(
                (int(layout.start[piece]), block.input_ids[pack, at : at + size])
            )
            at += size
        assert 0 < at <= length
        assert np.all(block.input_ids[pack, at:] == FILL)
    for number, document in enumerate(documents):
        pieces = sorted(found.get(number, []), key=lambda piece: piece[0])
        assert [start for start, _ in pieces] == np.cumsum([0, *(len(p) for _, p in pieces)]).tolist()[: len(pieces)]
        np.testing.assert_array_equal(np.concatenate([p for _, p in pieces]) if pieces else [], document)
    assert (layout.stop - layout.start).sum() == sum(lengths)
    assert layout.cut_documents == sum(len(pieces) > 1 for pieces in found.values())


@settings(deadline=None)
@given(document_lengths, pack_lengths)
def test_truncate_is_concatenate_and_reshape(lengths, length):
    flat, starts, documents = corpus(lengths)
    joined = np.concatenate([*documents, np.zeros(0, dtype=np.uint32)])
    expected = np.append(joined, np.full(-len(joined) % length, FILL)).reshape(-1, length)

    block = whole(truncate(lengths, length), flat, starts)

    np.testing.assert_array_equal(block.input_ids, expected)
    assert block.input_ids.dtype == np.uint32 and block.lengths.dtype == np.int32
    sums = [int(block.lengths_of(pack).sum()) for pack in range(len(expected))]
    assert all(total == length for total in sums[:-1]), "only the last pack may be short"


@settings(deadline=None)
@given(document_lengths, pack_lengths)
def test_best_fit_cuts_only_documents_longer_than_a_pack_and_those_at_pack_lengths(lengths, length):
    layout = best_fit(lengths, length)
    assert layout.cut_documents == sum(size > length for size in lengths)
    assert not np.any(layout.start % length)
    np.testing.assert_array_equal(layout.stop, np.minimum(layout.start + length, np.array(lengths, dtype=int)[layout.document]))


@settings(deadline=None)
@given(document_lengths, pack_lengths)
def test_best_fit_leaves_the_room_that_the_textbook_algorithm_leaves(lengths, length):
    layout = best_fit(lengths, length)
    sizes = [min(length, size - start) for size in lengths for start in range(0, size, length)]
    filled = [int((layout.stop - layout.start)[slice(*layout.offsets[p : p + 2])].sum()) for p in range(len(layout))]
    assert sorted(length - total for total in filled) == naive_best_fit(sizes, length)


def test_best_fit_matches_the_textbook_on_realistic_lengths_and_fills_its_packs():
    lengths = np.random.default_rng(1).lognormal(np.log(200) - 0.5, 1.0, 4000).astype(int) + 1
    layout = best_fit(lengths, 4096)
    sizes = [min(4096, size - start) for size in lengths.tolist() for start in range(0, size, 4096)]
    assert len(layout) == len(naive_best_fit(sizes, 4096))
    assert (layout.stop - layout.start).sum() > 0.99 * len(layout) * layout.length


def test_best_fit_beyond_16_bit_lengths_matches_the_textbook():
    lengths = np.random.default_rng(2).integers(1, 200_000, 300)
    layout = best_fit(lengths, 100_000)
    sizes = [min(100_000, size - start) for size in lengths.tolist() for start in range(0, size, 100_000)]
    assert len(layout) == len(naive_best_fit(sizes, 100_000))


def test_best_fit_packs_are_not_sorted_by_size():
    lengths = np.random.default_rng(3).lognormal(np.log(200) - 0.5, 1.0, 20_000).astype(int) + 1
    layout = best_fit(lengths, 4096)
    documents = np.diff(layout.offsets)
    place = np.arange(len(layout))
    assert abs(np.corrcoef(place, documents)[0, 1]) < 0.1
    halves = documents[: len(layout) // 2].mean(), documents[len(layout) // 2 :].mean()
    assert halves[0] == pytest.approx(halves[1], rel=0.15)


@settings(deadline=None)
@given(document_lengths, pack_lengths, strategies, st.integers(1, 5))
def test_chunks_of_packs_join_to_the_whole(lengths, length, strategy, chunk):
    flat, starts, _ = corpus(lengths)
    layout = strategy(lengths, length)
    joined = whole(layout, flat, starts)
    for first in range(0, len(layout), chunk):
        last = min(first + chunk, len(layout))
        block = materialise(layout, first, last, flat, starts, FILL)
        np.testing.assert_array_equal(block.input_ids, joined.input_ids[first:last])
        for pack in range(first, last):
            np.testing.assert_array_equal(block.lengths_of(pack - first), joined.lengths_of(pack))


def test_tokens_may_be_memory_mapped_16_bit(tmp_path):
    lengths = np.array([5, 3, 9, 0, 4])
    flat, starts, _ = corpus(lengths.tolist())
    flat.astype(np.uint16).tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    for strategy in (truncate, best_fit):
        layout = strategy(lengths, 6)
        np.testing.assert_array_equal(whole(layout, mapped, starts).input_ids, whole(layout, flat, starts).input_ids)


@pytest.mark.parametrize("strategy", [truncate, best_fit])
def test_nothing_gives_no_packs(strategy):
    for lengths in ([], [0, 0]):
        layout = strategy(lengths, 8)
        assert len(layout) == 0 and layout.cut_documents == 0
        assert whole(layout, np.zeros(0, dtype=np.uint32), np.zeros(len(lengths), dtype=int)).input_ids.shape == (0, 8)


@pytest.mark.parametrize("strategy", [truncate, best_fit])
def test_impossible_lengths_are_refused(strategy):
    with pytest.raises(ValueError, match="document 1 has a negative length"):
        strategy([3, -1], 8)
