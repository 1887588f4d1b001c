"""Settings that exclude each other are rejected, and a horizon is converted to steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from pretrain.plan.checks import check_held_out, check_settings, steps_of
from pretrain.settings.recipe import TrainSettings
from tests.pretrain.plan.plan_recipe import recipe


@given(
    tokens=st.integers(1, 10**12), packs_per_step=st.integers(1, 512), packs=st.integers(1, 10**6)
)
def test_the_last_step_reaches_a_horizon_in_tokens(
    tokens: int, packs_per_step: int, packs: int
) -> None:
    per_step = packs_per_step * 128
    steps = steps_of(TrainSettings(tokens=tokens), per_step, packs, 128)
    assert (steps - 1) * per_step < tokens <= steps * per_step
    epochs = steps_of(TrainSettings(epochs=2), per_step, packs, 128)
    assert epochs == math.ceil(2 * packs / packs_per_step)


def test_a_stream_needs_steps_or_tokens_and_disk_for_four_parts() -> None:
    data = {
        "packs": "packs",
        "length": 4096,
        "source": "a.jsonl",
        "tokenizer": "t",
        "streaming": {"disk_gb": 2, "window": 64e6},
    }
    check_settings(recipe(data=data, train={"tokens": 1e12}), "bf16", 1)
    with pytest.raises(
        InputError,
        match=r"`train\.epochs: 4.0` needs the number of .*set `train\.steps` or `train\.tokens`",
    ):
        check_settings(recipe(data=data), "bf16", 1)
    small = data | {"streaming": {"disk_gb": 0.5, "window": 64e6}}
    with pytest.raises(
        InputError, match=r"disk_gb: 0\.5` does not suffice .* four parts .* at least 1\.1"
    ):
        check_settings(recipe(data=small, train={"steps": 1000}), "bf16", 1)


def test_a_served_loss_needs_held_out_packs() -> None:
    served = recipe(evaluate={"served": "nvfp4"})
    check_held_out(served, 1)
    with pytest.raises(InputError, match=r"`evaluate\.served: nvfp4` needs held-out packs"):
        check_held_out(served, 0)


@pytest.mark.parametrize(
    ("begin_with", "every", "merge"),
    [(None, 10, 10), (None, 30, 4), ("runs/a/checkpoints/step-00000020", 10, 8), ("copy", 10, 10)],
)
def test_a_mean_has_the_checkpoints_of_its_own_run(
    begin_with: str | None, every: int, merge: int
) -> None:
    """A branch from step 20 saves the steps from 30 on. The last step is always saved."""

    def check(number: int, **changes: object) -> None:
        settings = {
            "train": {"steps": 100, "begin_with": begin_with},
            "evaluate": {"served": "nvfp4", "merge": number},
            "checkpoint": {"every": every, "keep": 99},
            "schedule": {"warmup": 0},
        }
        check_settings(recipe(**settings | changes), "bf16", 1)

    check(merge)
    with pytest.raises(InputError, match=f"which are {merge}; either set it to {merge} or less"):
        check(merge + 1)
    with pytest.raises(InputError, match=r"no effect without `evaluate\.served`"):
        check(merge, evaluate={"merge": 2})
