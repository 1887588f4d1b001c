"""Rates of a device agree with direct timings. Here the device is a CPU.

Other programs slow a CPU down at any time, so rates may differ by FACTOR.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from foundation.errors import InputError
from pretrain.metrics.rate_measurement import (
    collective_rates,
    copy_rate,
    gemm_rate,
    gemm_rates,
    launch_seconds,
    measure_rates,
)
from tests.pretrain.conftest import QUANTIZED, active_in
from tests.ranks import in_ranks
from tests.te_on_a_cpu import transformer_engine_on_a_cpu

CPU = torch.device("cpu")
FACTOR = 10
SHAPE = (256, 128, 384)
SECONDS = 0.01
MEGABYTE = 10**6


def seconds_of(run: Callable[[], object]) -> float:
    """Return the least seconds of a call."""
    run()
    times = []
    for _ in range(20):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def agrees(rate: float, expected: float) -> bool:
    return expected / FACTOR < rate < expected * FACTOR


def test_bf16_gemms_have_the_rate_of_torchs_products() -> None:
    tokens, inputs, outputs = SHAPE
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
    dy = torch.randn(tokens, outputs, dtype=torch.bfloat16)
    seconds = seconds_of(lambda: (x @ weight.t(), dy @ weight, dy.t() @ x))
    rate = gemm_rate(active_in("bf16", "torch"), CPU, SHAPE, SECONDS)
    assert agrees(rate, 2 * 3 * tokens * inputs * outputs / seconds)


@pytest.mark.parametrize("precision", QUANTIZED)
def test_gemms_of_every_precision_have_a_rate(precision: str) -> None:
    assert gemm_rate(active_in(precision), CPU, SHAPE, SECONDS) > 0


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_gemms_of_transformer_engine_have_a_rate(precision: str, references: Path) -> None:
    with transformer_engine_on_a_cpu(references):
        active = active_in(precision, "transformer_engine")
        assert gemm_rate(active, CPU, SHAPE, SECONDS) > 0


def test_emulated_precisions_are_no_rates_of_a_card() -> None:
    assert gemm_rates(CPU, SHAPE, SECONDS).keys() == {"bf16"}


def test_a_copy_counts_bytes_read_and_bytes_written() -> None:
    source = torch.ones(8 * MEGABYTE, dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source))
    assert agrees(copy_rate(CPU, 8 * MEGABYTE, SECONDS), 2 * 8 * MEGABYTE / seconds)


def test_a_launch_takes_the_time_of_one_small_kernel() -> None:
    number = torch.zeros(1)
    thousand = seconds_of(lambda: [number.add_(number) for _ in range(1000)])
    assert agrees(launch_seconds(CPU, SECONDS), thousand / 1000)


def rates_and_direct_timing(rank: int, size: int) -> tuple[dict[str, float], float]:
    # torch 2.13 renames two functions.
    warnings.simplefilter("ignore", FutureWarning)
    rates = collective_rates(CPU, (size,))
    message = torch.zeros(size // 4)
    dist.all_reduce(message)
    began = time.perf_counter()
    for _ in range(20):
        dist.all_reduce(message)
    return rates, (time.perf_counter() - began) / 20


def test_ranks_measure_the_bus_bandwidth_of_each_operation() -> None:
    for rates, seconds in in_ranks(rates_and_direct_timing, 4 * MEGABYTE):
        names = ("all_gather", "reduce_scatter", "all_reduce")
        assert list(rates) == [f"{name} {4 * MEGABYTE}" for name in names]
        assert min(rates.values()) > 0
        # With two ranks, the bus bandwidth of an all-reduce is the size over the time.
        assert agrees(rates[f"all_reduce {4 * MEGABYTE}"], 4 * MEGABYTE / seconds)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_has_no_card_rates() -> None:
    with pytest.raises(InputError, match="only a GPU has card rates"):
        measure_rates()
