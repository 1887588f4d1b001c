"""AdamW, the gradient norm, clipping, and the state that checkpoints hold."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pretrain.optimizer.adamw import (
    build_optimizer,
    clip_coefficient,
    gradient_norm,
)
from pretrain.settings.recipe import OptimizerSettings


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)).to(dtype)


def draw_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_updates_are_those_of_the_published_algorithm() -> None:
    settings = OptimizerSettings(learning_rate=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    model = small_model()
    weights = [p.detach().double() for p in model.parameters()]
    first, second = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    optimizer = build_optimizer(model, settings, exact=False)
    for step in range(1, 6):
        draw_gradients(model, step)
        # Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2, in double precision.
        for w, m, v, p in zip(weights, first, second, model.parameters(), strict=True):
            g = p.grad.double()
            if p.dim() >= 2:
                w.mul_(1 - 0.01 * 0.3)
            m.mul_(0.8).add_(0.2 * g)
            v.mul_(0.9).add_(0.1 * g * g)
            w.sub_(0.01 * (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-6))
        optimizer.step()
    for w, p in zip(weights, model.parameters(), strict=True):
        torch.testing.assert_close(p.detach().double(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_norm_is_summed_in_fp32_and_the_coefficient_brings_it_to_the_limit(dtype: torch.dtype) -> None:
    model = small_model(dtype)
    draw_gradients(model, 1)
    exact = math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in model.parameters()))
    norm = gradient_norm(model.parameters())
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact, rel=1e-6)

    assert clip_coefficient(norm, None) is None
    assert clip_coefficient(norm, limit=2 * exact) == 1
    assert norm.item() * clip_coefficient(norm, limit=exact / 4).item() == pytest.approx(exact / 4, rel=1e-5)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("moments", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), (None, None)],
    ids=["fp32", "bf16", "by the weights"],
)
def test_moments_have_the_dtype_that_the_recipe_names(moments: str | None, dtype: torch.dtype | None, exact: bool) -> None:
    layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    adamw = build_optimizer(layer, OptimizerSettings(moments=moments), exact=exact)
    adamw.materialise()
    expected = dtype or (torch.float32 if exact else torch.bfloat16)
    assert {adamw.state[layer.weight][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {expected}
