"""Which packs make step n, and which rank computes which of them: pure functions, so that resuming needs a number.

The stream of packs is endless. Each place in it belongs to one of the sources, by their shares of the tokens, and each source
goes through its packs epoch after epoch, in another order each time. An epoch's order is a permutation that gives the pack at
place i directly. So nothing is replayed or saved, and every number of processes sees the same packs. The integer arithmetic is
written out here, since a library's random generator may change between versions.
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

# With eight rounds over 6 bits or more, every order of up to 8 packs is as frequent as any other, by a chi-square test of 20,000
# seeds. Over 4 bits it is not, even with twelve rounds.
_ROUNDS = 8
_LEAST_BITS = 6
_SAMPLED_PACKS = 1000
_PARTS = 1 << 24  # shares are rounded to 1 / this; with it places of up to 2^39 packs fit 64 bits


def evenly(count: int, most: int) -> list[int]:
    """Returns the indices of all of `count` packs or, where they are more, of `most` that are spread evenly over them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int)).tolist()


@dataclass(frozen=True)
class Mixture:
    """Which places of the endless stream of packs belong to which source."""

    names: tuple[str, ...]  # ("",): a single source, without a name
    counts: tuple[int, ...]  # packs of each source
    weights: tuple[float, ...]  # share of the tokens that each source shall have; 1 together
    # real tokens in a pack of each source, without padding, on average
    tokens_per_pack: tuple[float, ...]

    @classmethod
    def alone(cls, count: int) -> Mixture:
        """One source with `count` packs."""
        return cls(("",), (count,), (1.0,), (1.0,))

    @property
    def share_of_packs(self) -> list[float]:
        """Each source's share of all packs, which sum to 1: its share of the tokens, divided by how full its packs are."""
        packs = [
            weight / tokens
            for weight, tokens in zip(self.weights, self.tokens_per_pack, strict=True)
        ]
        return [each / sum(packs) for each in packs]

    def packs_before(self, places: np.ndarray | int) -> list[np.ndarray]:
        """Returns for each source how many of the packs before each of `places` are of it; int64, the shape of `places`."""
        left, packs, shares = np.asarray(places, np.int64), [], self.share_of_packs
        for number, share in enumerate(shares):
            # out of `_PARTS` that no source before takes; the last takes all
            rate = round(_PARTS * share / sum(shares[number:]))
            packs.append(left * rate // _PARTS)
            left = left - packs[-1]
        return packs

    def epochs(self, place: int) -> dict[str, float]:
        """Returns how often each source has been gone through before `place`."""
        return {
            name: int(n) / count
            for name, n, count in zip(
                self.names, self.packs_before(place), self.counts, strict=True
            )
        }

    def shares(self, place: int) -> dict[str, float]:
        """The share of the tokens before `place` that came from each source; the weights themselves before the first."""
        tokens = [
            int(n) * each
            for n, each in zip(self.packs_before(place), self.tokens_per_pack, strict=True)
        ]
        return dict(
            zip(
                self.names,
                (each / sum(tokens) for each in tokens) if any(tokens) else self.weights,
                strict=True,
            )
        )


@dataclass(frozen=True)
class Order:
    """The endless stream of packs, cut into steps. Packs are numbered one source after another.

    Nothing is dropped or repeated within an epoch of a source: a step goes on with the next epoch's first packs.
    """

    mixture: Mixture
    packs_per_step: int
    seed: int
    # packs by which step 0 is further on in the stream; below 0 after steps that were smaller
    shift: int = 0

    def places_of_step(self, step: int) -> range:
        """The places in the stream of step `step`, from 0."""
        first = step * self.packs_per_step + self.shift
        return range(first, first + self.packs_per_step)

    def packs_of_step(self, step: int) -> np.ndarray:
        """Indices of the packs that step `step` trains on; [packs_per_step] int64, in stream order."""
        places = np.array(self.places_of_step(step), np.int64)
        before, after = self.mixture.packs_before(places), self.mixture.packs_before(places + 1)
        packs = np.empty_like(places)
        for number in range(len(before)):
            own = np.flatnonzero(after[number] > before[number])
            packs[own] = self.packs_of_source(number, before[number][own])
        return packs

    def packs_of_source(self, number: int, places: np.ndarray) -> np.ndarray:
        """The packs that come at `places`, ascending int64, of the stream of source `number` alone."""
        key = splitmix64(np.asarray([self.seed]).astype(np.uint64))
        # sources of equal size must not go through their packs in the same order
        if self.mixture.names != ("",):
            key = splitmix64(splitmix64(key + np.uint64(number)))
        count = self.mixture.counts[number]
        epoch, within = np.divmod(places, count)
        # Mixing the seed before the epoch is added keeps (seed 0, epoch 1) and (seed 1, epoch 0) apart.
        return sum(self.mixture.counts[:number]) + permute(
            within, count, splitmix64(key + epoch.astype(np.uint64))
        )

    def stop_waiting(self) -> None:
        """Stop a thread that waits for packs of this order. Packs that exist are not waited for."""

    def epoch_of(self, step: int) -> float:
        """Packs consumed when `step` starts, by how many there are. The epochs of several sources differ: `figures`."""
        return self.places_of_step(step).start / sum(self.mixture.counts)

    def figures(self, step: int) -> dict[str, float]:
        """Epochs and share of the tokens of each of several sources once `step` steps are done, for metrics."""
        if self.mixture.names == ("",):
            return {}
        place = self.places_of_step(step).start
        epochs, shares = self.mixture.epochs(place), self.mixture.shares(place)
        return {
            f"{figure}/{name}": of[name]
            for figure, of in (("epoch", epochs), ("share", shares))
            for name in epochs
        }


class MixedPacks(JoinedPacks):
    """The packs of several sources, one source after another."""

    def __init__(
        self, path: Path, parts: Mapping[str, Packs], weights: Mapping[str, float]
    ) -> None:
        super().__init__(path, list(parts.values()))
        self.parts, self.weights = dict(parts), {name: weights[name] for name in parts}
        self.length = self.joined[0].length
        known = [packs for packs in self.joined if (packs.tokenizer or {}).get("fingerprint")]
        self.tokenizer = (known or self.joined)[0].tokenizer  # MDS and token .bin know none
        if other := next(
            (
                packs
                for packs in known
                if packs.tokenizer["fingerprint"] != self.tokenizer["fingerprint"]
            ),
            None,
        ):
            raise InputError(
                f"{other.path}: made with another tokenizer than {known[0].path}; prepare them with the same"
            )
        content = [
            [name, packs.fingerprint, self.weights[name]] for name, packs in self.parts.items()
        ]
        self.fingerprint = hash_of(content)

    def mixture(self) -> Mixture:
        counts, tokens = tuple(map(len, self.joined)), tuple(map(_tokens_of, self.joined))
        return Mixture(tuple(self.parts), counts, tuple(self.weights.values()), tokens)


def order_of(packs: Packs, packs_per_step: int, seed: int, shift: int = 0) -> Order:
    """The order in which a run trains on prepared `packs`, its step 0 `shift` packs further on."""
    mixture = packs.mixture() if isinstance(packs, MixedPacks) else Mixture.alone(len(packs))
    return Order(mixture, packs_per_step, seed, shift)


def _tokens_of(packs: Packs) -> float:
    """How many real tokens a pack has on average; where packs do not record their number, 1,000 of the packs are counted."""
    if isinstance(packs, ArrowPacks):
        return packs.tokens / len(packs)
    return float(
        np.mean([int(packs[index].lengths.sum()) for index in evenly(len(packs), _SAMPLED_PACKS)])
    )


def spread(
    costs: Sequence[int] | np.ndarray, ranks: int, microbatches: int
) -> list[list[list[int]]]:
    """Deal packs out to ranks and microbatches, equally many each, so that their costs are even; [rank][microbatch] -> indices.

    A pack's cost is the sum of its squared document lengths, to which its attention's is proportional; all else is equal.
    Longest processing time first (Graham 1969) with equal counts: the costliest remaining pack goes to the microbatch with the
    least cost that still has room. Microbatches of similar cost then run at the same time on all ranks, the costliest of them on
    the rank with the least so far. Ties go to the lower index.
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

    costliest_first = sorted(range(bins), key=lambda number: (-load[number], number))
    result: list[list[list[int]]] = [[] for _ in range(ranks)]
    total = [0] * ranks
    for first in range(0, bins, ranks):
        lightest_first = sorted(range(ranks), key=total.__getitem__)
        for rank, number in zip(
            lightest_first, costliest_first[first : first + ranks], strict=True
        ):
            result[rank].append(sorted(dealt[number]))
            total[rank] += load[number]
    return result


def permute(places: np.ndarray, size: int, key: int | np.ndarray) -> np.ndarray:
    """The values at `places` of the pseudo-random permutation of range(size) that `key` selects; int64, the shape of `places`.

    A Feistel network is a bijection of the b-bit numbers whatever its round function; b is the smallest that covers `size`. A
    value outside range(size) goes through the network again until it falls inside ("cycle walking", Black and Rogaway 2002),
    which keeps the bijection and takes at most 2 passes on average for any size above 32. The round function is splitmix64's.

    places: integers in range(size). key: an integer, or an array of the shape of `places` with a key for each.
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
    """Eight rounds on the upper and lower half of `bits` bits; of an odd number, the lower half has one more."""
    upper_bits = np.uint64(bits // 2)
    lower_bits = np.uint64(bits - bits // 2)
    one = np.uint64(1)
    upper, lower = value >> lower_bits, value & ((one << lower_bits) - one)
    for number in range(1, _ROUNDS + 1, 2):
        upper = upper ^ (_mix(lower, keys, number) & ((one << upper_bits) - one))
        lower = lower ^ (_mix(upper, keys, number + 1) & ((one << lower_bits) - one))
    return (upper << lower_bits) | lower


def _mix(half: np.ndarray, keys: np.ndarray, number: int) -> np.ndarray:
    """The round function: 64 bits that depend on half a value, on the key and on the round's number."""
    return splitmix64(keys ^ splitmix64(half + np.uint64(number << 40)))


def splitmix64(state: np.ndarray) -> np.ndarray:
    """Returns one output of splitmix64 for each uint64 state, a bijection (Steele, Lea and Flood 2014; Vigna's constants)."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
