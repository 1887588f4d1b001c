"""Muon on a GPU: FP32 and exact BF16 weights are equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pretrain.optimizer.exact_weights import master_of, split
from pretrain.optimizer.muon import Hidden, Muon
from tests.gpu.conftest import DEVICE

SHAPES = ((256, 128), (128, 384), (256, 256), (256, 128))


def trained_by_muon(dtype: torch.dtype, moments: torch.dtype) -> list[Tensor]:
    """Return the masters after some steps. The gradients depend on the BF16 weights."""
    params = drawn(dtype)
    group = {"params": params, "momentum": 0.95, "lr_ratio": 1.0, "adjust_lr_fn": "original"}
    updated_by_adamw = nn.Parameter(torch.zeros(1, device=DEVICE))
    updated_by_adamw.grad = torch.ones(1, device=DEVICE)
    hidden = [Hidden(parameter, inputs=1) for parameter in params]
    options = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = Muon([{"params": [updated_by_adamw]}, group], hidden, moments=moments, **options)
    for step in range(20):
        set_gradients(params, step)
        optimizer.step(clip_coefficient=torch.tensor(0.5, device=DEVICE))
    return [master_of(p.detach(), optimizer.state[p].get("remainder")) for p in params]


def drawn(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(DEVICE, dtype))
        for shape in SHAPES
    ]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in params:
        weight = parameter.detach()
        if weight.dtype == torch.float32:
            weight, _ = split(weight)
        noise = torch.randn(weight.shape, generator=generator).bfloat16().to(DEVICE)
        parameter.grad = (weight.sin() + noise).to(parameter.dtype)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_exact_bf16_weights_have_the_bits_of_fp32(moments: torch.dtype) -> None:
    fp32 = trained_by_muon(torch.float32, moments)
    exact = trained_by_muon(torch.bfloat16, moments)
    assert all(map(torch.equal, exact, fp32))
