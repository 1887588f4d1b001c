"""Rates of a device count the right FLOPs and bytes. Here the device is a CPU."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pretrain.metrics import rate_measurement
from pretrain.metrics.rate_measurement import (
    collective_rates,
    copy_rate,
    gemm_rate,
    gemm_rates,
    launch_seconds,
    sustained_seconds,
)
from tests.pretrain.conftest import QUANTIZED, active_in
from tests.ranks import in_ranks
from tests.te_on_a_cpu import transformer_engine_on_a_cpu

CPU = torch.device("cpu")
SHAPE = (256, 128, 384)
SECONDS = 0.01
MEGABYTE = 10**6


@pytest.fixture
def half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measured call takes half a second, because a real time differs from run to run."""

    def run_once(run: Callable[[], object], _: float) -> float:
        run()
        return 0.5

    monkeypatch.setattr(rate_measurement, "sustained_seconds", run_once)


def test_a_call_takes_at_least_its_sleep() -> None:
    assert sustained_seconds(lambda: time.sleep(0.002), SECONDS) >= 0.002


def test_three_gemms_have_six_flops_for_each_weight_and_token(half_a_second: None) -> None:
    tokens, inputs, outputs = SHAPE
    rate = gemm_rate(active_in("bf16", "torch"), CPU, SHAPE, SECONDS)
    assert rate == 6 * tokens * inputs * outputs / 1.5


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


def test_a_copy_counts_bytes_read_and_bytes_written(half_a_second: None) -> None:
    assert copy_rate(CPU, 8 * MEGABYTE, SECONDS) == 2 * 8 * MEGABYTE / 0.5


def test_a_launch_has_the_time_of_one_call(half_a_second: None) -> None:
    assert launch_seconds(CPU, SECONDS) == 0.5


class TwoSeconds:
    """A timer that runs an operation and returns two seconds."""

    def __init__(self, _: str, *, globals: dict[str, Callable[[], object]]) -> None:
        self.operation = globals["operation"]
        self.mean = 2.0

    def timeit(self, _: int) -> TwoSeconds:
        self.operation()
        return self


def rates_in_two_seconds(rank: int, size: int) -> dict[str, float]:
    # torch 2.13 renames two functions.
    warnings.simplefilter("ignore", FutureWarning)
    rate_measurement.Timer = TwoSeconds
    return collective_rates(CPU, (size,))


def test_ranks_measure_the_bus_bandwidth_of_each_operation() -> None:
    size = 4 * MEGABYTE
    for rates in in_ranks(rates_in_two_seconds, size):
        # Of two ranks, each sends half of the message, and in an all-reduce twice that.
        assert rates == {
            f"all_gather {size}": size / 4,
            f"reduce_scatter {size}": size / 4,
            f"all_reduce {size}": size / 2,
        }
