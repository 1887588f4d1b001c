"""Mean and deviation of each layer's gradient against numpy over all of its values."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from pretrain.metrics.recorder import gradient_statistics


def small_model() -> nn.Module:
    model = nn.Module()
    model.embed = nn.Embedding(7, 4)
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)) for _ in range(12))
    model.norm = nn.LayerNorm(4)
    generator = torch.Generator().manual_seed(3)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (-number % 5) + 0.01
    return model


def ranks_that_hold(same: int) -> SimpleNamespace:
    """In place of so many processes whose values are this one's."""
    return SimpleNamespace(reduce=lambda table, reduction: table * same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("same", [1, 4])
def test_they_are_those_of_all_values_together(dtype: torch.dtype, same: int) -> None:
    model = small_model().to(dtype)
    for parameter in model.parameters():
        parameter.grad = parameter.grad.to(dtype)
    layers = [f"layers.{number}" for number in range(12)]
    found = gradient_statistics(model, layers, ranks_that_hold(same))
    for layer in [*layers, "embed", "norm"]:
        values = np.concatenate([p.grad.double().numpy().ravel() for p in model.get_submodule(layer).parameters()])
        assert found[f"grad_mean/{layer}"] == pytest.approx(values.mean(), rel=1e-5, abs=1e-7 * np.abs(values).max())
        assert found[f"grad_std/{layer}"] == pytest.approx(values.std(), rel=1e-5)
    assert len(found) == 2 * 14


def test_shards_of_a_gradient_count_as_the_whole_one() -> None:
    """Each rank has a part of a parameter and says how many values that are; the others' sums come with the exchange."""
    model = nn.Linear(6, 8, bias=False)
    model.weight.grad = torch.arange(48.0).view(8, 6)
    rest = torch.arange(48.0, 96.0)
    theirs = torch.tensor([[rest.sum(), rest.square().sum(), 48.0]], dtype=torch.float64)
    found = gradient_statistics(model, [], SimpleNamespace(reduce=lambda table, reduction: table + theirs))
    whole = np.arange(96.0)
    assert found == {"grad_mean/": pytest.approx(whole.mean()), "grad_std/": pytest.approx(whole.std())}
