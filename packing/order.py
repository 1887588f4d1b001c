"""Which packs make step n, and which rank computes which of them: pure functions, so that resuming needs a number.

An epoch's order is a permutation that gives the pack at place i directly, so nothing has to be replayed or saved. Its integer
arithmetic is written out here, since a library's random generator may change between versions.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foundation.errors import InputError

# With eight rounds over 6 bits or more, every order of up to 8 packs is as frequent as any other, by a chi-square test of 20,000
# seeds. Over 4 bits it is not, even with twelve rounds.
_ROUNDS = 8
_LEAST_BITS = 6


def evenly(count: int, most: int) -> list[int]:
    """Returns the indices of all of `count` packs or, where they are more, of `most` that are spread evenly over them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int)).tolist()


@dataclass(frozen=True)
class PackOrder:
    """The endless stream of packs, cut into steps: epoch after epoch, each a permutation of all packs by (seed, epoch).

    Nothing is dropped or repeated within an epoch: a step in which one ends goes on with the next epoch's first packs.
    """

    packs_count: int
    packs_per_step: int
    seed: int
    shift: int = 0  # packs by which step 0 is further on in the stream; below 0 after steps that were smaller

    def __post_init__(self) -> None:
        if self.packs_count < 1:
            raise InputError("there are no packs to train on: the data holds 0 packs; give more text or a shorter `data.length`")
        if self.packs_per_step < 1:
            raise InputError(
                f"a step needs at least 1 pack, not {self.packs_per_step}: `batch.tokens` is less than `data.length`"
            )

    def epoch_of(self, step: int) -> float:
        """Epochs consumed when `step` starts: 0.0 at step 0, 1.0 once every pack has been seen."""
        return (step * self.packs_per_step + self.shift) / self.packs_count

    def packs_of_step(self, step: int) -> np.ndarray:
        """Indices of the packs that step `step` (from 0) trains on; [packs_per_step] int64, in stream order."""
        place = step * self.packs_per_step + self.shift + np.arange(self.packs_per_step, dtype=np.int64)
        return packs_at(place, self.packs_count, self.seed)


def packs_at(places: np.ndarray, count: int, seed: int) -> np.ndarray:
    """The packs at `places` of the endless stream of `count` packs, shuffled anew in each epoch; int64, the shape of `places`."""
    epoch, within = np.divmod(places, count)
    # Mixing the seed before the epoch is added keeps (seed 0, epoch 1) and (seed 1, epoch 0) apart.
    keys = splitmix64(splitmix64(np.asarray([seed]).astype(np.uint64)) + epoch.astype(np.uint64))
    return permute(within, count, keys)


def spread(costs: Sequence[int] | np.ndarray, ranks: int, microbatches: int) -> list[list[list[int]]]:
    """Deal packs out to ranks and microbatches, equally many each, so that their costs are even; [rank][microbatch] -> indices.

    A pack's cost is the sum of its squared document lengths, to which its attention's is proportional; all else is equal.
    Longest processing time first (Graham 1969) with equal counts: the costliest remaining pack goes to the microbatch with the
    least cost that still has room. Microbatches of similar cost then run at the same time on all ranks, the costliest of them on
    the rank with the least so far. Ties go to the lower index. Raises ValueError where the packs do not divide.
    """
    bins = ranks * microbatches
    if bins < 1 or len(costs) % bins:
        raise ValueError(f"{len(costs)} packs do not divide into {ranks} ranks of {microbatches} microbatches")
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
        for rank, number in zip(lightest_first, costliest_first[first : first + ranks], strict=True):
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
    """Returns one output of splitmix64 for each uint64 state, a bijection (Steele, Lea and Flood 2014; constants of Vigna's C
    code)."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
