"""Counters, identity and per-step randomness."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from pretrain.checkpoint.state import (
    changed_keys,
    check_same_source,
    check_same_training,
    differences,
    seed_step,
    step_seed,
)

SOURCE = Path("runs/demo/checkpoints/step-00000007")


def test_differences_name_each_key_with_both_values_and_see_through_json():
    saved = {"seed": 42, "optimizer.betas": [0.9, 0.95], "optimizer.learning_rate": 2e-5, "data.old": 1}
    current = {"seed": 42, "optimizer.betas": (0.9, 0.95), "optimizer.learning_rate": 3e-4, "data.fingerprint": "ab"}
    assert differences(saved, current) == [
        'data.fingerprint: saved not set, now "ab"',
        "data.old: saved 1, now not set",
        "optimizer.learning_rate: saved 2e-05, now 0.0003",
    ]


def test_a_checkpoint_of_another_recipe_is_refused_unless_the_changes_are_accepted():
    record = {"identity": {"seed": 42, "batch.tokens": 8192}}
    assert check_same_training(record, {"seed": 42, "batch.tokens": 8192}, SOURCE) == []
    with pytest.raises(InputError) as error:
        check_same_training(record, {"seed": 43, "batch.tokens": 8192}, SOURCE)
    for part in (str(SOURCE), "seed: saved 42, now 43", "run_dir", "--accept-changes"):
        assert part in str(error.value)
    assert check_same_training(record, {"seed": 43, "batch.tokens": 8192}, SOURCE, accept_changes=True) == [
        "seed: saved 42, now 43"
    ]


def test_what_a_source_said_counts_where_both_have_a_word_of_it():
    saved = {"model.source": "base", "model.source.eps": 1e-6, "model.source.gone": 1}
    older, now = {"model.source": "base"}, saved | {"model.source.new": 2, "model.source.eps": 1e-5}
    del now["model.source.gone"]
    assert changed_keys(older, now) == changed_keys(now, older) == []
    assert changed_keys(older, now | {"model.source": None}) == ["model.source"]
    assert changed_keys(saved, now) == ["model.source.eps", "model.source.gone", "model.source.new"]
    del saved["model.source"], now["model.source"]
    check_same_source(older, now, SOURCE)
    with pytest.raises(InputError, match=r"another config.json now:\n  model.source.eps: saved 1e-06, now 1e-05\n"):
        check_same_source(saved, now, SOURCE)


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


@given(st.integers(0, 2**40), st.integers(0, 10**7), st.integers(0, 4096))
def test_neighbouring_steps_and_ranks_get_unrelated_seeds(seed, step, rank):
    here = step_seed(seed, step, rank)
    for other in (
        step_seed(seed, step + 1, rank),
        step_seed(seed, step, rank + 1),
        step_seed(seed + 1, step, rank),
        step_seed(seed, rank, step),
    ):
        assert 8 <= (here ^ other).bit_count() <= 56 or step == rank


def test_dropout_of_a_step_does_not_depend_on_what_was_drawn_before_it():
    dropout = torch.nn.Dropout(0.5)
    seed_step(42, step=3, rank=1)
    straight = dropout(torch.ones(1000))
    torch.rand(17)
    seed_step(42, step=3, rank=1)
    assert torch.equal(dropout(torch.ones(1000)), straight)
    seed_step(42, step=4, rank=1)
    assert not torch.equal(dropout(torch.ones(1000)), straight)
