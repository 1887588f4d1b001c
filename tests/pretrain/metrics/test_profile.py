"""Where a step's time goes: parts told apart by name and by who started them, rates against closed forms, and a real run."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from pretrain.metrics.flops import LowPrecisionProducts, ModelFlops
from pretrain.metrics.profile import StepProfile, Work, by_launch, by_operator, part_of, reached, render
from pretrain.model import huggingface as model
from pretrain.model.loss.head import LOSS_SCOPE
from pretrain.settings.recipe import ModelSettings
from tests.triton_kernels import launched_in


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "products of the layers"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products of the layers"),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::mm", "products of the layers"),
        ("aten::mul", "everything else"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "everything else"),
        ("void transformer_engine::cast_transpose_optimized_kernel<...>", "quantization"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void transformer_engine::normalization::rmsnorm_bwd_tuned_kernel<...>", "norms"),
        ("_rms_norm", "norms"),
        ("_rotate_backward_in_codes", "rotation"),
        ("rotate_backward_in_blocks", "rotation"),
    ],
)
def test_a_kernel_is_known_by_its_name(name: str, part: str) -> None:
    assert part_of(name, set()) == part


def test_every_kernel_of_ours_but_the_tables_has_a_part() -> None:
    launched = set().union(*map(launched_in, Path(model.__file__).parents[1].rglob("*_kernel.py")))
    assert {"_adamw"} < launched
    assert {name for name in launched if part_of(name, set()) == "everything else"} <= {"_add_rows"}


def test_what_the_loss_and_the_optimizer_start_is_theirs() -> None:
    assert part_of("aten::mm", {LOSS_SCOPE}) == "products of the head"
    assert part_of("aten::exp_", {LOSS_SCOPE}) == "loss"
    assert part_of("aten::copy_", {"Optimizer.step#ExactAdamW.step"}) == "optimizer"


def test_a_recorded_program_is_divided_by_what_it_did() -> None:
    x, w = torch.randn(512, 512), torch.randn(512, 512)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        began = time.perf_counter()
        for _ in range(5):
            F.silu(x @ w)
        with torch.profiler.record_function(LOSS_SCOPE):
            torch.log_softmax(x @ w, -1)
        wall = time.perf_counter() - began
    seconds = by_operator(recorded.events())
    assert seconds.keys() >= {"products of the layers", "products of the head", "loss", "everything else"}
    *layers, head = [event.self_cpu_time_total / 1e6 for event in recorded.events() if event.name == "aten::mm"]
    assert len(layers) == 5
    assert seconds["products of the layers"] == pytest.approx(sum(layers))
    assert seconds["products of the head"] == pytest.approx(head)
    assert sum(seconds.values()) < wall


def test_a_kernel_belongs_to_the_scope_in_which_it_was_launched_however_late_it_runs() -> None:
    """Two products of one name, of the loss and of a layer; an autograd thread beside the main one; a kernel nobody launched."""

    def event(category: str, name: str, ts: float, dur: float, tid: int, correlation: int | None = None) -> dict[str, Any]:
        made = {"cat": category, "name": name, "ts": ts, "dur": dur, "tid": tid, "ph": "X"}
        return made | ({"args": {"correlation": correlation}} if correlation is not None else {})

    trace = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", LOSS_SCOPE, 100, 50, 1),
        event("user_annotation", "Optimizer.step#ExactAdamW.step", 300, 50, 1),
        event("gpu_user_annotation", LOSS_SCOPE, 500, 900, 7),
        event("cuda_runtime", "cudaLaunchKernel", 90, 5, 1, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 120, 5, 1, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 125, 5, 2, correlation=3),
        event("cuda_runtime", "cudaMemcpyAsync", 310, 5, 1, correlation=4),
        event("kernel", "nvjet_qqtst", 600, 1000, 7, correlation=1),
        event("kernel", "nvjet_qqtst", 700, 200, 7, correlation=2),
        event("kernel", "nvjet_qqtst", 800, 30, 7, correlation=3),
        event("gpu_memcpy", "Memcpy DtoD", 900, 4, 7, correlation=4),
        event("kernel", "ncclDevKernel_AllReduce", 900, 5, 8, correlation=99),
    ]
    seconds = {part: 1e6 * spent for part, spent in by_launch(trace).items()}
    expected = {"products of the layers": 1030, "products of the head": 200, "optimizer": 4, "communication": 5}
    assert seconds == pytest.approx(expected)


def test_rates_are_work_over_time_and_shares_of_what_the_device_could_do() -> None:
    settings = ModelSettings(config={"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64})
    flops = ModelFlops.of(model.build_on_meta(model.load_config(settings)))
    low = LowPrecisionProducts(weights=1, peak_tflops=2.0)
    work = Work(flops, 1000, 5000.0, 1.0, low, update_bytes=26 * 10**9)
    parts = flops.by_part(1000, 5000.0)
    seconds = {"products of the layers": 1e-6, "products of the head": 1e-6, "attention": 2e-6, "optimizer": 0.01, "loss": 1.0}
    rates = reached(seconds, work, copied_per_second=4e12)
    layers = parts["attention projections"] + parts["mlp"]
    assert rates["products of the layers"] == f"{layers / 1e6:.4g} TFLOP/s, {layers / 1e6 / 2:.1%} of the peak".replace("%", " %")
    head = parts["head"] / 1e6
    assert rates["products of the head"] == f"{head:.4g} TFLOP/s, {head:.1%} of the peak".replace("%", " %")
    with_the_head = reached(seconds, replace(work, low_precision=replace(low, head=True)), None)
    assert with_the_head["products of the head"] == f"{head:.4g} TFLOP/s, {head / 2:.1%} of the peak".replace("%", " %")
    assert rates["attention"].startswith(f"{parts['attention products'] / 2e6:.4g} TFLOP/s")
    assert rates["optimizer"] == "2600 GB/s, 65.0 % of a copy's"
    assert "loss" not in rates
    assert reached({"loss": 1.0}, work, None) == {}


def test_the_table_adds_up_to_the_step() -> None:
    table = render({"loss": 0.2, "attention": 0.5}, wall=1.0, unrecorded=0.9, data_wait=0.05, rates={"attention": "3 TFLOP/s"})
    table = re.sub(" +", " ", table)
    shares = [float(share) for share in re.findall(r"\| ([\d.]+) % \|", table)]
    assert sum(shares) == pytest.approx(100) and shares == [50.0, 20.0, 5.0, 15.0, 10.0]
    assert "| gaps, by recording | 100.0 |" in table
    assert "| attention | 500.0 | 50.0 % | 3 TFLOP/s |" in table and table.splitlines()[-1] == "| **the step** | 1000.0 | | |"


def test_a_run_records_one_step_and_trains_the_same(train_here: Callable, small_recipe: dict[str, Any], tmp_path: Path) -> None:
    plain = train_here(recipe=small_recipe | {"run_dir": str(tmp_path / "plain")})
    run = train_here("--profile", recipe=small_recipe)
    assert run.status == 0, run.output
    assert run.losses() == plain.losses()
    table = (run.run_dir / "profile.md").read_text()
    assert table.strip() in run.output
    for part in ("products of the layers", "products of the head", "attention", "loss", "optimizer", "gaps"):
        assert f"| {part} " in table
    with gzip.open(run.run_dir / "profile.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert LOSS_SCOPE in names and "aten::mm" in names


def test_a_run_that_ends_before_is_refused(train_here: Callable, small_recipe: dict[str, Any]) -> None:
    run = train_here("--profile", "train.steps=4", "schedule.warmup=0", recipe=small_recipe)
    assert run.status == 2 and "`--profile` records step 5" in run.output


def test_only_the_chosen_step_is_recorded(tmp_path: Path) -> None:
    recorder = StepProfile(tmp_path, torch.device("cpu"), steps_done=3)
    for step in range(4, 9):
        with recorder.recording(step):
            torch.ones(8, 8) @ torch.ones(8, 8)
        assert (tmp_path / "profile.json.gz").exists() == (step == 8)


def test_a_link_in_place_of_the_table_is_replaced_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (theirs := tmp_path / "theirs.md").write_text("theirs")
    (written := tmp_path / "profile.md").symlink_to(theirs)
    settings = ModelSettings(config={"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64})
    work = Work(ModelFlops.of(model.build_on_meta(model.load_config(settings))), 1, 1.0, None, None, update_bytes=1)
    recorder = StepProfile(tmp_path, torch.device("cpu"), steps_done=0)
    with recorder.recording(recorder.step):
        torch.ones(8, 8) @ torch.ones(8, 8)
    table = recorder.table(work, 0.0)
    assert (written.is_symlink(), written.read_text(), theirs.read_text()) == (False, f"{table}\n", "theirs")
