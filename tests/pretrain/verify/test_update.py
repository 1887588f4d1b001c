"""The update beside torch's: two healthy steps pass in every way to store weights, and each of ten faults is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from pretrain.metrics.health import TrainingHalted
from pretrain.model import gradients, packed
from pretrain.optimizer import adamw
from pretrain.settings.recipe import Recipe
from pretrain.verify.update import StepCheck
from tests.pretrain.verify.small_runs import SmallRun, build_run, on_a

WAYS = ("fp32", "bf16", "bf16_exact")
RATE = 1e-3
Patch = pytest.MonkeyPatch
Fault = Callable[[SmallRun, Patch], Any]


@pytest.fixture(scope="module")
def accelerator() -> Iterator[Accelerator]:
    with on_a("cpu") as accelerator:
        yield accelerator


def recipe_of(weights: str, clip: float | None = 1e-3) -> Recipe:
    """`clip`: so low that it cuts."""
    needed = {"name": "update", "model": {"source": "any"}, "data": {"packs": "any"}, "train": {"steps": 9}}
    return Recipe(**needed, weights=weights, optimizer={"clip": clip, "learning_rate": RATE, "gradients": "fp32"})


def built(accelerator: Accelerator, weights: str) -> SmallRun:
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    run = build_run(accelerator, "fp32" if weights == "fp32" else "bf16", layers=1, weights=dtype, exact=weights == "bf16_exact")
    run.optimizer.materialise()
    return run


def two_steps(run: SmallRun, recipe: Recipe) -> None:
    """As training makes them."""
    for updates in range(2):
        check = StepCheck(run.packed, run.optimizer, recipe, run.accelerator)
        adamw.set_learning_rate(run.optimizer, RATE)
        with check.passes(run.step):
            packed.forward_backward(run.model, run.step, run.accelerator)
        norm = adamw.gradient_norm(run.model.parameters())
        with check.update(updates + 1, RATE, updates):
            run.optimizer.step(clip_coefficient=adamw.clip_coefficient(norm, recipe.optimizer.clip))
        adamw.clear_gradients(run.optimizer, run.packed)


@pytest.mark.parametrize("clip", [1e-3, None])
@pytest.mark.parametrize("weights", WAYS)
def test_a_healthy_update_is_the_one_that_torch_makes(accelerator: Accelerator, weights: str, clip: float | None) -> None:
    two_steps(built(accelerator, weights), recipe_of(weights, clip))


# ── Faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def not_clipped(run: SmallRun, patch: Patch) -> None:
    patch.setattr(adamw, "clip_coefficient", lambda norm, limit: None)


def no_bias_correction(run: SmallRun, patch: Patch) -> None:
    patch.setattr(adamw.Hyperparameters, "bias_correction2_sqrt", 1.0)


def each_step_twice(run: SmallRun, patch: Patch) -> None:
    step = run.optimizer.step

    def twice(**options: Any) -> None:
        step(**options)
        step(**options)

    patch.setattr(run.optimizer, "step", twice)


def one_weight_never_updated(run: SmallRun, patch: Patch) -> None:
    weight = run.packed.hf.get_parameter("model.layers.0.mlp.down_proj.weight")
    step, before = run.optimizer.step, weight.detach().clone()

    def but_one(**options: Any) -> None:
        step(**options)
        weight.data.copy_(before)

    patch.setattr(run.optimizer, "step", but_one)


def norms_decay(run: SmallRun, patch: Patch) -> None:
    run.optimizer.param_groups[1]["weight_decay"] = 0.1


def low_bits_dropped(run: SmallRun, patch: Patch) -> None:
    split = adamw.split

    def rounded(master: Tensor) -> tuple[Tensor, Tensor]:
        weight, remainder = split(master)
        return weight, remainder.zero_()

    patch.setattr(adamw, "split", rounded)


def fourth_microbatch_dropped(run: SmallRun, patch: Patch) -> None:
    every = packed.forward_backward
    dropped = [each for number, each in enumerate(run.step.microbatches, 1) if number != 4]
    patch.setattr(packed, "forward_backward", lambda model, step, at: every(model, replace(step, microbatches=dropped), at))


def sums_in_bf16(run: SmallRun, patch: Patch) -> None:
    gradients.attach_main_gradients(run.packed, torch.bfloat16)


def sums_rounded_to_bf16(run: SmallRun, patch: Patch) -> None:
    every = packed.forward_backward

    def rounded(*arguments: Any) -> None:
        every(*arguments)
        for parameter in run.packed.parameters():
            main = gradients.gradient_of(parameter)
            main.copy_(main.bfloat16())

    patch.setattr(packed, "forward_backward", rounded)


def moments_in_bf16(run: SmallRun, patch: Patch) -> None:
    for state in run.optimizer.state.values():
        state |= {name: state[name].bfloat16() for name in adamw.MOMENTS}


# What each is caught by, in the ways to store weights that have it.
FAULTS: dict[Fault, tuple[str, Sequence[str]]] = {
    not_clipped: ("exp_avg of", WAYS),
    no_bias_correction: ("weights of", WAYS),
    each_step_twice: ("updates are counted", WAYS),
    one_weight_never_updated: ("weights of 1 of", WAYS),
    norms_decay: ("weight_decay is", WAYS),
    low_bits_dropped: ("weights of", ("bf16_exact",)),
    fourth_microbatch_dropped: ("3 of 4 microbatches", WAYS),
    sums_in_bf16: ("gradients are bfloat16", WAYS),
    sums_rounded_to_bf16: ("gradients add up in BF16", WAYS),
    moments_in_bf16: ("exp_avg are bfloat16", ("fp32", "bf16_exact")),
}


@pytest.mark.parametrize("weights", WAYS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_in_the_update_is_named(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, fault: Fault, weights: str
) -> None:
    line, ways = FAULTS[fault]
    if weights not in ways:
        pytest.skip("cannot be made there")
    run = built(accelerator, weights)
    fault(run, monkeypatch)
    with pytest.raises(TrainingHalted, match=line):
        two_steps(run, recipe_of(weights))
