"""The state of a run between two steps: counters, changes of its settings, and random seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_64_BITS = 2**64 - 1


@dataclass
class TrainState:
    """Counters of a run between two optimizer steps.

    The learning rate and the random numbers of a step depend on `step` alone. Its packs depend on
    `step`, on `left_out` and on `shift`.
    """

    steps: int  # horizon; the run is finished when `step` reaches it
    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens seen, padding included, over all ranks
    valid_tokens: int = 0  # tokens with a label
    skipped_steps: int = 0  # steps without an update, because a loss or gradient was not finite
    left_out: int = 0  # steps whose packs rollbacks have skipped
    # Data offset in packs relative to step * packs_per_step. Not zero if an earlier run had another
    # number of packs a step; may be negative.
    shift: int = 0
    place: int = 0  # position of the next step in the stream of packs

    @property
    def finished(self) -> bool:
        """True if the run has reached its horizon."""
        return self.step >= self.steps

    @property
    def data_steps(self) -> tuple[int, int]:
        """The steps [first, end) of the stream of packs that are still to be trained."""
        return self.step + self.left_out, self.steps + self.left_out

    def advance(self, *, tokens: int, valid_tokens: int, place: int, skipped: bool = False) -> None:
        """Count one step of `tokens` tokens over all ranks, whose packs end at `place`."""
        self.step += 1
        self.tokens += tokens
        self.valid_tokens += valid_tokens
        self.skipped_steps += skipped
        self.place = place


# Differences between the history of a run and its recipe, as in checkpoints and environment.json.
# `changed` lists the steps after which settings changed, as {"step": 100, "was": {key: old value}}.
# `left_out` is the number of steps whose packs had been skipped before the folder's first step.
NO_PAST: dict[str, Any] = {"changed": [], "left_out": 0}


def changed_keys(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ between two identities.

    Identities are flat mappings of dotted settings and fingerprints. A missing key equals None.
    """
    # `saved` went through JSON, which turns tuples into lists.
    current = json.loads(json.dumps(current))
    keys = sorted(saved.keys() | current.keys())
    return [key for key in keys if saved.get(key) != current.get(key)]


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return a 64-bit seed for one step of one rank.

    It is computed by chained splitmix64, with the constants of Vigna's C code. Similar arguments
    give unrelated seeds.
    """
    state = 0
    for part in (seed, step, rank):
        state = (state + part + 0x9E3779B97F4A7C15) & _64_BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _64_BITS
        state ^= state >> 31
    return state


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's CPU and CUDA generators for one step of one rank, before its first forward.

    The seed depends on (seed, step, rank) alone. Therefore a checkpoint needs no generator states,
    and random numbers of an evaluation or a sample between two steps do not change the training. A
    run that is resumed with the same world size repeats its dropout masks and its stochastic
    rounding bit for bit.
    """
    import torch  # imported here because comparing runs works without torch

    torch.manual_seed(step_seed(seed, step, rank))
