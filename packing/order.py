"""Decide which packs form a step, and which rank computes which of them, by pure functions.

The stream of packs is endless. Each place in it belongs to one of the sources, by their shares of
the tokens. Each source goes through its packs epoch after epoch, in another order each time. An
epoch's order is a permutation that gives the pack at place i directly. So a run resumes by the
number of its step, and any number of processes sees the same packs. The integer arithmetic is
written out, since the random generator of a library may change between versions.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foundation.errors import InputError
from foundation.files import hash_of
from packing.arrow import ArrowPacks, JoinedPacks, Packs

# With eight rounds over 6 bits or more, all orders of up to 8 packs are equally frequent, by a
# chi-square test of 20,000 seeds. Over 4 bits they are not, even with twelve rounds.
_ROUNDS = 8
_LEAST_BITS = 6
_SAMPLED_PACKS = 1000
# Shares are rounded to multiples of 1 / _PARTS. Then places of up to 2^39 packs fit 64 bits.
_PARTS = 1 << 24


def evenly(count: int, most: int) -> list[int]:
    """Return the indices of `count` packs, or of `most` evenly spread ones if there are more."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int)).tolist()


@dataclass(frozen=True)
class Mixture:
    """The rule that assigns each place in the endless stream of packs to one source."""

    names: tuple[str, ...]  # ("",) for a single source
    counts: tuple[int, ...]  # packs of each source
    weights: tuple[float, ...]  # intended share of each source in the tokens; their sum is 1
    tokens_per_pack: tuple[float, ...]  # mean tokens in a pack of each source, without padding

    @classmethod
    def alone(cls, count: int) -> Mixture:
        """Return the mixture of one source with `count` packs."""
        return cls(("",), (count,), (1.0,), (1.0,))

    @property
    def share_of_packs(self) -> list[float]:
        """Share of each source in the packs: its share of the tokens, over the tokens of a pack.

        The shares sum to 1.
        """
        packs = [
            weight / tokens
            for weight, tokens in zip(self.weights, self.tokens_per_pack, strict=True)
        ]
        return [count / sum(packs) for count in packs]

    def packs_before(self, places: np.ndarray | int) -> list[np.ndarray]:
        """Return, for each source, how many of the packs before `places` belong to it.

        Each array is int64 and has the shape of `places`.
        """
        left = np.asarray(places, np.int64)
        shares = self.share_of_packs
        packs = []
        for number, share in enumerate(shares):
            # A rate of the places that earlier sources leave. The last source takes all of them.
            rate = round(_PARTS * share / sum(shares[number:]))
            packs.append(left * rate // _PARTS)
            left = left - packs[-1]
        return packs

    def epochs(self, place: int) -> dict[str, float]:
        """Return the epochs of each source before `place`."""
        packs = self.packs_before(place)
        return {
            name: int(done) / count
            for name, done, count in zip(self.names, packs, self.counts, strict=True)
        }

    def shares(self, place: int) -> dict[str, float]:
        """Return the share of each source in the tokens before `place`, or its weight for none."""
        tokens = [
            int(packs) * per_pack
            for packs, per_pack in zip(self.packs_before(place), self.tokens_per_pack, strict=True)
        ]
        shares = [count / sum(tokens) for count in tokens] if any(tokens) else self.weights
        return dict(zip(self.names, shares, strict=True))


@dataclass(frozen=True)
class Order:
    """The endless stream of packs, cut into steps. Packs are numbered one source after another.

    Nothing is dropped or repeated within an epoch of a source. A step that reaches the end of an
    epoch continues with the first packs of the next one.
    """

    mixture: Mixture
    packs_per_step: int
    seed: int
    # Offset of step 0 in the stream, in packs. Negative if earlier steps were smaller.
    shift: int = 0

    def places_of_step(self, step: int) -> range:
        """Return the places of step `step`, counted from 0, in the stream."""
        first = step * self.packs_per_step + self.shift
        return range(first, first + self.packs_per_step)

    def packs_of_step(self, step: int) -> np.ndarray:
        """Return the indices of a step's packs, in stream order: [packs_per_step] int64."""
        places = np.array(self.places_of_step(step), np.int64)
        before = self.mixture.packs_before(places)
        after = self.mixture.packs_before(places + 1)
        packs = np.empty_like(places)
        for number in range(len(before)):
            of_source = np.flatnonzero(after[number] > before[number])
            packs[of_source] = self.packs_of_source(number, before[number][of_source])
        return packs

    def packs_of_source(self, number: int, places: np.ndarray) -> np.ndarray:
        """Return the packs at `places`, ascending int64, of the stream of source `number` alone."""
        key = splitmix64(np.asarray([self.seed]).astype(np.uint64))
        # Sources of equal size must not go through their packs in the same order.
        if self.mixture.names != ("",):
            key = splitmix64(splitmix64(key + np.uint64(number)))
        count = self.mixture.counts[number]
        epoch, within = np.divmod(places, count)
        first = sum(self.mixture.counts[:number])
        # The seed is mixed before the epoch is added. So (seed 0, epoch 1) differs from (1, 0).
        return first + permute(within, count, splitmix64(key + epoch.astype(np.uint64)))

    def stop_waiting(self) -> None:
        """Stop a thread that waits for packs of this order. Packs that exist are not waited for."""

    def epoch_of(self, step: int) -> float:
        """Return the number of packs before `step` over the number of packs in all sources.

        The epochs of several sources differ; see `figures`.
        """
        return self.places_of_step(step).start / sum(self.mixture.counts)

    def epochs(self, step: int) -> dict[str, float]:
        """Return the epochs of each source when `step` starts."""
        return self.mixture.epochs(self.places_of_step(step).start)

    def figures(self, step: int) -> dict[str, float]:
        """Return metrics after `step` steps: epochs and share of the tokens of each source."""
        if self.mixture.names == ("",):
            return {}
        figures = {f"epoch/{name}": epoch for name, epoch in self.epochs(step).items()}
        shares = self.mixture.shares(self.places_of_step(step).start)
        return figures | {f"share/{name}": share for name, share in shares.items()}


class MixedPacks(JoinedPacks):
    """The packs of several sources, one source after another."""

    def __init__(
        self, path: Path, parts: Mapping[str, Packs], weights: Mapping[str, float]
    ) -> None:
        """Raise InputError if two sources were made with different tokenizers."""
        super().__init__(path, list(parts.values()))
        self.parts = dict(parts)
        self.weights = {name: weights[name] for name in parts}
        self.length = self.joined[0].length
        # MDS and token .bin do not record their tokenizer.
        recorded = [packs for packs in self.joined if (packs.tokenizer or {}).get("fingerprint")]
        self.tokenizer = (recorded or self.joined)[0].tokenizer
        fingerprint = (self.tokenizer or {}).get("fingerprint")
        for packs in recorded:
            if (packs.tokenizer or {})["fingerprint"] != fingerprint:
                raise InputError(
                    f"{packs.path}: made with another tokenizer than {recorded[0].path}; "
                    "prepare them with the same"
                )
        self.fingerprint = hash_of(
            [[name, packs.fingerprint, self.weights[name]] for name, packs in self.parts.items()]
        )

    def mixture(self) -> Mixture:
        """Return the rule that mixes these sources."""
        counts = tuple(map(len, self.joined))
        tokens = tuple(map(_tokens_of, self.joined))
        return Mixture(tuple(self.parts), counts, tuple(self.weights.values()), tokens)


def order_of(packs: Packs, packs_per_step: int, seed: int, shift: int = 0) -> Order:
    """Return the order of prepared `packs` in a training; see `Order`."""
    mixture = packs.mixture() if isinstance(packs, MixedPacks) else Mixture.alone(len(packs))
    return Order(mixture, packs_per_step, seed, shift)


def _tokens_of(packs: Packs) -> float:
    """Return the mean number of tokens in a pack, without padding.

    If the packs do not record it, 1,000 of them are counted.
    """
    if isinstance(packs, ArrowPacks):
        return packs.tokens / len(packs)
    return float(
        np.mean([int(packs[index].lengths.sum()) for index in evenly(len(packs), _SAMPLED_PACKS)])
    )


def spread(
    costs: Sequence[int] | np.ndarray, ranks: int, microbatches: int
) -> list[list[list[int]]]:
    """Distribute packs over ranks and microbatches evenly, by count and by cost.

    The result has the indices of packs by rank and microbatch. The cost of a pack is the sum of its
    squared document lengths: the cost of attention is proportional to it, and all else is equal.

    Longest processing time first (Graham 1969) with equal counts: the costliest remaining pack goes
    to the cheapest microbatch that has room. Then microbatches of similar cost run at the same time
    on all ranks, the costliest of them on the rank with the least cost so far. Ties go to the lower
    index.
    """
    bins = ranks * microbatches
    room = len(costs) // bins
    dealt: list[list[int]] = [[] for _ in range(bins)]
    load = [0] * bins
    lightest = [(0, number) for number in range(bins)]
    for index in sorted(range(len(costs)), key=lambda i: (-int(costs[i]), i)):
        _, number = heapq.heappop(lightest)
        dealt[number].append(index)
        load[number] += int(costs[index])
        if len(dealt[number]) < room:
            heapq.heappush(lightest, (load[number], number))

    costliest_first = iter(sorted(range(bins), key=lambda number: (-load[number], number)))
    result: list[list[list[int]]] = [[] for _ in range(ranks)]
    total = [0] * ranks
    for _ in range(microbatches):
        for rank in sorted(range(ranks), key=total.__getitem__):
            number = next(costliest_first)
            result[rank].append(sorted(dealt[number]))
            total[rank] += load[number]
    return result


def permute(places: np.ndarray, size: int, key: int | np.ndarray) -> np.ndarray:
    """Return the values at `places` of the pseudo-random permutation of range(size) for `key`.

    `places` are integers in range(size). `key` is an integer, or an array with a key for each
    place. The result is int64 and has the shape of `places`.

    A Feistel network is a bijection of the b-bit numbers for any round function; b is the smallest
    number of bits that covers `size`. A value outside range(size) goes through the network again
    until it falls inside ("cycle walking", Black and Rogaway 2002). That keeps the bijection, and
    takes at most 2 passes on average for sizes above 32. The round function is splitmix64's.
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
    """Apply eight Feistel rounds to numbers of `bits` bits. The lower half has an odd bit."""
    upper_bits = np.uint64(bits // 2)
    lower_bits = np.uint64(bits - bits // 2)
    one = np.uint64(1)
    upper, lower = value >> lower_bits, value & ((one << lower_bits) - one)
    for number in range(1, _ROUNDS + 1, 2):
        upper = upper ^ (_mix(lower, keys, number) & ((one << upper_bits) - one))
        lower = lower ^ (_mix(upper, keys, number + 1) & ((one << lower_bits) - one))
    return (upper << lower_bits) | lower


def _mix(half: np.ndarray, keys: np.ndarray, number: int) -> np.ndarray:
    """Return the round function's 64 bits of half a value, the key and the round's number."""
    return splitmix64(keys ^ splitmix64(half + np.uint64(number << 40)))


def splitmix64(state: np.ndarray) -> np.ndarray:
    """Return one output of splitmix64 for each uint64 state; a bijection.

    Steele, Lea and Flood 2014, with Vigna's constants.
    """
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
