"""A run's state between two steps: the counters a checkpoint holds, what defines the training, and the random seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_64_BITS = 2**64 - 1


@dataclass
class TrainState:
    """Counters between two optimizer steps. Learning rate and random numbers of a step depend on `step` alone; its packs on
    `step` and on how many steps' packs the run has passed over."""

    steps: int  # the horizon: the run is finished when `step` reaches it
    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens seen, padding included, over all ranks
    valid_tokens: int = 0  # of these, the ones with a label
    skipped_steps: int = 0  # steps without an update, because a loss or gradient was not finite
    left_out: int = 0  # steps' packs that rollbacks have passed over
    # Packs by which the text is further on than so many steps are, where an earlier run's steps had more; below 0 where fewer.
    shift: int = 0
    place: int = 0  # in the stream of packs, where the next step begins

    @property
    def finished(self) -> bool:
        return self.step >= self.steps

    @property
    def data_steps(self) -> tuple[int, int]:
        """Which steps of the stream of packs are trained on from here to the horizon: the first, and the end."""
        return self.step + self.left_out, self.steps + self.left_out

    def advance(self, *, tokens: int, valid_tokens: int, place: int, skipped: bool = False) -> None:
        """Count one step of `tokens` over all ranks, whose packs end at `place` in the stream."""
        self.step += 1
        self.tokens += tokens
        self.valid_tokens += valid_tokens
        self.skipped_steps += skipped
        self.place = place


# What a run has trained otherwise than its recipe says now, as each checkpoint and environment.json have it: in order the steps
# after which it went on with other settings, each as {"step": 100, "was": {key: its value up to there}}, and of how many steps
# rollbacks had passed over the packs before the folder's first step.
NO_PAST: dict[str, Any] = {"changed": [], "left_out": 0}


def changed_keys(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ between two identities: flat mappings of dotted settings and fingerprints. A missing key
    equals one that is None."""
    # the saved one went through JSON, where tuples become lists
    current = json.loads(json.dumps(current))
    return [
        key for key in sorted(saved.keys() | current.keys()) if saved.get(key) != current.get(key)
    ]


def step_seed(seed: int, step: int, rank: int) -> int:
    """A 64-bit seed for one rank's step, by chained splitmix64 (constants of Vigna's C): near inputs give unrelated seeds."""
    state = 0
    for part in (seed, step, rank):
        state = (state + part + 0x9E3779B97F4A7C15) & _64_BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _64_BITS
        state ^= state >> 31
    return state


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's CPU and CUDA generators for one step of one rank; call it before the step's first forward.

    As they depend on (seed, step, rank) alone, a checkpoint holds no generator states, and what an evaluation or a sample draws
    between two steps does not change the training. A run resumed with the same world size repeats its dropout masks and its
    stochastic rounding bit for bit.
    """
    import torch  # not above: comparing runs does without

    torch.manual_seed(step_seed(seed, step, rank))
