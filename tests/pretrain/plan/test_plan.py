"""The plan's figures by hand, and what it refuses once data and model are known."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from foundation import units
from foundation.units import GIB
from pretrain.metrics.flops import ModelFlops
from pretrain.plan.memory import Devices, layers_of
from pretrain.plan.plan import ActivePhase, Plan
from pretrain.plan.preflight import fits_gathered
from pretrain.plan.remedies import takes_less
from pretrain.plan.rendering import render
from pretrain.precision.selection import missing_on, select_precision
from pretrain.precision.settings import LowPrecisionSettings
from pretrain.settings.recipe import Recipe
from tests.pretrain.plan.plan_recipe import recipe

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedModel:
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151936}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", tie_word_embeddings=True, **sizes, **heads))


def plan(model: PreTrainedModel, changed: Recipe | None = None, devices: Devices | None = None, **changes: Any) -> Plan:
    values = {"packs": 22_206, "mean_squared": 745.0} | changes
    bf16 = select_precision("bf16", LowPrecisionSettings(), missing_on("cpu"))
    return Plan(changed or recipe(), bf16, devices or Devices(), "qwen3", ModelFlops.of(model), **values)


def test_the_reference_run_is_2776_steps_which_are_four_epochs(qwen3: PreTrainedModel) -> None:
    made = plan(qwen3)
    assert made.steps == 2776
    assert (made.packs_per_step, made.packs_per_rank, made.accumulation) == (32, 32, 4)
    assert made.total_tokens == 363_855_872
    assert made.epochs == pytest.approx(4.0, abs=1e-3)
    assert made.flops_per_token == 10_322_706_432 + 6 * 28 * 2048 * 745
    assert made.total_flops == pytest.approx(made.flops_per_token * 363_855_872)
    assert not made.warnings


def test_the_workspace_of_searched_products_is_counted_where_products_are_searched(qwen3: PreTrainedModel) -> None:
    gpu, part = Devices(name="NVIDIA H200"), "products' workspace"
    assert plan(qwen3, devices=gpu).memory.parts(1)[part] == 32 * 2**20 + 1024
    batch = {"tokens": 131_072, "microbatch": 1}
    repeated = plan(qwen3, recipe(deterministic=True, batch=batch), devices=gpu)
    in_fp32 = replace(plan(qwen3, devices=gpu), active=select_precision("fp32", LowPrecisionSettings(), missing_on("cpu")))
    for other in (repeated, in_fp32, plan(qwen3, devices=Devices(name="CPU"))):
        assert part not in other.memory.parts(1)


def test_what_emulation_is_said_to_cost_is_what_was_measured(qwen3: PreTrainedModel) -> None:
    active = select_precision("nvfp4", LowPrecisionSettings(on_unsupported="emulate"), missing_on("cpu"))
    (warning,) = replace(plan(qwen3), active=active).warnings
    bf16, emulated = (
        json.loads((ROOT / f"benchmarks/results/speed/h200_{name}.json").read_text())["results"] for name in ("bf16", "emulated")
    )
    times = sorted(run["summary"]["step_ms"] / bf16[0]["summary"]["step_ms"] for run in emulated)
    assert f"a step took {times[0]:.1f} to {times[-1]:.1f} times BF16's" in warning


def test_what_takes_less_in_a_schedule_is_what_takes_less_in_its_largest_phase(qwen3: PreTrainedModel) -> None:
    def of(*names: str) -> Plan:
        emulated = LowPrecisionSettings(on_unsupported="emulate")
        changed, actives = recipe(weights="fp32"), [select_precision(name, emulated, missing_on("cpu")) for name in names]
        layers = [layers_of(qwen3, changed, active, "cuda", "packed_cudnn") for active in actives]
        phases = [ActivePhase(None, *each) for each in zip(actives, layers, strict=True)]
        return replace(plan(qwen3, changed), active=actives[0], layers=layers[0], phases=phases if len(names) > 1 else [])

    scheduled, *single = (dict(takes_less(each)) for each in (of("nvfp4", "bf16"), of("nvfp4"), of("bf16")))
    for mode in ("weights=bf16_exact", "weights=bf16"):
        assert scheduled[mode] == max(each[mode] for each in single)


def test_the_course_of_a_plan_is_what_ran_and_what_is_to_come(qwen3: PreTrainedModel) -> None:
    low, high = (
        select_precision(name, LowPrecisionSettings(on_unsupported="emulate"), missing_on("cpu")) for name in ("nvfp4", "bf16")
    )
    phases = [ActivePhase(0.5, low, ()), ActivePhase(None, high, ())]
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
        going_on = whole.after(done, ran)
        assert going_on.course == course and (computes is None or going_on.computes == computes)
        uses = "nvfp4" in course.values()
        assert going_on.emulated == uses and any("never runs in this run" in each for each in going_on.warnings) != uses
    alone = plan(qwen3, recipe(train={"steps": 100}, schedule={"warmup": 0})).after(20, {1: "nvfp4"})
    assert alone.computes == "nvfp4 to step 20, then bf16" and alone.has_several and "steps 21 to 100 in bf16" in render(alone)


def test_a_resumed_run_counts_the_tokens_it_took_and_those_to_come(qwen3: PreTrainedModel) -> None:
    """24 steps of half the tokens, then 6 of these; and as many steps of twice the tokens, then 6."""
    whole = plan(qwen3, recipe(train={"steps": 30}), tokens_per_second=1000.0)
    for took, tokens in ((24 * 65_536, 18 * 131_072), (24 * 262_144, 54 * 131_072)):
        resumed = whole.after(24, {}, took)
        assert resumed.total_tokens == tokens and resumed.total_flops == pytest.approx(whole.flops_per_token * tokens)
        assert resumed.epochs == pytest.approx(tokens / 4096 / 22_206) and resumed.hours == pytest.approx(tokens / 3.6e6)
        assert f"30 steps = {units.count(tokens)} tokens = " in render(resumed)
    assert whole.after(24, {}, 24 * 131_072).total_tokens == whole.total_tokens == whole.after(24, {}).total_tokens
    assert whole.after(40, {}, 40 * 65_536).total_tokens == 40 * 65_536, "beyond the horizon nothing is to come"


def test_tokens_that_are_trained_on_stand_beside_all_tokens(qwen3: PreTrainedModel) -> None:
    text = render(plan(qwen3, recipe(train={"steps": 200}), trained_share=0.5))
    assert "200 steps = 26.2 M tokens (13.1 M of them trained on) = 0.29 epochs of 22,206 packs\n" in text


def test_a_step_keeps_its_tokens_over_any_number_of_devices(qwen3: PreTrainedModel) -> None:
    one, four = plan(qwen3), plan(qwen3, devices=Devices(4))
    assert (four.tokens_per_step, four.steps, four.total_flops) == (one.tokens_per_step, one.steps, one.total_flops)
    assert (four.packs_per_rank, four.accumulation) == (8, 1)


def test_packs_that_do_not_divide_leave_places_empty_and_the_plan_says_how_many(qwen3: PreTrainedModel) -> None:
    three = plan(qwen3, devices=Devices(3))
    assert (three.packs_per_rank, three.accumulation, three.empty_places) == (11, 2, 16)
    assert "3 devices x 2 microbatches x 8 packs, 16 places empty" in render(three)
    (warning,) = three.warnings
    assert "16 of 48 places stay empty, 33.3 % of the time. `batch.microbatch: 6` leaves 4, and" in warning
    assert "a multiple of 12,288 can leave none" in warning


def test_auto_has_no_accumulation_until_its_microbatch_is_found(qwen3: PreTrainedModel) -> None:
    made = plan(qwen3, recipe(batch={"tokens": 131_072, "microbatch": "auto"}), devices=Devices(memory=120 * GIB))
    assert made.accumulation is None
    found = made.with_microbatch(4)
    assert (found.microbatch, found.accumulation, found.tokens_per_step) == (4, 8, made.tokens_per_step)


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


def test_hours_follow_from_a_stated_speed_and_are_not_invented(qwen3: PreTrainedModel) -> None:
    assert plan(qwen3, tokens_per_second=47_500.0).hours == pytest.approx(363_855_872 / 47_500 / 3600)
    assert plan(qwen3).hours is None


def test_without_packs_the_plan_says_what_is_not_known(qwen3: PreTrainedModel) -> None:
    made = plan(qwen3, recipe(train={"steps": 200}), packs=None, mean_squared=4096.0)
    assert made.epochs is None
    assert any("not prepared yet" in warning and "epochs" in warning for warning in made.warnings)
    text = render(made)
    assert "200 steps = 26.2 M tokens\n" in text and max(map(len, text.splitlines())) <= 100


def test_fewer_packs_than_a_step_takes_are_allowed_with_a_warning(qwen3: PreTrainedModel) -> None:
    made = plan(qwen3, recipe(train={"steps": 200}), packs=5)
    assert made.epochs == 200 * 32 / 5
    assert any("5 packs occur twice" in warning for warning in made.warnings)


def test_bf16_weights_come_with_the_magnitude_from_which_updates_are_lost(qwen3: PreTrainedModel) -> None:
    (warning,) = plan(qwen3, recipe(weights="bf16")).warnings
    assert "0.0078" in warning
    unmoved, moved = torch.tensor([0.0079, 0.0077], dtype=torch.bfloat16)
    assert unmoved + 2e-5 == unmoved and moved + 2e-5 != moved


def test_bf16_weights_come_with_the_share_of_the_model_that_a_rate_does_not_move(qwen3: PreTrainedModel) -> None:
    weights = torch.randn(2**20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    share = (weights + 2e-5 == weights).double().mean().item()
    (warning,) = plan(qwen3, recipe(weights="bf16"), weight_spread=0.02).warnings
    said = float(re.search(r"so do (\S+) % of the values of a matrix with a standard deviation of 0.02", warning)[1])
    assert said / 100 == pytest.approx(share, abs=0.02)
    assert "norms, which begin at 1, stay as they are" in warning
    fast = recipe(weights="bf16", optimizer={"learning_rate": 1e-3})
    assert "of a matrix" not in plan(qwen3, fast, weight_spread=0.02).warnings[0]


@pytest.mark.parametrize("rate", [1e-3, 1.9e-3, 2e-3, 3e-3, 3.9e-3, 4e-3])
def test_norms_are_said_to_stay_at_one_where_no_step_of_the_rate_moves_them(qwen3: PreTrainedModel, rate: float) -> None:
    one = torch.ones((), dtype=torch.bfloat16)
    stays = all(one + step == one for step in (rate, -rate))
    (warning,) = plan(qwen3, recipe(weights="bf16", optimizer={"learning_rate": rate})).warnings
    assert ("norms, which begin at 1, stay as they are" in warning) == stays


@pytest.mark.parametrize(
    ("precision", "fp8_format", "said"),
    [("mxfp8", "HYBRID", ["Megatron-Bridge#638", "emulated"]), ("mxfp8", "E4M3", ["emulated"]), ("bf16", None, [])],
)
def test_a_precision_comes_with_what_is_known_against_it(
    qwen3: PreTrainedModel, precision: str, fp8_format: str | None, said: list[str]
) -> None:
    settings = LowPrecisionSettings(on_unsupported="emulate", fp8_format=fp8_format)
    active = select_precision(precision, settings, missing_on("cpu"))
    warnings = Plan(recipe(), active, Devices(), "qwen3", ModelFlops.of(qwen3), mean_squared=745.0, packs=22_206).warnings
    assert len(warnings) == len(said) and all(word in text for word, text in zip(said, warnings, strict=True))


def test_low_precision_on_hardware_is_questioned_where_it_was_measured_to_gain_less(qwen3: PreTrainedModel) -> None:
    active = replace(select_precision("current", LowPrecisionSettings(), lambda *_: None), backend="transformer_engine")
    large = Plan(recipe(), active, Devices(), "qwen3", ModelFlops.of(qwen3), mean_squared=745.0, packs=22_206)
    flops = replace(large.flops, shape=replace(large.flops.shape, hidden=768))
    assert large.warnings == [] and "1.17 to 1.24 times BF16's speed" in replace(large, flops=flops).warnings[0]


def test_a_microbatch_that_will_hardly_fit_is_warned_about(qwen3: PreTrainedModel) -> None:
    (warning,) = plan(qwen3, devices=Devices(memory=80 * GIB)).warnings
    assert "92.8 GiB may not fit into 80.0 GiB" in warning


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


def test_an_unknown_device_gets_no_share_of_a_peak(qwen3: PreTrainedModel) -> None:
    assert "peak)" not in render(plan(qwen3, devices=Devices(name="Unheard-of 9000"), tokens_per_second=100.0))
    assert "not known" in render(plan(qwen3, devices=Devices(name="Unheard-of 9000")))


def test_shards_are_gathered_once_a_step_where_the_memory_is_there_for_a_well_filled_device(qwen3: PreTrainedModel) -> None:
    """6 bytes a parameter, less the groups in use. With `microbatch: auto` that may cost packs, but not below 8,192 tokens."""
    for microbatch, packs in ((8, 8), ("auto", 2)):
        asked = recipe(batch={"tokens": 131_072, "microbatch": microbatch})
        shards = [plan(qwen3, asked, Devices(4, sharded=True, gathered=way)).memory.total(packs) for way in (True, False)]
        assert 7.3 * GIB < shards[0] - shards[1] < 7.5 * GIB
        for memory, fits in ((shards[0] / 0.91, True), (shards[0] / 0.93, False)):
            assert fits_gathered(plan(qwen3, asked, Devices(4, sharded=True, memory=int(memory)))) is fits
