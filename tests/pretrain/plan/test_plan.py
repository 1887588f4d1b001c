"""The figures of a plan, computed by hand, and its warnings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from foundation.units import GIB
from lab.speed.speed import predict
from pretrain.plan.memory import Devices
from pretrain.plan.plan import Plan, fits_gathered_once, spend_spare_memory
from pretrain.plan.rendering import render
from pretrain.run.job import check_host_memory, cuda_graphs, use_one_thread
from tests.pretrain.plan.plan_recipe import QWEN3, flops_of, in_phases, on_meta, plan_of


def words(plan: Plan) -> str:
    """Return the rendered plan without line breaks."""
    return " ".join(render(plan).split())


def test_a_plan_shows_the_steps_of_each_precision() -> None:
    changes = {"train": {"steps": 100}, "schedule": {"warmup": 0}}
    low = plan_of("nvfp4", engine="emulation", **changes)
    plan = in_phases(low, plan_of(**changes), until=0.5)
    assert plan.steps == 100 and plan.emulated
    for fact in ("nvfp4 to 50 %, then bf16", "steps 51 to 100 in bf16", "last 5 layers in bf16"):
        assert fact in words(plan)


def test_experts_compute_in_fp8_only_if_gradients_are_e4m3() -> None:
    """A token takes 2 of 8 experts."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
    model = on_meta(QWEN3 | {"model_type": "qwen3_moe"} | sizes)
    experts = 28 * 2 * 3 * 2048 * 768
    flops = flops_of(model)
    assert (flops.expert_weights, flops.idle_weights) == (experts, 3 * experts)
    h100 = Devices(name="NVIDIA H100 80GB HBM3")
    settings = {"model": model, "fused": True, "attention": "packed_varlen"}
    hybrid, e4m3 = (
        plan_of("delayed", h100, **settings, fp8_config={"fp8_format": fp8_format})
        for fp8_format in ("HYBRID", "E4M3")
    )
    slow, fast = map(predict, (hybrid, e4m3))
    assert slow.tokens_per_second < fast.tokens_per_second and slow.gain < fast.gain
    assert "experts compute in BF16" in words(hybrid) and "experts" not in words(e4m3)
    quantized = [plan.memory_parts(1)["quantized weights"] for plan in (hybrid, e4m3)]
    assert quantized[1] - quantized[0] == 2 * 4 * experts


@given(packs=st.integers(1, 300), devices=st.integers(1, 40))
def test_microbatch_sizes_have_minimal_padding(packs: int, devices: int) -> None:
    """Each number of microbatches has one size. If devices divide packs, nothing is padded."""
    plan = plan_of(devices=Devices(devices), batch={"tokens": packs * 4096})
    sizes = plan.microbatch_sizes
    per_rank = plan.packs_per_rank
    assert sizes[0] == 1 and sizes[-1] == per_rank
    assert len({-(-per_rank // size) for size in sizes}) == len(sizes)
    if packs % devices == 0:
        assert all(per_rank % size == 0 for size in sizes)


@given(most=st.integers(1, 40), devices=st.integers(1, 32))
def test_a_microbatch_is_at_most_the_setting_with_as_few_passes(most: int, devices: int) -> None:
    plan = plan_of(devices=Devices(devices), batch={"tokens": 131_072, "microbatch": most})
    per_rank, size = plan.packs_per_rank, plan.microbatch
    passes = -(-per_rank // most)
    assert 1 <= size <= min(most, per_rank)
    assert -(-per_rank // size) == passes and size * passes - per_rank < passes


COSINE = {"train": {"steps": 1000}, "schedule": {"kind": "cosine"}}


@pytest.mark.parametrize(
    ("every", "at_end", "changes", "before_decay", "at_once"),
    [
        # 2,776 steps, of which 555 decay: three kept, one before the decay, one being written.
        (500, True, {}, 2221, 5),
        (500, True, {"schedule": {"kind": "cosine"}}, 0, 4),
        # The first regular checkpoint is saved during the decay.
        (2500, True, {}, 2221, 2),
        # The last step is saved only at the end.
        (500, True, COSINE, 0, 2),
        (500, False, COSINE, 0, 1),
        (500, False, COSINE | {"evaluate": {"served": "nvfp4"}}, 0, 2),
    ],
)
def test_a_run_that_decays_keeps_a_checkpoint_before_the_decay(
    every: int, at_end: bool, changes: dict[str, Any], before_decay: int, at_once: int
) -> None:
    plan = plan_of(checkpoint={"every": every, "keep": 3, "at_end": at_end}, **changes)
    assert (plan.before_decay, plan.checkpoints_at_once) == (before_decay, at_once)


def test_the_rendered_plan_has_all_facts_in_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = render(plan_of(devices=Devices(name="NVIDIA H200", memory=140 * GIB)))
    for fact in (
        "small: bf16 compute, fp32 weights, 1 x NVIDIA H200",
        "1.72 B parameters, 1.41 B without embeddings, head tied",
        "131,072 tokens = 32 packs of 4,096 = 1 device x 4 microbatches x 8 packs",
        "2,776 steps = 364 M tokens = 4.00 epochs of 22,206 packs",
        "10.58 GFLOP per token, 1.387 PFLOP per step, 3.849 EFLOP in total",
        "about 92.8 GiB of 140.0 GiB per device for tensors",
    ):
        assert fact in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_plan_that_does_not_fit_names_its_parts_and_settings() -> None:
    (warning,) = plan_of(devices=Devices(name="RTX 3090", memory=23 * GIB)).warnings
    assert "GiB: parameters 6.4 GiB, gradients 6.4 GiB, optimizer moments 12.8 GiB" in warning
    assert "; to save memory, set " in warning and "`optimizer.offload: state`" in warning


def test_a_host_needs_memory_for_the_state_of_all_its_processes() -> None:
    offloaded = plan_of(optimizer={"offload": "moments"})
    assert ", and 12.8 GiB of host memory (optimizer.offload) " in words(offloaded)
    for processes, free, needed in ((1, 14, "13.9"), (2, 28, "27.9")):
        check_host_memory(offloaded, processes, free * GIB)
        message = f"`optimizer.offload: moments` needs {needed} GiB of free"
        with pytest.raises(InputError, match=message):
            check_host_memory(offloaded, processes, (free - 1) * GIB)


@pytest.mark.parametrize(("microbatch", "packs"), [(8, 8), ("auto", 2)])
def test_shards_are_gathered_once_a_step_if_memory_allows(
    microbatch: int | str, packs: int
) -> None:
    """Gathered weights take 6 bytes per parameter, less the groups in use.

    With `microbatch: auto` they may reduce the packs of a microbatch, but not below 8,192 tokens.
    """
    batch = {"tokens": 131_072, "microbatch": microbatch}
    often = plan_of(devices=Devices(4, sharded=True), batch=batch).needed_memory(packs)
    once = plan_of(devices=Devices(4, sharded=True, gathered_once=True), batch=batch).needed_memory(
        packs
    )
    assert 7.3 * GIB < once - often < 7.5 * GIB
    for memory, fits in ((once / 0.91, True), (once / 0.93, False)):
        devices = Devices(4, sharded=True, memory=int(memory))
        assert fits_gathered_once(plan_of(devices=devices, batch=batch)) is fits


@pytest.mark.parametrize(
    ("length", "set_by_user", "threads"),
    # 256 tokens x 2,048 values are a large model.
    [(128, None, 2), (64, None, 1), (64, "2", 2)],
)
def test_a_small_model_uses_one_thread_unless_the_user_sets_a_number(
    length: int, set_by_user: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_user:
        monkeypatch.setenv("OMP_NUM_THREADS", set_by_user)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        batch = {"tokens": 2 * length, "microbatch": 2}
        use_one_thread(plan_of(data={"packs": "p", "length": length}, batch=batch))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_the_plan_says_how_often_weights_are_gathered() -> None:
    devices = Devices(4, sharded=True, memory=int(140 * GIB))
    for precision, text in (("bf16", "gathered for each use"), ("delayed", "gathered once a step")):
        assert f"{text}, reduced in each mic" in words(plan_of(precision, devices))


# ── Use of spare memory ────────────────────────────────────────────────────────────────

H200 = int(139.8 * GIB)


@pytest.fixture(scope="module")
def in_fp8() -> Plan:
    """Return the plan of Qwen3-1.7B with an FP8 head on an H200.

    A microbatch has 8 packs of 4,096 tokens.
    """
    return on_an_h200()


def on_an_h200(**changes: Any) -> Plan:
    changes |= {"fp8_config": {"scope": "linear+head"}, "weights": "bf16_exact"}
    devices = Devices(name="NVIDIA H200", memory=H200)
    return plan_of("delayed", devices, fused=True, train={"steps": 10}, **changes)


def with_memory(plan: Plan, memory: int = H200) -> Plan:
    """Return the plan for a device with `memory` bytes, after its spare memory is used."""
    return spend_spare_memory(replace(plan, devices=replace(plan.devices, memory=memory)))


def test_an_h200_keeps_rotated_queries_with_chunks_of_4096(in_fp8: Plan) -> None:
    """Queries, keys and values have 4,096 values per token and layer in BF16."""
    run_plan = with_memory(in_fp8)
    assert (run_plan.loss_chunk, run_plan.loss.tokens_at_once) == (None, 4096)
    assert run_plan.keeps_rotated
    assert run_plan.needed_memory(8) - in_fp8.needed_memory(8) == 28 * 2 * 4096 * 32_768
    recomputed = on_an_h200(section={"source": "m", "gradient_checkpointing": "full"})
    assert not with_memory(recomputed).keeps_rotated


@given(
    words=st.sampled_from([65, 8192, 32_000, 50_257, 65_537, 128_256]),
    packs=st.sampled_from([1, 2, 8]),
)
def test_a_small_vocabulary_gets_larger_chunks(in_fp8: Plan, words: int, packs: int) -> None:
    shape = replace(in_fp8.flops.shape, vocabulary=words)
    settings = in_fp8.recipe.model_copy(
        update={"batch": in_fp8.recipe.batch.model_copy(update={"microbatch": packs})}
    )
    small = replace(in_fp8, recipe=settings, flops=replace(in_fp8.flops, shape=shape))
    chunk = with_memory(small).loss.tokens_at_once
    tokens = packs * small.recipe.data.length
    assert 4096 <= chunk <= max(tokens, 4096)
    assert chunk == 4096 or chunk * words <= 2**29
    # Twice the size would be larger than the microbatch or the limit.
    assert chunk * 2 > tokens or chunk * 2 * words > 2**29
    assert with_memory(small, small.needed_memory(packs)).loss_chunk is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"precision": "mxfp8"}, "not tested in every precision"),
        ({"model": {"cuda_graphs": "off"}}, "the recipe turns them off"),
        ({"model": {"fused": "off"}}, "fused layers"),
        ({"model": {"gradient_checkpointing": 2}}, "`model.gradient_checkpointing`"),
        ({"loss": {"kind": "cce"}}, "`loss.kind: cce`"),
        ({"devices": Devices(count=2)}, None),
        ({"devices": Devices(count=2, sharded=True)}, "in each microbatch"),
        ({"devices": Devices(2, sharded=True, gathered_once=True)}, None),
        ({"packs": 1}, None),
        ({"packs": 2, "devices": Devices(count=2)}, None),
        ({"devices": Devices(count=16)}, "several machines, and LOCAL_WORLD_SIZE is below"),
        ({"devices": Devices(count=16), "model": {"cuda_graphs": "on"}}, None),
        ({"packs": 4, "devices": Devices(2, sharded=True, gathered_once=True)}, "every microbatch"),
        ({"packs": 5, "devices": Devices(2, sharded=True, gathered_once=True)}, None),
        ({"config": {"embd_pdrop": 0.1}}, "dropout"),
    ],
)
def test_the_plan_states_why_a_run_cannot_use_cuda_graphs(
    changes: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    gpt2 = {"model_type": "gpt2", "n_layer": 2} | no_dropout
    model = on_meta(gpt2 | changes.get("config", {}))
    # The argument `model` of `plan_of` is not the section of the recipe.
    section = changes.get("model", {})
    plan = plan_of(
        changes.get("precision", "delayed"),
        changes.get("devices"),
        model=model,
        fused=True,
        attention="packed_varlen",
        section={"source": "some/model", **section},
        loss=changes.get("loss", {}),
        batch={"tokens": changes.get("packs", 32) * 4096, "microbatch": 1},
    )
    status = cuda_graphs(plan, model)
    if reason is None:
        assert status == plan.recipe.model.cuda_graphs
    else:
        assert status.startswith("off: ") and reason in status
