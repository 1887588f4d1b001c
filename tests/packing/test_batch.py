"""Batches agree with a plain loop, for all world sizes and with prefetching."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.errors import InputError
from packing.arrow import IGNORE, Pack
from packing.batch import (
    Batching,
    BatchStream,
    Prefetch,
    build_microbatch,
    count_valid_tokens,
)
from packing.order import Mixture, Order
from packing.pack import best_fit, fill_pack
from tests.packing.conftest import PacksInMemory

LENGTH = 32


@st.composite
def packs_of_one_length(draw: st.DrawFn, length: int | None = None) -> list[Pack]:
    length = length or draw(st.integers(1, 24))
    packs = []
    for _ in range(draw(st.integers(1, 5))):
        lengths: list[int] = []
        while (room := length - sum(lengths)) and (not lengths or draw(st.integers(0, 9))):
            lengths.append(draw(st.integers(1, room)))
        ids = draw(st.lists(st.integers(0, 2**32 - 1), min_size=length, max_size=length))
        mask = draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length))
        trained = None if mask is None else np.array(mask)
        packs.append(Pack(np.array(ids, np.uint32), np.array(lengths, np.int32), trained))
    return packs


def packs_of_text(count: int = 24, seed: int = 0) -> PacksInMemory:
    """Return best-fit packs of unique tokens, so that a batch identifies its packs."""
    lengths = np.random.default_rng(seed).integers(1, LENGTH, 4 * count)
    layout = best_fit(lengths, LENGTH)
    assert len(layout) >= count and lengths.sum() < len(layout) * LENGTH, (
        "some packs must have a padding tail"
    )
    tokens = np.arange(1, lengths.sum() + 1)
    starts = np.cumsum(lengths) - lengths
    return PacksInMemory(
        [fill_pack(layout, n, tokens, starts, 0, masked=False) for n in range(count)]
    )


def stream(
    packs: PacksInMemory,
    *,
    per_step: int = 8,
    microbatch: int = 2,
    rank: int = 0,
    world_size: int = 1,
    **options: Any,
) -> BatchStream:
    options = {"mask_boundaries": True, "rank": rank, "world_size": world_size, **options}
    order = Order(Mixture.alone(len(packs)), seed=11)
    return BatchStream(packs, order, per_step, microbatch=microbatch, **options)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def plain_rows(
    packs: list[Pack], mask_boundaries: bool
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return token ids, positions, labels and document ends, computed token by token."""
    ids, positions, labels, ends = [], [], [], []
    for pack in packs:
        begin = len(ids)
        length = len(pack.input_ids)
        sizes = pack.lengths.tolist()
        real = sum(sizes)
        for size in [*sizes, length - real]:
            for place in range(size):
                offset = len(ids) - begin
                ids.append(int(pack.input_ids[offset]))
                positions.append(place)
                ends_document = place == size - 1 and mask_boundaries
                has_label = (
                    offset + 1 < real
                    and not ends_document
                    and (pack.trained is None or pack.trained[offset + 1])
                )
                labels.append(int(pack.input_ids[offset + 1]) if has_label else IGNORE)
            if size:
                ends.append(len(ids))
    return ids, positions, labels, ends


@settings(deadline=None)
@given(packs_of_one_length(), st.booleans())
def test_a_microbatch_equals_that_of_a_plain_loop(packs, mask_boundaries):
    batch = build_microbatch(packs, mask_boundaries=mask_boundaries)
    ids, positions, labels, ends = plain_rows(packs, mask_boundaries)
    total = len(ids)

    assert batch.input_ids.tolist() == [ids] and batch.input_ids.dtype == torch.int64
    assert batch.position_ids.tolist() == [positions] and batch.position_ids.dtype == torch.int64
    assert batch.labels.tolist() == [labels] and batch.labels.dtype == torch.int64
    offsets = batch.cu_seqlens.tolist()
    assert offsets[: len(ends) + 1] == [0, *ends] and set(offsets[len(ends) + 1 :]) <= {total}
    assert batch.cu_seqlens.dtype == torch.int32
    assert len(offsets) % 16 == 0 and len(offsets) - (len(ends) + 1) < 16
    assert batch.max_seqlen == len(packs[0].input_ids)
    assert batch.valid_tokens == sum(label != IGNORE for label in labels)
    counted = [count_valid_tokens(pack, mask_boundaries) for pack in packs]
    assert sum(counted) == batch.valid_tokens


@pytest.mark.parametrize("mask_boundaries", [True, False])
@pytest.mark.parametrize("per_step", [16, 8])
def test_any_number_of_ranks_trains_on_the_same_packs(per_step, mask_boundaries):
    """Blank packs fill the last microbatch of a rank.

    No rank starts with blanks, because the first microbatch is observed.
    """
    packs = packs_of_text()
    order = Order(Mixture.alone(len(packs)), seed=11)
    for place, world_size in itertools.product((0, 81), (1, 2, 3, 5, 8)):
        places = range(place, place + per_step)
        expected = Counter(order.packs_at(places).tolist())
        squares = sum(
            size**2 for index in expected.elements() for size in packs.packs[index].lengths.tolist()
        )
        for microbatch in (1, 2, 3):
            options = {"per_step": per_step, "microbatch": microbatch, "world_size": world_size}
            options["mask_boundaries"] = mask_boundaries
            steps = [stream(packs, rank=rank, **options).step(place) for rank in range(world_size)]
            count = -(-per_step // (world_size * microbatch))
            assert {len(step.microbatches) for step in steps} == {count}
            parts = [part for step in steps for part in step.microbatches]
            assert {part.input_ids.shape for part in parts} == {(1, microbatch * LENGTH)}
            assert all(step.microbatches[0].input_ids.any() for step in steps)
            rows = [row.tolist() for part in parts for row in part.input_ids.reshape(-1, LENGTH)]
            read = sorted(packs.packs[index].input_ids.tolist() for index in expected.elements())
            assert sorted(row for row in rows if any(row)) == read
            for step in steps:
                assert (step.tokens, step.sum_squared_lengths) == (per_step * LENGTH, squares)
                assert step.valid_tokens == sum(part.valid_tokens for part in parts)
                assert step.metrics["epoch"] == places.stop / len(packs)
                assert step.places == places


@settings(deadline=None)
@given(
    st.lists(st.integers(0, LENGTH), min_size=6, max_size=6), st.integers(1, 3), st.integers(1, 2)
)
def test_offsets_of_ranks_have_the_least_common_length(documents, world_size, microbatch):
    """A document has one token, and the rest of a pack is padding."""
    packs = PacksInMemory(
        [Pack(np.ones(LENGTH, np.uint32), np.ones(count, np.int32)) for count in documents]
    )
    options = {"per_step": 6, "microbatch": microbatch, "world_size": world_size}
    steps = [stream(packs, rank=rank, **options).step(0) for rank in range(world_size)]
    for together in zip(*(step.microbatches for step in steps), strict=True):
        most = max(len(part.cu_seqlens.unique()) for part in together)
        assert {len(part.cu_seqlens) for part in together} == {-(-most // 16) * 16}


def test_an_exception_of_the_thread_is_raised_in_its_step():
    packs = packs_of_text()
    bad = int(Order(Mixture.alone(len(packs)), 11).packs_at(range(16, 24))[3])  # in step 2
    packs.packs[bad] = Pack(np.full(LENGTH, 10**6, np.uint32), packs.packs[bad].lengths)
    with stream(packs, vocab_size=50_000).steps(0, 9) as steps:
        for _ in range(2):
            next(steps)
        message = rf"in_memory: pack {bad} contains the token id 1000000, but the model has"
        with pytest.raises(InputError, match=message):
            next(steps)
    assert not prefetch_threads()


def test_closing_early_ends_the_thread_and_iteration():
    with stream(packs_of_text()).steps(0, 10**9) as steps:
        assert [next(steps).places.start for _ in range(3)] == [0, 8, 16]
        assert len(prefetch_threads()) == 1
    assert not prefetch_threads() and list(steps) == []


def test_data_wait_is_the_sum_of_all_waits_for_a_step():
    gate = threading.Event()

    def build(number: int) -> int:
        gate.wait()
        return 1 // number

    with Prefetch(build, [1, 0], pin_memory=False) as steps:
        assert not steps.wait_until_ready(0.02) and not steps.wait_until_ready(0.02)
        gate.set()
        assert steps.wait_until_ready(60) and next(steps) == 1 and steps.data_wait_ms >= 40
        assert steps.wait_until_ready(60), "a failed step is ready at once"
        with pytest.raises(ZeroDivisionError):
            next(steps)
        assert steps.wait_until_ready(0), "no step follows"


@pytest.mark.parametrize("count", [1, 7, 13])
def test_evaluation_reads_every_pack_once_in_equal_shares(count):
    packs = packs_of_text(count=13)
    seen = packs.packs[:count]
    once = sorted(token for pack in seen for token in pack.input_ids[: pack.lengths.sum()].tolist())
    valid = sum(count_valid_tokens(pack, True) for pack in seen)
    for world_size, microbatch in itertools.product((1, 2, 3, 8), (1, 2, 4)):
        options = {"microbatch": microbatch, "world_size": world_size, "mask_boundaries": True}
        ranks = []
        for rank in range(world_size):
            with Batching(**options, rank=rank).evaluation(packs, count) as microbatches:
                ranks.append(list(microbatches))
        assert {len(parts) for parts in ranks} == {-(-len(seen) // (world_size * microbatch))}
        parts = [part for rank in ranks for part in rank]
        assert {part.input_ids.shape for part in parts} == {(1, microbatch * LENGTH)}
        read = sorted(token for part in parts for token in part.input_ids[0].tolist() if token)
        assert read == once
        assert sum(part.valid_tokens for part in parts) == valid
