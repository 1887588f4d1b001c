"""Where a step's time goes: parts told apart by name and by who started them, and a real run."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from pretrain.metrics.profile import by_launch, by_operator, part_of, render
from pretrain.model.loss.head import LOSS_SCOPE


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


def test_the_table_adds_up_to_the_step() -> None:
    table = render({"loss": 0.2, "attention": 0.5}, wall=1.0, data_wait=0.05)
    assert [float(share) for share in re.findall(r"([\d.]+) %", table)] == [50.0, 20.0, 5.0, 25.0]
    assert table.splitlines()[-1].split() == ["|", "**the", "step**", "|", "1000.0", "|", "|"]
