"""The plan's figures by hand, and what it refuses once data and model are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from foundation.units import GIB
from pretrain.plan.memory import Devices, layers_of
from pretrain.plan.plan import Plan, spend_spare_memory
from pretrain.plan.rendering import render
from pretrain.precision.selection import missing_on, select_precision
from pretrain.precision.settings import LowPrecisionSettings
from pretrain.settings.recipe import Recipe
from tests.pretrain.conftest import active_in
from tests.pretrain.plan.plan_recipe import QWEN3, flops_of, on_meta, recipe, schedule_of


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedModel:
    return on_meta(QWEN3)


def plan(
    model: PreTrainedModel,
    changed: Recipe | None = None,
    devices: Devices | None = None,
    **changes: Any,
) -> Plan:
    wanted = changed or recipe()
    values = {"packs": 22_206, "mean_squared": 745.0} | changes
    if "schedule" not in values:
        values["schedule"] = schedule_of(wanted, active_in("bf16", "torch"), packs=values["packs"])
    return Plan(wanted, devices=devices or Devices(), flops=flops_of(model), **values)


def test_a_plan_shows_the_steps_of_each_precision(qwen3: PreTrainedModel) -> None:
    low, high = (
        select_precision(name, LowPrecisionSettings(on_unsupported="emulate"), missing_on("cpu"))
        for name in ("nvfp4", "bf16")
    )
    wanted = recipe(train={"steps": 100}, schedule={"warmup": 0})
    whole = plan(qwen3, wanted, schedule=schedule_of(wanted, low, (None, high), until=0.5))
    assert whole.steps == 100 and whole.emulated
    assert "small: nvfp4 to 50 %, then bf16 compute" in render(whole)
    assert "steps 51 to 100 in bf16" in render(whole)
    assert "nvfp4 leaves the last 5 layers in bf16" in " ".join(render(whole).split())


def test_a_mixture_is_planned_with_the_experts_of_a_token_in_what_they_compute_in() -> None:
    """Of 8 experts a token takes 2; what is in FP8 is twice as fast on an H100, and experts are where gradients are E4M3."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
    model, experts, made = (
        on_meta(QWEN3 | {"model_type": "qwen3_moe"} | sizes),
        28 * 2 * 3 * 2048 * 768,
        {},
    )
    for fp8_format in ("HYBRID", "E4M3"):
        active = active_in("delayed", "transformer_engine", fp8_format=fp8_format)
        layers = {
            "delayed": layers_of(model, flops_of(model), recipe(), active, "cuda", "packed_varlen")
        }
        made[fp8_format] = plan(
            model,
            devices=Devices(name="NVIDIA H100 80GB HBM3"),
            schedule=schedule_of(recipe(), active),
            layers=layers,
        )
    hybrid, e4m3 = made.values()
    in_bf16 = 6 * experts / 989.5
    seconds = in_bf16 + (hybrid.flops_per_token - 6 * experts) / 1979.0
    assert hybrid.flops.expert_weights == experts and hybrid.flops.idle_weights == 3 * experts
    assert hybrid.peak_tflops == pytest.approx(hybrid.flops_per_token / seconds)
    assert e4m3.peak_tflops == 1979.0
    assert "experts compute in BF16" in render(hybrid) and "experts" not in render(e4m3)
    assert (
        e4m3.memory(1)["quantized weights"]
        == hybrid.memory(1)["quantized weights"] + 2 * 4 * experts
    )


def test_with_a_bf16_forward_a_third_of_the_flops_are_at_bf16s_peak(qwen3: PreTrainedModel) -> None:
    active = active_in("delayed_bf16_forward", "transformer_engine")
    schedule = schedule_of(recipe(), active)
    made = plan(qwen3, recipe(), Devices(name="NVIDIA H100 80GB HBM3"), schedule=schedule)
    assert made.peak_tflops == pytest.approx(3 / (1 / 989.5 + 2 / 1979.0))


@given(packs=st.integers(1, 300), devices=st.integers(1, 40))
def test_microbatch_sizes_waste_no_place_that_another_size_would_not(
    qwen3: PreTrainedModel, packs: int, devices: int
) -> None:
    """Of each number of microbatches there is one size; where the devices divide the packs, it leaves no place empty."""
    made = plan(qwen3, recipe(batch={"tokens": packs * 4096}), Devices(devices))
    sizes, most = made.microbatch_sizes, made.packs_per_rank
    assert sizes[0] == 1 and sizes[-1] == most
    assert len({-(-most // size) for size in sizes}) == len(sizes)
    assert packs % devices or all(most % size == 0 for size in sizes)


def test_a_search_for_the_microbatch_stays_below_its_cap(qwen3: PreTrainedModel) -> None:
    def planned(microbatch: object) -> Plan:
        return plan(qwen3, recipe(batch={"tokens": 131_072, "microbatch": microbatch}), Devices(1))

    assert planned("auto").microbatch_sizes == [1, 2, 4, 8, 16, 32]
    capped = planned("auto:5")
    assert (
        capped.microbatch_sizes == [1, 2, 4]
        and capped.microbatch is None
        and capped.expected_microbatch == 4
    )
    assert planned("auto:100").microbatch_sizes == planned("auto").microbatch_sizes


@given(most=st.integers(1, 40), devices=st.integers(1, 32))
def test_a_microbatch_is_at_most_what_is_set_and_takes_no_more_turns(
    qwen3: PreTrainedModel, most: int, devices: int
) -> None:
    made = plan(qwen3, recipe(batch={"tokens": 131_072, "microbatch": most}), Devices(devices))
    turns = -(-made.packs_per_rank // most)
    assert 1 <= made.microbatch <= min(most, made.packs_per_rank)
    assert (
        -(-made.packs_per_rank // made.microbatch) == turns
        and made.microbatch * turns - made.packs_per_rank < turns
    )


def test_a_run_that_decays_keeps_a_checkpoint_from_before_it_and_has_room_for_it(
    qwen3: PreTrainedModel,
) -> None:
    def kept(**changes: Any) -> tuple[int | None, int]:
        changed = Recipe.model_validate(recipe().model_dump(exclude_unset=True) | changes)
        found = plan(qwen3, changed)
        return found.before_decay, found.checkpoints_at_once

    end = {"checkpoint": {"every": 500, "keep": 3}}
    assert kept(**end) == (2221, 5), (
        "2,776 steps, of which 555 decay: three kept, one from before, one that is written"
    )
    assert kept(**end, schedule={"kind": "cosine"}) == (None, 4)
    assert kept(checkpoint={"every": 2500, "keep": 3}) == (2221, 2), (
        "the first is saved after the decay has begun"
    )
    short = {"train": {"steps": 1000}, "schedule": {"kind": "cosine"}}
    for at_end, written in ((True, 2), (False, 1)):
        settings = {"every": 500, "keep": 3, "at_end": at_end}
        assert kept(**short, checkpoint=settings) == (None, written), (
            "the last step is saved at the end, if at all"
        )


def test_the_rendered_plan_says_what_a_user_needs_in_a_hundred_columns(
    qwen3: PreTrainedModel,
) -> None:
    text = render(plan(qwen3, devices=Devices(name="NVIDIA H200", memory=140 * GIB)))
    for fact in (
        "small: bf16 compute, fp32 weights, 1 x NVIDIA H200",
        "1.72 B parameters, 1.41 B without embeddings, head tied",
        "131,072 tokens = 32 packs of 4,096 = 1 device x 4 microbatches x 8 packs",
        "2,776 steps = 364 M tokens = 4.00 epochs of 22,206 packs",
        "10.58 GFLOP a token, 1.387 PFLOP a step, 3.849 EFLOP in all",
        "2 h 10 m to 3 h 36 m at 50 to 30 % of the bf16 peak, 989.5 TFLOP/s",
        "about 92.8 GiB of 140.0 GiB a device",
    ):
        assert fact in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("changes", "packs", "warning"),
    [
        ({}, 22_206, None),
        ({"log": {"gap": 100}}, 22_206, "`log.gap: 100` measures nothing"),
        ({"batch": {"tokens": 131_072, "microbatch": 33}}, 22_206, "`batch.microbatch: 33`"),
        ({}, 1, "a step takes 32 packs, and the training data are 1"),
    ],
)
def test_settings_without_effect_are_warned_of(
    qwen3: PreTrainedModel, changes: dict[str, Any], packs: int, warning: str | None
) -> None:
    warnings = plan(qwen3, recipe(**changes), packs=packs).warnings
    assert len(warnings) == bool(warning) and (warning or "") in "".join(warnings)


def test_shards_are_gathered_once_a_step_where_the_memory_is_there_for_a_well_filled_device(
    qwen3: PreTrainedModel,
) -> None:
    """6 bytes a parameter, less the groups in use. With `microbatch: auto` that may cost packs, but not below 8,192 tokens."""
    for microbatch, packs in ((8, 8), ("auto", 2)):
        asked = recipe(batch={"tokens": 131_072, "microbatch": microbatch})
        shards = [
            plan(qwen3, asked, Devices(4, sharded=True, gathered=way)).takes(packs)
            for way in (True, False)
        ]
        assert 7.3 * GIB < shards[0] - shards[1] < 7.5 * GIB
        for memory, fits in ((shards[0] / 0.91, True), (shards[0] / 0.93, False)):
            assert (
                spend_spare_memory(
                    plan(qwen3, asked, Devices(4, sharded=True, memory=int(memory)))
                ).devices.gathered
                is fits
            )


# ── What memory that is left over is spent on ──

H200 = int(139.8 * GIB)


@pytest.fixture(scope="module")
def in_fp8(qwen3: PreTrainedModel) -> Plan:
    """Of Qwen3-1.7B in FP8, head and all, on an H200: 8 packs of 4,096 at once."""
    wanted = recipe(
        precision="delayed",
        weights="bf16_exact",
        fp8_config={"scope": "linear+head"},
        train={"steps": 10},
    )
    active = active_in("delayed", "transformer_engine", scope="linear+head")
    layers = layers_of(qwen3, flops_of(qwen3), wanted, active, "cuda", "packed_fa4")
    devices = Devices(name="NVIDIA H200", memory=H200)
    schedule = schedule_of(wanted, active)
    return Plan(wanted, schedule, devices, flops_of(qwen3), 745.0, {"delayed": layers})


def on(plan: Plan, memory: int = H200) -> Plan:
    return spend_spare_memory(replace(plan, devices=replace(plan.devices, memory=memory)))


def test_an_h200_has_room_for_queries_and_keys_and_takes_the_usual_chunks(in_fp8: Plan) -> None:
    """28 layers' queries, keys and values of 4,096 values in BF16."""
    made = on(in_fp8)
    assert (made.chunk, made.loss.tokens_at_once, made.keeps_rotated) == (None, 4096, True)
    assert made.takes(8) - in_fp8.takes(8) == 28 * 2 * 4096 * 32_768


@given(
    words=st.sampled_from([65, 8192, 32_000, 50_257, 65_537, 128_256]),
    packs=st.sampled_from([1, 2, 8]),
)
def test_with_few_words_a_chunk_has_more_tokens(in_fp8: Plan, words: int, packs: int) -> None:
    shape = replace(in_fp8.flops.shape, vocabulary=words)
    few = in_fp8.recipe.model_copy(
        update={"batch": in_fp8.recipe.batch.model_copy(update={"microbatch": packs})}
    )
    small = replace(in_fp8, recipe=few, flops=replace(in_fp8.flops, shape=shape))
    chunk, tokens = on(small).loss.tokens_at_once, packs * small.recipe.data.length
    assert 4096 <= chunk <= max(tokens, 4096)
    assert chunk == 4096 or chunk * words <= 2**29
    assert chunk * 2 > tokens or chunk * 2 * words > 2**29  # no longer one would do
    assert on(small, small.takes(packs)).chunk is None
