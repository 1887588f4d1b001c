"""Several sources in shares of the tokens: each has packs of its own, and every place in the stream of packs belongs to one.

Which source that is, and which of its packs, follows from the place, the shares and the seed alone, as `packing.order` has it for
one source: nothing is replayed or saved, and every number of processes sees the same packs. Each source is shuffled anew in each
of its own epochs, none of its packs is dropped or repeated within one, and after any number of packs every source is within a few
packs of its share.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from foundation.errors import InputError
from packing.arrow import ArrowPacks, Pack, Packs, checked_index
from packing.order import evenly, packs_at, splitmix64

_SAMPLED_PACKS = 1000
_PARTS = 1 << 24  # shares are rounded to 1 / this; with it places of up to 2^39 packs fit 64 bits


@dataclass(frozen=True)
class Mixture:
    """Which places of the endless stream of packs belong to which source."""

    names: tuple[str, ...]
    counts: tuple[int, ...]  # packs of each source
    weights: tuple[float, ...]  # share of the tokens that each source shall have; 1 together
    tokens_per_pack: tuple[float, ...]  # real tokens in a pack of each source, without padding, on average

    def __post_init__(self) -> None:
        for name, count in zip(self.names, self.counts, strict=True):
            if not count:
                raise InputError(f"data.sources: {name}: holds no packs; give it more text, or leave it out")
        rates = self._rates()
        for number, (name, rate) in enumerate(zip(self.names, rates, strict=True)):
            if not rate or _PARTS in rates[:number]:  # it takes nothing, or one before it takes all
                raise InputError(f"data.sources: {name}: its weight is too small to ever be met; leave it out")

    @property
    def share_of_packs(self) -> list[float]:
        """Each source's share of all packs, which sum to 1: its share of the tokens, divided by how full its packs are."""
        packs = [weight / tokens for weight, tokens in zip(self.weights, self.tokens_per_pack, strict=True)]
        return [each / sum(packs) for each in packs]

    def _rates(self) -> list[int]:
        """Returns for each source how many packs, out of `_PARTS` that no source before it has taken, it takes; the last takes
        all."""
        shares = self.share_of_packs
        return [round(_PARTS * each / sum(shares[number:])) for number, each in enumerate(shares)]

    def taken(self, places: np.ndarray | int) -> list[np.ndarray]:
        """Returns for each source how many of the packs before each of `places` it has given; int64, the shape of `places`."""
        left, found = np.asarray(places, np.int64), []
        for rate in self._rates():
            found.append(left * rate // _PARTS)
            left = left - found[-1]
        return found

    def epochs(self, place: int) -> dict[str, float]:
        """Returns how often each source has been gone through before `place`."""
        return {name: int(n) / count for name, n, count in zip(self.names, self.taken(place), self.counts, strict=True)}

    def shares(self, place: int) -> dict[str, float]:
        """The share of the tokens before `place` that came from each source; the weights themselves before the first."""
        tokens = [int(n) * each for n, each in zip(self.taken(place), self.tokens_per_pack, strict=True)]
        return dict(zip(self.names, (each / sum(tokens) for each in tokens) if any(tokens) else self.weights, strict=True))


@dataclass(frozen=True)
class MixedOrder:
    """Does what `PackOrder` does, for the packs of all sources of a mixture, numbered one source after another."""

    mixture: Mixture
    packs_per_step: int
    seed: int
    shift: int = 0

    @property
    def packs_count(self) -> int:
        return sum(self.mixture.counts)

    def epoch_of(self, step: int) -> float:
        """Packs consumed when `step` starts, by how many there are; the epochs of each source differ."""
        return (step * self.packs_per_step + self.shift) / self.packs_count

    def packs_of_step(self, step: int) -> np.ndarray:
        """Indices of the packs that step `step` (from 0) trains on; [packs_per_step] int64, in stream order."""
        places = step * self.packs_per_step + self.shift + np.arange(self.packs_per_step, dtype=np.int64)
        before, after = self.mixture.taken(places), self.mixture.taken(places + 1)
        found, first = np.full(len(places), -1), 0
        for number, count in enumerate(self.mixture.counts):
            own = np.flatnonzero(after[number] > before[number])
            # Sources of equal size must not go through their packs in the same order.
            seed = int(splitmix64(splitmix64(np.uint64([self.seed])) + np.uint64(number))[0])
            found[own] = first + packs_at(before[number][own], count, seed)
            first += count
        return found

    def figures(self, step: int) -> dict[str, float]:
        """Epochs and share of the tokens of each source once `step` steps are done, for metrics."""
        place = step * self.packs_per_step + self.shift
        epochs, shares = self.mixture.epochs(place), self.mixture.shares(place)
        return {f"{what}/{name}": values[name] for what, values in (("epoch", epochs), ("share", shares)) for name in epochs}


class MixedPacks:
    """The packs of several sources, one source after another."""

    def __init__(self, path: Path, parts: Mapping[str, Packs], weights: Mapping[str, float]) -> None:
        self.path = path
        self.parts = dict(parts)
        self.weights = {name: weights[name] for name in parts}
        first = next(iter(self.parts.values()))
        self.length = first.length
        known = [packs for packs in self.parts.values() if (packs.tokenizer or {}).get("fingerprint")]
        self.tokenizer = known[0].tokenizer if known else first.tokenizer  # MDS and token .bin know none
        for packs in known[1:]:
            ours, theirs = (each.tokenizer["fingerprint"] for each in (known[0], packs))
            if ours != theirs:
                raise InputError(
                    f"{packs.path}: made with another tokenizer ({theirs[:12]}) than those in {known[0].path} ({ours[:12]}); "
                    "prepare them with the same"
                )
        content = [[name, packs.fingerprint, self.weights[name]] for name, packs in self.parts.items()]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        self._starts = [0, *accumulate(map(len, self.parts.values()))]

    def __len__(self) -> int:
        return self._starts[-1]

    def _find(self, index: int) -> tuple[Packs, int]:
        number = bisect_right(self._starts, checked_index(index, len(self))) - 1
        return list(self.parts.values())[number], index - self._starts[number]

    def __getitem__(self, index: int) -> Pack:
        packs, within = self._find(index)
        return packs[within]

    def lengths(self, index: int) -> np.ndarray:
        packs, within = self._find(index)
        return packs.lengths(within)

    def trained(self, index: int) -> np.ndarray | None:
        packs, within = self._find(index)
        return packs.trained(within)

    def verify(self) -> None:
        for packs in self.parts.values():
            packs.verify()

    def mixture(self) -> Mixture:
        parts = self.parts.values()
        return Mixture(
            names=tuple(self.parts),
            counts=tuple(map(len, parts)),
            weights=tuple(self.weights.values()),
            tokens_per_pack=tuple(map(_tokens_per_pack, parts)),
        )


def _tokens_per_pack(packs: Packs) -> float:
    """Returns how many real tokens a pack has on average; of packs that do not record how many they hold, by 1,000 spread over
    all."""
    if isinstance(packs, ArrowPacks):
        return packs.tokens / max(len(packs), 1)
    return float(np.mean([int(packs.lengths(index).sum()) for index in evenly(len(packs), _SAMPLED_PACKS)]))
