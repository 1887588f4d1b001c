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
    def check(disk_gb: float, **train: float) -> None:
        data = {"packs": "packs", "length": 4096, "source": "a.jsonl", "tokenizer": "t"}
        data["streaming"] = {"disk_gb": disk_gb, "window": 64e6}
        check_settings(recipe(data=data, train=train), "bf16", 1, ())

    check(2, tokens=1e12)
    with pytest.raises(InputError, match=r"`train\.epochs: 4.0` .*set `train\.steps` or `train"):
        check(2, epochs=4)
    with pytest.raises(InputError, match=r"disk_gb: 0\.5` .* four parts .* at least 1\.1"):
        check(0.5, steps=1000)


def test_a_served_loss_needs_held_out_packs_of_a_suitable_length() -> None:
    data = {"packs": "packs", "length": 64}
    served = recipe(evaluate={"served": "block"}, data=data, batch={"tokens": 64})
    check_held_out(served, 1)
    with pytest.raises(InputError, match=r"`evaluate\.served: block` needs held-out packs"):
        check_held_out(served, 0)
    with pytest.raises(InputError, match=r"64` .* of 128, as the precision block requires"):
        check_settings(served, "bf16", 1, ())
