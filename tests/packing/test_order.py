"""The order of packs is a uniform permutation that never changes, with shares of several sources.

Packs are dealt evenly to ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing.order import Mixture, Order, permute, spread


def totals(costs: list[int], dealt: list[list[list[int]]]) -> list[int]:
    return [sum(costs[i] for i in places) for rank in dealt for places in rank]


@given(
    st.sampled_from([1, 2, 63, 64, 65, 4095, 4096, 4097]) | st.integers(1, 5000),
    st.integers(0, 2**64 - 1),
)
def test_permute_is_a_bijection_of_any_size(size, key):
    np.testing.assert_array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@pytest.mark.parametrize("size", [3, 4, 5])
def test_all_orders_of_a_few_packs_are_equally_frequent(size):
    keys = 200 * math.factorial(size)
    orders = permute(
        np.tile(np.arange(size), keys), size, np.repeat(np.arange(keys), size)
    ).reshape(keys, size)
    _, counts = np.unique(orders @ size ** np.arange(size), return_counts=True)
    assert len(counts) == math.factorial(size)
    free = len(counts) - 1
    chi_square = ((counts - 200) ** 2 / 200).sum()
    assert abs(chi_square - free) < 4 * math.sqrt(2 * free)


def test_the_order_never_changes_between_versions():
    # Recorded values. Other values would make every saved run resume with other data.
    assert permute(np.arange(10), 10, 42).tolist() == [0, 2, 7, 3, 9, 4, 6, 5, 1, 8]
    assert permute(np.arange(6), 5000, 2**63).tolist() == [77, 1511, 4776, 2595, 1733, 3500]
    alone = Order(Mixture.alone(1000), seed=42)
    assert alone.packs_at(range(6)).tolist() == [290, 894, 144, 929, 126, 638]
    assert alone.packs_at(range(996, 1002)).tolist() == [242, 149, 344, 546, 852, 210]
    mixed = Order(Mixture(("a", "b"), (10, 4), (0.7, 0.3), (64.0, 64.0)), seed=42)
    assert mixed.packs_at(range(6)).tolist() == [10, 0, 8, 13, 4, 5]
    assert mixed.packs_at(range(300, 306)).tolist() == [1, 3, 7, 11, 2, 4]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.data())
def test_spread_deals_every_pack_once_in_equal_numbers(
    ranks, microbatches, packs_per_microbatch, data
):
    count = ranks * microbatches * packs_per_microbatch
    costs = data.draw(st.lists(st.integers(0, 10**9), min_size=count, max_size=count))
    dealt = spread(costs, ranks, microbatches)
    assert [len(rank) for rank in dealt] == [microbatches] * ranks
    assert all(len(places) == packs_per_microbatch for rank in dealt for places in rank)
    assert sorted(i for rank in dealt for places in rank for i in places) == list(range(count))
    assert dealt == spread(np.array(costs, dtype=np.int64), ranks, microbatches)


def test_a_costly_microbatch_goes_to_the_rank_with_the_lowest_cost():
    dealt = spread([4, 3, 2, 1], ranks=2, microbatches=2)
    assert dealt == [[[0], [3]], [[1], [2]]]


def best_possible(costs: list[int], bins: int) -> int:
    """Return the least possible cost of the costliest bin.

    All bins have the same number of packs, and all assignments are tried.
    """
    bin_size = len(costs) // bins

    def fill(remaining: tuple[int, ...]) -> int:
        if not remaining:
            return 0
        first, *rest = remaining
        return min(
            max(
                costs[first] + sum(costs[i] for i in mates),
                fill(tuple(i for i in rest if i not in mates)),
            )
            for mates in itertools.combinations(rest, bin_size - 1)
        )

    return fill(tuple(range(len(costs))))


@given(st.sampled_from([(2, 2), (2, 3), (3, 2), (2, 4), (4, 2)]), st.data())
def test_spread_is_near_the_best_of_all_assignments(shape, data):
    bins, bin_size = shape
    costs = data.draw(
        st.lists(st.integers(1, 1000), min_size=bins * bin_size, max_size=bins * bin_size)
    )
    best = best_possible(costs, bins)
    assert max(totals(costs, spread(costs, bins, 1))) <= 4 / 3 * best
    assert max(totals(costs, spread(costs, 1, bins))) <= 4 / 3 * best


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    count = draw(st.integers(1, 4))
    if count == 1:
        return Mixture.alone(draw(st.integers(1, 20)))
    raw = draw(st.lists(st.floats(0.02, 1), min_size=count, max_size=count))
    return Mixture(
        names=tuple("abcd"[:count]),
        counts=tuple(draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))),
        weights=tuple(weight / sum(raw) for weight in raw),
        tokens_per_pack=tuple(draw(st.lists(st.floats(20, 64), min_size=count, max_size=count))),
    )


@given(mixtures(), st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(0, 40))
def test_the_pack_at_a_place_does_not_depend_on_the_step(
    mixture: Mixture, seed: int, first: int, count: int
) -> None:
    order = Order(mixture, seed)
    places = range(first, first + count)
    assert order.packs_at(places).tolist() == [
        int(order.packs_at(range(place, place + 1))[0]) for place in places
    ]
    assert order.metrics(first)["epoch"] == first / sum(mixture.counts)


@settings(max_examples=8)
@given(mixtures(), st.integers(0, 5))
def test_sources_have_their_shares_and_epochs_have_all_packs(mixture: Mixture, seed: int) -> None:
    stream = Order(mixture, seed).packs_at(range(150))
    firsts = np.cumsum([0, *mixture.counts])
    source = np.searchsorted(firsts, stream, "right") - 1
    tokens = np.cumsum(np.eye(len(mixture.names))[source] * mixture.tokens_per_pack, axis=0)
    expected = tokens.sum(1)[:, None] * mixture.weights
    # With every source before it, a source may be one more pack away from its share.
    assert (abs(tokens - expected) <= len(mixture.names) * max(mixture.tokens_per_pack)).all()
    for first, count in zip(firsts, mixture.counts, strict=False):
        source_packs = [int(pack - first) for pack in stream if first <= pack < first + count]
        for start in range(0, len(source_packs), count):
            epoch = source_packs[start : start + count]
            assert len(set(epoch)) == len(epoch)
            assert len(epoch) < count or set(epoch) == set(range(count))
    before = dict(zip(mixture.names, map(int, mixture.packs_before(len(stream))), strict=True))
    seen = Counter(mixture.names[number] for number in source)
    assert before == {name: seen[name] for name in mixture.names}
    assert mixture.epochs(len(stream)) == pytest.approx(
        {n: before[n] / c for n, c in zip(before, mixture.counts, strict=True)}
    )
    assert sum(mixture.shares(len(stream)).values()) == pytest.approx(1)
    assert mixture.shares(0) == dict(zip(mixture.names, mixture.weights, strict=True))
    assert mixture.shares(1)[mixture.names[source[0]]] == 1
