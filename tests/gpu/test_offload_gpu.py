"""Test the memory of the optimizer's state in pinned host memory (`optimizer.offload`)."""

from __future__ import annotations

import gc

import torch
from torch import nn

from pretrain.optimizer.adamw import ExactAdamW
from pretrain.optimizer.offload import OFFLOADED, PIECE, SLOTS

HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def test_offloading_lowers_the_peak_by_the_size_of_the_moments() -> None:
    values = 2**27
    peaks = {}
    for offload in ("none", "moments"):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        weight = nn.Parameter(torch.zeros(values, dtype=torch.bfloat16, device="cuda"))
        optimizer = ExactAdamW([weight], **HYPER, offload=OFFLOADED[offload])
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        peaks[offload] = torch.cuda.max_memory_allocated() - before
        del weight, optimizer
    slots = 2 * SLOTS * 4 * PIECE
    assert peaks["none"] - peaks["moments"] > 8 * values - slots - 2**22


def test_host_memory_is_unpinned_when_the_optimizer_is_freed() -> None:
    for _ in range(3):
        weight = nn.Parameter(torch.zeros(10_000, device="cuda"))
        optimizer = ExactAdamW([weight], **HYPER, offload=OFFLOADED["moments"])
        optimizer.materialise()
        values = optimizer.state[weight]["exp_avg"].detach()
        assert values.is_pinned()
        del weight, optimizer
        gc.collect()
        assert not values.is_pinned()
