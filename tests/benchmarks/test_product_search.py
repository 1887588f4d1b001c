"""The search among a product's algorithms: which products, how their tensors lie, and what the report makes of the times."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_log import GpuLog
from benchmarks.product_search import line, steps
from benchmarks.step_products import (
    CHECKED_ROWS,
    HEAD_CHUNKS,
    PRECISIONS,
    Operands,
    StepProduct,
    checked_rows,
    products_of,
    scales_of,
)
from pretrain.metrics.flops import ModelFlops
from pretrain.model.huggingface import build_on_meta, load_config
from pretrain.precision.cublaslt import HeuristicResult
from pretrain.settings.config import load_recipe
from pretrain.verify.kernels import relative_error

QWEN = load_recipe(Path(__file__).resolve().parents[2] / "benchmarks/qwen3_1_7b.yaml")
TRANSPOSED = {"forward": (True, False), "dgrad": (False, False), "wgrad": (False, True)}


@pytest.fixture(scope="module")
def products() -> list[StepProduct]:
    return products_of(QWEN)


@pytest.mark.parametrize("chunk", HEAD_CHUNKS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_products_of_a_step_have_the_models_flops(products: list[StepProduct], precision: str, chunk: int):
    forward = "e4m3" if precision == "hybrid" else precision
    chosen = [p for p in products if p.precision == (forward if p.which == "forward" else precision)]
    chosen = [p for p in chosen if not p.product.startswith("head") or p.product == f"head/{chunk}"]
    flops = ModelFlops.of(build_on_meta(load_config(QWEN.model)))
    assert sum(p.count * p.flops for p in chosen) == QWEN.batch.tokens * flops.per_token_matrix


def test_weight_gradients_are_added_in_fp32_and_residuals_to_two_outputs(products: list[StepProduct]):
    assert {(p.output, p.beta) for p in products if p.which == "wgrad"} == {(torch.float32, 1.0)}
    assert {(p.output, p.beta) for p in products if p.which != "wgrad"} == {(torch.bfloat16, 0.0)}
    assert {(p.product, p.which) for p in products if p.adds_residual} == {("o", "forward"), ("down", "forward")}
    assert {p.which for p in products if p.fast_accumulation} == {"forward"}


@pytest.mark.parametrize("which", TRANSPOSED)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_operands_lie_as_cublaslt_is_told(which: str, precision: str):
    m, n, k = 48, 80, 32
    product = StepProduct("one", "o", which, precision, n, m, n, k, 1, torch.float32 if which == "wgrad" else torch.bfloat16)
    assert product.transposed == (TRANSPOSED[which] if precision == "bf16" else (True, False))
    operands, scales = Operands.random(product, 0, "cpu"), scales_of(product, "cpu")
    assert (operands.a.dtype, operands.b.dtype, operands.d.dtype) == product.types and operands.d.shape == (n, m)
    # As torch multiplies them: rows by columns.
    if precision == "bf16":
        left = operands.b.t() if which == "wgrad" else operands.b
        right = operands.a.t() if which == "forward" else operands.a
        d = torch.mm(left, right)
    else:
        d = torch._scaled_mm(operands.b, operands.a.t(), scale_a=scales[1], scale_b=scales[0], out_dtype=torch.bfloat16)
    expected = checked_rows(product, operands, scales)
    assert relative_error(d[:CHECKED_ROWS], expected) < 0.004
    assert expected.std().item() == pytest.approx(k**0.5, rel=0.1), "operands are normal once they are scaled"


def test_every_set_of_tensors_is_cold_again_when_its_turn_comes(products: list[StepProduct]):
    small = replace(products[0], n=1024)
    for product in (small, *products):
        bytes_of_a_set = sum(
            size * dtype.itemsize
            for size, dtype in zip(
                (product.m * product.k, product.n * product.k, product.m * product.n), product.types, strict=True
            )
        )
        assert product.sets >= 2 and product.sets * bytes_of_a_set >= 2**28


def test_results_of_the_heuristic_lie_as_in_cublaslt_h():
    assert (HeuristicResult.algorithm.offset, HeuristicResult.workspace.offset, HeuristicResult.state.offset) == (0, 64, 72)
    assert ctypes.sizeof(HeuristicResult) == 96


def row(product: StepProduct, today: float, best: float) -> dict[str, object]:
    times = {"first": today + 1, "best": best, "transformer_engine": today}
    names = ("model", "product", "which", "precision", "count")
    found = {name: getattr(product, name) for name in names} | {"microseconds": times, "gain": today / best - 1, "tflops": 1.0}
    found |= {"tried": 9, "refused": 2, "best": {"source": "heuristic 3", "settings": {"tile": 20, "split_k": 0}}}
    if product.adds_residual:
        added = {name: time + 4 for name, time in times.items()}
        found["residual"] = {"microseconds": added | {"in one": best + 1}}
    return found


def test_a_step_sums_its_products_and_what_the_residual_spares(products: list[StepProduct]):
    rows = [row(product, 10.0, 8.0) for product in products]
    found = {(step["precision"], step["head_chunk"]): step for step in steps(rows)}
    assert found.keys() == {(precision, chunk) for precision in PRECISIONS for chunk in HEAD_CHUNKS}
    step = found["hybrid", 4096]
    count = 3 * (4 * 28 * 4 + 4 * 8)  # of products: layers, microbatches, the head's chunks
    assert step["today_ms"] == pytest.approx(count * 10 / 1e3)
    assert step["spared_ms"] == pytest.approx(count * 2 / 1e3)
    assert step["spared_by_residual_ms"] == pytest.approx(2 * 28 * 4 * 3 / 1e3)


def test_a_product_that_failed_is_told_and_its_steps_are_not_summed(products: list[StepProduct]):
    rows = [row(product, 10.0, 8.0) for product in products]
    failed = next(i for i, p in enumerate(products) if (p.product, p.precision, p.which) == ("qkv", "e4m3", "forward"))
    rows[failed] = {key: rows[failed][key] for key in ("model", "product", "which", "precision")} | {"failed": "status 15"}
    assert {step["precision"] for step in steps(rows)} == {"bf16"}
    assert line(rows[failed]) == "qwen3_1_7b qkv forward e4m3: status 15"
    assert "+25.0%" in line(rows[-1]) and "heuristic 3 (tile 20)" in line(rows[-1])


def test_clock_and_power_are_medians_of_their_time():
    log = GpuLog()
    log.read([f"2026/11/21 07:00:0{second}.250, {1700 + second}, 690.50\n" for second in range(5)])
    log.read(["2026/11/21 07:00:09.000, [N/A], 700.00\n", "No devices were found\n"])
    begin, end = (datetime(2026, 11, 21, 7, 0, second) for second in (1, 4))
    assert log.between(begin, end) == {"sm_clock_mhz": 1702, "power_w": 690.5}
    assert log.between(end, end) == {}
