"""Test the load of a GPU that computes, as NVML reports it."""

from __future__ import annotations

import time

import torch

from foundation.gpus import load_of


def test_a_gpu_that_computes_is_not_idle() -> None:
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    # NVML reports the share of the last second or less.
    end = time.monotonic() + 2
    while time.monotonic() < end:
        for _ in range(20):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()
    processes, idle = load_of(0)
    assert processes >= 1 and 0 <= idle < 0.5
