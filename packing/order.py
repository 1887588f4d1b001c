"""Select the pack at each place of the data, and the packs of each rank, by pure functions.

The packs of a training form an endless stream. A place is an index in this stream. Each place
belongs to one source, so that every source gets its share of the tokens. A source repeats its packs
epoch after epoch, in another order each time. The order of an epoch is a permutation that directly
gives the pack at any place. So the position of a run in its data is one number: the place of the
next pack. The packs of a step do not depend on the number of processes. Pseudo-random numbers are
computed here by integer arithmetic, because the random generator of a library may change between
versions.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np

from foundation.errors import InputError
from foundation.files import hash_of
from packing.arrow import ArrowPacks, Pack, Packs, locate

# Number of rounds in `permute`, and least number of bits that it permutes. With eight rounds over 6
# bits or more, all orders of up to 8 packs are equally frequent according to a chi-square test of
# 20,000 seeds. With 4 bits, some orders are more frequent, even with twelve rounds.
_ROUNDS = 8
_LEAST_BITS = 6
# Largest number of packs from which a mean is estimated.
_SAMPLED_PACKS = 1000
# Shares are rounded to multiples of 1 / _SHARE_UNITS and computed as integers. The product of a
# place and such an integer fits into 64 bits for up to 2^39 packs.
_SHARE_UNITS = 1 << 24


def evenly(count: int, most: int) -> list[int]:
    """Return all indices 0 to count - 1, or `most` evenly spaced ones if `count` exceeds `most`."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int)).tolist()


def sampled(packs: Packs) -> Iterator[Pack]:
    """Yield a sample of evenly spaced packs, to estimate a mean. It has at most 1,000 packs."""
    return (packs[index] for index in evenly(len(packs), _SAMPLED_PACKS))


@dataclass(frozen=True)
class Mixture:
    """Rule that assigns each place in the endless stream of packs to one source."""

    # Names of the sources. A single source has the name "".
    names: tuple[str, ...]
    # Number of packs of each source.
    counts: tuple[int, ...]
    # Intended share of each source in the tokens. The sum is 1.
    weights: tuple[float, ...]
    # Mean tokens in a pack of each source, without padding.
    tokens_per_pack: tuple[float, ...]

    @classmethod
    def alone(cls, count: int) -> Mixture:
        """Return the mixture of one source with `count` packs."""
        return cls(names=("",), counts=(count,), weights=(1.0,), tokens_per_pack=(1.0,))

    def shares_of_packs(self) -> list[float]:
        """Return the share of each source in the packs. The shares sum to 1.

        A source's share of the packs is proportional to its share of the tokens, divided by its
        tokens per pack.
        """
        relative_packs = [
            weight / tokens
            for weight, tokens in zip(self.weights, self.tokens_per_pack, strict=True)
        ]
        return [packs / sum(relative_packs) for packs in relative_packs]

    def packs_before(self, places: np.ndarray | int) -> list[np.ndarray]:
        """Return, for each source, the number of its packs before each of `places`.

        Each array is int64 and has the shape of `places`.
        """
        packs = []
        shares = self.shares_of_packs()
        # Number of places that do not belong to earlier sources.
        remaining = np.asarray(places, np.int64)
        for number, share in enumerate(shares):
            # The rate is the source's share of the remaining places. The last source gets all of
            # them.
            rate = round(_SHARE_UNITS * share / sum(shares[number:]))
            packs_of_source = remaining * rate // _SHARE_UNITS
            packs.append(packs_of_source)
            remaining = remaining - packs_of_source
        return packs

    def epochs(self, place: int) -> dict[str, float]:
        """Map the name of each source to the number of its epochs before `place`."""
        numbers = zip(self.names, self.packs_before(place), self.counts, strict=True)
        return {name: int(packs) / count for name, packs, count in numbers}

    def shares(self, place: int) -> dict[str, float]:
        """Map the name of each source to its share of the tokens before `place`.

        At place 0, return the intended shares.
        """
        tokens = [
            int(packs) * per_pack
            for packs, per_pack in zip(self.packs_before(place), self.tokens_per_pack, strict=True)
        ]
        shares = [count / sum(tokens) for count in tokens] if any(tokens) else self.weights
        return dict(zip(self.names, shares, strict=True))


@dataclass(frozen=True)
class Order:
    """The order of the packs in the endless stream.

    Packs are numbered source by source: first all packs of the first source, then all packs of the
    second source, and so on. Within an epoch of a source, no pack is dropped or repeated. A step
    that reaches the end of an epoch continues with the first packs of the next epoch.
    """

    mixture: Mixture
    seed: int

    def packs_at(self, places: range) -> np.ndarray:
        """Return the index of the pack at each of `places`, as an int64 array."""
        packs = np.empty(len(places), np.int64)
        counts = self.mixture.packs_before(np.arange(places.start, places.stop + 1))
        for number, before in enumerate(counts):
            # Indices in `places` of the places that belong to this source.
            indices = np.flatnonzero(np.diff(before))
            packs[indices] = self.packs_of_source(number, before[indices])
        return packs

    def packs_of_source(self, number: int, places: np.ndarray) -> np.ndarray:
        """Return the indices of the packs of source `number` at `places`.

        `places` is an ascending int64 array of places among the packs of this source alone. The
        result is int64 and has the same shape. The packs of each part are shuffled separately.
        """
        key = splitmix64(np.asarray([self.seed]).astype(np.uint64))
        # Mix the number of the source into the key. Otherwise, sources of equal size would go
        # through their packs in the same order.
        if self.is_mixed:
            key = splitmix64(splitmix64(key + np.uint64(number)))
        packs = np.empty_like(places)
        done = 0
        while done < len(places):
            part, covered, first = self.part_at(number, int(places[done]))
            last = int(np.searchsorted(places, covered.stop))
            within = places[done:last] - covered.start
            # Mix the seed before the number of the part is added. Otherwise, seed 0 in epoch 1 and
            # seed 1 in epoch 0 would give the same order.
            part_key = splitmix64(key + np.uint64(part))
            packs[done:last] = first + permute(within, len(covered), part_key)
            done = last
        return packs

    @property
    def is_mixed(self) -> bool:
        """Return True if the order depends on the number of the source."""
        return self.mixture.names != ("",)

    def part_at(self, number: int, place: int) -> tuple[int, range, int]:
        """Return the part of source `number` that has the pack at `place`.

        The result is (number of the part, places of its packs, index of its first pack). The parts
        of packs that were prepared before the run are their epochs.
        """
        count = self.mixture.counts[number]
        epoch = place // count
        places = range(epoch * count, (epoch + 1) * count)
        return epoch, places, sum(self.mixture.counts[:number])

    def stop_waiting(self) -> None:
        """Do nothing, because all packs exist and no thread waits. `StreamOrder` overrides this."""

    def metrics(self, place: int) -> dict[str, float]:
        """Return the metrics of a run that has read all packs before `place`, by name.

        The metric `epoch` is `place` divided by the number of packs in all sources. If there are
        several sources, the dict also has the number of epochs and the share of tokens of each
        source.
        """
        metrics = {"epoch": place / sum(self.mixture.counts)}
        if self.mixture.names == ("",):
            return metrics
        for name, epoch in self.mixture.epochs(place).items():
            metrics[f"epoch/{name}"] = epoch
        for name, share in self.mixture.shares(place).items():
            metrics[f"share/{name}"] = share
        return metrics


class MixedPacks(Packs):
    """The packs of several sources, concatenated in the order of the sources."""

    def __init__(
        self,
        path: Path,
        sources: Mapping[str, Packs],
        weights: Mapping[str, float],
    ) -> None:
        """Join `sources`, which maps the name of each source to its packs.

        `weights` maps the name of each source to its intended share of the tokens. Raises
        InputError if two sources were made with different tokenizers.
        """
        self.path = path
        self.joined = list(sources.values())
        self._starts = [0, *accumulate(map(len, self.joined))]
        self.by_source = dict(sources)
        self.weights = {name: weights[name] for name in sources}
        self.length = self.joined[0].length
        # MDS and token .bin files do not record their tokenizer.
        recorded = [packs.tokenizer for packs in self.joined if packs.tokenizer]
        if len({tokenizer["fingerprint"] for tokenizer in recorded}) > 1:
            raise InputError(
                f"{path}: the packs of the sources were made with different tokenizers; prepare "
                "all sources with the same tokenizer"
            )
        self.tokenizer = recorded[0] if recorded else None
        # Value from which the fingerprint is computed.
        self.content = [
            [name, packs.fingerprint, self.weights[name]] for name, packs in self.by_source.items()
        ]
        self.fingerprint = hash_of(self.content)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Pack:
        number, row = locate(self._starts, index)
        return self.joined[number][row]

    @cached_property
    def mixture(self) -> Mixture:
        """Rule that mixes these sources."""
        counts = tuple(map(len, self.joined))
        tokens_per_pack = tuple(map(_tokens_of, self.joined))
        return Mixture(tuple(self.by_source), counts, tuple(self.weights.values()), tokens_per_pack)


def mixture_of(packs: Packs) -> Mixture:
    """Return the rule that mixes the sources of packs that were prepared before the run."""
    return packs.mixture if isinstance(packs, MixedPacks) else Mixture.alone(len(packs))


def _tokens_of(packs: Packs) -> float:
    """Return the mean number of tokens in a pack, without padding.

    If the format does not record this number, estimate it from sampled packs.
    """
    if isinstance(packs, ArrowPacks):
        return packs.tokens / len(packs)
    return float(np.mean([int(pack.lengths.sum()) for pack in sampled(packs)]))


def spread(
    costs: Sequence[int] | np.ndarray, ranks: int, microbatches: int
) -> list[list[list[int]]]:
    """Distribute packs over ranks and microbatches evenly, both by number and by cost.

    `costs` has one cost for each pack: the sum of its squared document lengths. The number of packs
    must be a multiple of the number of microbatches over all ranks. The cost of
    attention is proportional to this sum, and all other costs are equal for all packs. The result
    has the indices of the packs in each microbatch, as result[rank][microbatch].

    The algorithm is "longest processing time first" (Graham 1969) with equal numbers of packs: the
    costliest remaining pack is assigned to the cheapest microbatch that is not full. Microbatches
    are then assigned to ranks in rounds, the costliest ones first. Each rank gets one microbatch in
    a round, so microbatches of similar cost run at the same time on all ranks. The costliest
    microbatch of a round is assigned to the rank with the lowest cost so far. If costs are equal,
    the lower index comes first.
    """
    bins = ranks * microbatches
    packs_per_bin = len(costs) // bins
    members: list[list[int]] = [[] for _ in range(bins)]
    load = [0] * bins
    lightest = [(0, number) for number in range(bins)]
    # `sorted` keeps the order of packs, microbatches and ranks with equal costs.
    for index in sorted(range(len(costs)), key=lambda i: -int(costs[i])):
        _, number = heapq.heappop(lightest)
        members[number].append(index)
        load[number] += int(costs[index])
        if len(members[number]) < packs_per_bin:
            heapq.heappush(lightest, (load[number], number))

    costliest_first = iter(sorted(range(bins), key=lambda number: -load[number]))
    result: list[list[list[int]]] = [[] for _ in range(ranks)]
    total = [0] * ranks
    for _ in range(microbatches):
        for rank in sorted(range(ranks), key=total.__getitem__):
            number = next(costliest_first)
            result[rank].append(sorted(members[number]))
            total[rank] += load[number]
    return result


def permute(places: np.ndarray, size: int, key: int | np.ndarray) -> np.ndarray:
    """Return the values at `places` of a pseudo-random permutation of range(size).

    `places` are integers in range(size). `key` selects the permutation: it is an integer, or an
    array with a key for each place. The result is int64 and has the shape of `places`.

    A Feistel network maps the numbers of b bits to each other one to one, for any round function.
    Here b is the smallest number of bits that covers `size`, and at least 6. A value outside of
    range(size) goes through the network again until it is inside ("cycle walking", Black and
    Rogaway 2002). The mapping stays one to one, and sizes above 32 need at most 2 passes on
    average. The round function uses splitmix64.
    """
    value = np.asarray(places, dtype=np.uint64)
    keys = np.broadcast_to(np.asarray(key).astype(np.uint64), value.shape)
    bits = max(_LEAST_BITS, (size - 1).bit_length())
    value = _feistel(value, keys, bits)
    outside = np.flatnonzero(value >= size)
    while len(outside):
        value.flat[outside] = _feistel(value.flat[outside], keys.flat[outside], bits)
        outside = outside[value.flat[outside] >= size]
    return value.astype(np.int64)


def _feistel(value: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """Apply eight Feistel rounds to numbers of `bits` bits.

    If `bits` is odd, the lower half of a number has one bit more than the upper half.
    """
    upper_bits = np.uint64(bits // 2)
    lower_bits = np.uint64(bits - bits // 2)
    one = np.uint64(1)
    upper, lower = value >> lower_bits, value & ((one << lower_bits) - one)
    for number in range(1, _ROUNDS + 1, 2):
        upper = upper ^ (_mix(lower, keys, number) & ((one << upper_bits) - one))
        lower = lower ^ (_mix(upper, keys, number + 1) & ((one << lower_bits) - one))
    return (upper << lower_bits) | lower


def _mix(half: np.ndarray, keys: np.ndarray, number: int) -> np.ndarray:
    """Return 64 bits that depend on half of a value, on the key and on the number of the round."""
    return splitmix64(keys ^ splitmix64(half + np.uint64(number << 40)))


def splitmix64(state: np.ndarray) -> np.ndarray:
    """Return the next output of the random generator splitmix64 for each uint64 state in `state`.

    Different states have different outputs. The algorithm is from Steele, Lea and Flood 2014, and
    the constants are Vigna's.
    """
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
