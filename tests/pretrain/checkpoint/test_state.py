"""Counters, identity and per-step randomness."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foundation.errors import InputError
from pretrain.checkpoint.state import (
    changed_keys,
    check_same_training,
    seed_step,
    step_seed,
)

SOURCE = Path("runs/demo/checkpoints/step-00000007")


def test_a_checkpoint_of_another_recipe_is_refused_unless_the_changes_are_accepted():
    saved = {"seed": 42, "optimizer.betas": [0.9, 0.95], "optimizer.learning_rate": 2e-5, "loss.top_k": None}
    same = saved | {"optimizer.betas": (0.9, 0.95), "data.new": None}
    assert check_same_training(saved, same, SOURCE) == changed_keys(saved, same) == []
    other = same | {"optimizer.learning_rate": 3e-4, "data.fingerprint": "ab"}
    with pytest.raises(InputError) as error:
        check_same_training(saved, other, SOURCE)
    for part in (str(SOURCE), "optimizer.learning_rate: saved 2e-05, now 0.0003", 'data.fingerprint: saved null, now "ab"'):
        assert part in str(error.value)
    assert len(check_same_training(saved, other, SOURCE, accept_changes=True)) == 2


def test_seeds_are_chained_outputs_of_the_published_splitmix64():
    # From state 0, Vigna's reference splitmix64.c first returns 0xE220A8397B1DCDAF.
    def finalizer(state: int) -> int:
        mask = 2**64 - 1
        state = (state + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    assert finalizer(0) == 0xE220A8397B1DCDAF
    assert step_seed(0, 0, 0) == finalizer(finalizer(finalizer(0)))


def test_dropout_of_a_step_does_not_depend_on_what_was_drawn_before_it():
    dropout = torch.nn.Dropout(0.5)
    seed_step(42, step=3, rank=1)
    straight = dropout(torch.ones(1000))
    torch.rand(17)
    seed_step(42, step=3, rank=1)
    assert torch.equal(dropout(torch.ones(1000)), straight)
    seed_step(42, step=4, rank=1)
    assert not torch.equal(dropout(torch.ones(1000)), straight)
