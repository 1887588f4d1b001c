"""The plan's figures by hand, and what it refuses once data and model are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from foundation import units
from foundation.units import GIB
from pretrain.plan.memory import Devices, layers_of
from pretrain.plan.plan import Plan
from pretrain.plan.preflight import fits_gathered
from pretrain.plan.remedies import takes_less
from pretrain.plan.rendering import render
from pretrain.precision.selection import missing_on, select_precision
from pretrain.precision.settings import LowPrecisionSettings
from pretrain.settings.recipe import Recipe
from tests.pretrain.plan.plan_recipe import QWEN3, flops_of, on_meta, recipe

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedModel:
    return on_meta(QWEN3)


def plan(model: PreTrainedModel, changed: Recipe | None = None, devices: Devices | None = None, **changes: Any) -> Plan:
    values = {"packs": 22_206, "mean_squared": 745.0} | changes
    bf16 = select_precision("bf16", LowPrecisionSettings(), missing_on("cpu"))
    return Plan(changed or recipe(), bf16, devices or Devices(), "qwen3", flops_of(model), **values)


def test_the_reference_run_is_2776_steps_which_are_four_epochs(qwen3: PreTrainedModel) -> None:
    made = plan(qwen3)
    assert made.steps == 2776
    assert (made.packs_per_step, made.packs_per_rank, made.accumulation) == (32, 32, 4)
    assert made.total_tokens == 363_855_872
    assert made.epochs == pytest.approx(4.0, abs=1e-3)
    assert made.flops_per_token == 10_322_706_432 + 6 * 28 * 2048 * 745
    assert made.total_flops == pytest.approx(made.flops_per_token * 363_855_872)
    assert not made.warnings


def test_what_takes_less_in_a_schedule_is_what_takes_less_in_its_largest_phase(qwen3: PreTrainedModel) -> None:
    def of(*names: str) -> Plan:
        emulated = LowPrecisionSettings(on_unsupported="emulate")
        changed, actives = recipe(weights="fp32"), [select_precision(name, emulated, missing_on("cpu")) for name in names]
        layers = [layers_of(qwen3, flops_of(qwen3), changed, active, "cuda", "packed_cudnn") for active in actives]
        return replace(plan(qwen3, changed), active=actives[0], layers=dict(zip(names, layers, strict=True)))

    scheduled, *single = (dict(takes_less(each)) for each in (of("nvfp4", "bf16"), of("nvfp4"), of("bf16")))
    for mode in ("weights=bf16_exact", "weights=bf16"):
        assert scheduled[mode] == max(each[mode] for each in single)


def test_the_course_of_a_plan_is_what_ran_and_what_is_to_come(qwen3: PreTrainedModel) -> None:
    low, high = (
        select_precision(name, LowPrecisionSettings(on_unsupported="emulate"), missing_on("cpu")) for name in ("nvfp4", "bf16")
    )
    phases = [(0.5, low), (None, high)]
    whole = plan(qwen3, recipe(train={"steps": 100}, schedule={"warmup": 0}), phases=phases)
    assert whole.course == {1: "nvfp4", 51: "bf16"} and whole.computes == "nvfp4 to 50 %, then bf16" and whole.emulated
    for done, ran, course, computes in (
        (30, {1: "nvfp4"}, {1: "nvfp4", 51: "bf16"}, "nvfp4 to 50 %, then bf16"),
        (30, {}, {31: "nvfp4", 51: "bf16"}, "nvfp4 to 50 %, then bf16"),
        (50, {}, {51: "bf16"}, "bf16"),
        (100, {}, {100: "bf16"}, "bf16"),
        (80, {1: "bf16"}, {1: "bf16"}, "bf16"),
        (20, {1: "bf16"}, {1: "bf16", 21: "nvfp4", 51: "bf16"}, "bf16 to step 20, then nvfp4 to step 50, then bf16"),
        (40, {1: "nvfp4", 11: "bf16"}, {1: "nvfp4", 11: "bf16", 41: "nvfp4", 51: "bf16"}, None),
    ):
        going_on = replace(whole, done=done, ran=ran)
        assert going_on.course == course and (computes is None or going_on.computes == computes)
        assert going_on.emulated == ("nvfp4" in course.values())
    alone = plan(qwen3, recipe(train={"steps": 100}, schedule={"warmup": 0}), done=20, ran={1: "nvfp4"})
    assert alone.computes == "nvfp4 to step 20, then bf16" and alone.has_several and "steps 21 to 100 in bf16" in render(alone)


def test_a_resumed_run_counts_the_tokens_it_took_and_those_to_come(qwen3: PreTrainedModel) -> None:
    """24 steps of half the tokens, then 6 of these; and as many steps of twice the tokens, then 6."""
    whole = plan(qwen3, recipe(train={"steps": 30}), tokens_per_second=1000.0)
    for took, tokens in ((24 * 65_536, 18 * 131_072), (24 * 262_144, 54 * 131_072)):
        resumed = replace(whole, done=24, done_tokens=took)
        assert resumed.total_tokens == tokens and resumed.total_flops == pytest.approx(whole.flops_per_token * tokens)
        assert resumed.epochs == pytest.approx(tokens / 4096 / 22_206) and resumed.hours == pytest.approx(tokens / 3.6e6)
        assert f"30 steps = {units.count(tokens)} tokens = " in render(resumed)
    assert replace(whole, done=24).total_tokens == whole.total_tokens
    assert replace(whole, done=40, done_tokens=40 * 65_536).total_tokens == 40 * 65_536, "beyond the horizon nothing is to come"


def test_packs_that_do_not_divide_leave_places_empty_and_the_plan_says_how_many(qwen3: PreTrainedModel) -> None:
    three = plan(qwen3, devices=Devices(3))
    assert (three.packs_per_rank, three.accumulation, three.empty_places) == (11, 2, 16)
    assert "3 devices x 2 microbatches x 8 packs, 16 places empty" in render(three)
    (warning,) = three.warnings
    assert "16 of 48 places stay empty, 33.3 % of the time" in warning and "a multiple of 12,288" in warning


def test_a_run_that_decays_keeps_a_checkpoint_from_before_it_and_has_room_for_it(qwen3: PreTrainedModel) -> None:
    def kept(**changes: Any) -> tuple[int | None, int]:
        changed = Recipe.model_validate(recipe().model_dump(exclude_unset=True) | changes)
        found = plan(qwen3, changed)
        return found.before_decay, found.checkpoints_at_once

    end = {"checkpoint": {"every": 500, "keep": 3}}
    assert kept(**end) == (2221, 5), "2,776 steps, of which 555 decay: three kept, one from before, one that is written"
    assert kept(**end, schedule={"kind": "cosine"}) == (None, 4)
    assert kept(checkpoint={"every": 2500, "keep": 3}) == (2221, 2), "the first is saved after the decay has begun"
    short = {"train": {"steps": 1000}, "schedule": {"kind": "cosine"}}
    for at_end, written in ((True, 2), (False, 1)):
        settings = {"every": 500, "keep": 3, "at_end": at_end}
        assert kept(**short, checkpoint=settings) == (None, written), "the last step is saved at the end, if at all"


def test_bf16_weights_come_with_the_magnitude_from_which_updates_are_lost(qwen3: PreTrainedModel) -> None:
    (warning,) = plan(qwen3, recipe(weights="bf16")).warnings
    assert "0.0078" in warning
    unmoved, moved = torch.tensor([0.0079, 0.0077], dtype=torch.bfloat16)
    assert unmoved + 2e-5 == unmoved and moved + 2e-5 != moved


def test_the_rendered_plan_says_what_a_user_needs_in_a_hundred_columns(qwen3: PreTrainedModel) -> None:
    text = render(plan(qwen3, devices=Devices(name="NVIDIA H200", memory=140 * GIB), tokens_per_second=47_523.0))
    for fact in (
        "small: bf16 compute, fp32 weights, 1 x NVIDIA H200",
        "1.72 B parameters, 1.41 B without embeddings, head tied",
        "131,072 tokens = 32 packs of 4,096 = 1 device x 4 microbatches x 8 packs",
        "2,776 steps = 364 M tokens = 4.00 epochs of 22,206 packs",
        "10.58 GFLOP a token, 1.387 PFLOP a step, 3.849 EFLOP in all",
        "by other launchers' formulas 11.28 GFLOP to 13.14 GFLOP a token (python -m pretrain flops)",
        "2 h 08 m at 47,523 tokens/s (502.7 TFLOP/s, 50.8 % of the bf16 peak)",
        "about 92.8 GiB of 140.0 GiB a device",
    ):
        assert fact in text
    assert max(map(len, text.splitlines())) <= 100


def test_shards_are_gathered_once_a_step_where_the_memory_is_there_for_a_well_filled_device(qwen3: PreTrainedModel) -> None:
    """6 bytes a parameter, less the groups in use. With `microbatch: auto` that may cost packs, but not below 8,192 tokens."""
    for microbatch, packs in ((8, 8), ("auto", 2)):
        asked = recipe(batch={"tokens": 131_072, "microbatch": microbatch})
        shards = [plan(qwen3, asked, Devices(4, sharded=True, gathered=way)).memory.total(packs) for way in (True, False)]
        assert 7.3 * GIB < shards[0] - shards[1] < 7.5 * GIB
        for memory, fits in ((shards[0] / 0.91, True), (shards[0] / 0.93, False)):
            assert fits_gathered(plan(qwen3, asked, Devices(4, sharded=True, memory=int(memory)))) is fits
