"""Counters of a run, changes of its settings since a checkpoint, and random seeds of its steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class TrainState:
    """Counters of a run between two optimizer steps.

    The learning rate and the random numbers of a step depend on `step` alone. The packs of a step
    depend on `place` alone.
    """

    # Horizon: the run is finished when `step` reaches this number.
    steps: int
    # Number of steps done, including skipped steps.
    step: int = 0
    # Number of trained tokens over all ranks, including padding.
    tokens: int = 0
    # Number of trained tokens that had a label.
    valid_tokens: int = 0
    # Number of steps whose update was skipped by the health checks.
    skipped_steps: int = 0
    # Number of steps that rollbacks have discarded. The packs of these steps are not used again.
    left_out: int = 0
    # Position in the data: the place of the next step's first pack in the endless stream of packs
    # (see `packing.order`). A pack has `data.length` tokens.
    place: int = 0

    @property
    def finished(self) -> bool:
        """Return True if the run has reached its horizon."""
        return self.step >= self.steps

    def advance(self, *, tokens: int, valid_tokens: int, place: int, skipped: bool = False) -> None:
        """Add one step to the counters.

        Args:
            tokens: Number of tokens of the step over all ranks, including padding.
            valid_tokens: Number of these tokens that have a label.
            place: Place in the stream of packs after the last pack of the step.
            skipped: True if the step has not updated the weights.
        """
        self.step += 1
        self.tokens += tokens
        self.valid_tokens += valid_tokens
        self.skipped_steps += skipped
        self.place = place


# Facts about the history of a run that its recipe and metrics.jsonl do not contain, in the format
# of checkpoints and of environment.json. This is the value for a new run. `changed` has an entry
# {"step": 100, "was": {key: old value}} for each resume that has changed settings after this step.
# `left_out` is the number of steps that rollbacks discarded before the run folder's first step.
NO_PAST: dict[str, Any] = {"changed": [], "left_out": 0}


def stored(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity as it is stored in JSON, which turns tuples into lists.

    Infinite numbers become strings, because JSON has none. In models with Mamba-2 layers,
    `time_step_limit` has an infinite number.
    """
    return json.loads(json.dumps(identity), parse_constant=str)


def changed_keys(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ between two identities.

    An identity is a dict that maps dotted keys to settings and fingerprints. A missing key has the
    value None.

    Args:
        saved: Identity in a checkpoint.
        current: Identity of the run.
    """
    saved, current = stored(saved), stored(current)
    return [
        key for key in sorted(saved.keys() | current.keys()) if saved.get(key) != current.get(key)
    ]


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return a 64-bit seed for one step of one rank.

    Args:
        seed: Seed of the run.
        step: Number of steps before the step.
        rank: Rank of the process.

    Similar arguments give unrelated seeds. The three numbers are combined by the generator
    splitmix64.
    """
    from packing.order import splitmix64  # imported here, so that reports do not import pyarrow

    state = np.zeros(1, np.uint64)
    for part in (seed, step, rank):
        state = splitmix64(state + np.uint64(part % 2**64))
    return int(state[0])


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's CPU and CUDA generators for one step of one rank.

    Call this function before the first forward of the step. The seed depends on the three arguments
    alone. Therefore checkpoints do not contain generator states, and random numbers that are drawn
    between two steps, for example by sampling, do not change the training. A run that is resumed
    with the same world size repeats its dropout masks and its stochastic rounding bit for bit.
    """
    import torch  # imported here, so that runs can be compared without torch

    torch.manual_seed(step_seed(seed, step, rank))
