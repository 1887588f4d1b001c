"""Rounding to a grid equals casts of ml_dtypes on millions of bit patterns."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.precision.quantizers import E2M1, E4M3, E5M2, Grid
from pretrain.precision.quantizers.tensor import round_stochastically, round_to_grid

GRIDS = [E4M3, E5M2, E2M1]
NUMPY = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E2M1": ml_dtypes.float4_e2m1fn,
}
by_name = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)


def values_of(grid: Grid) -> Tensor:
    """Return all finite FP32 values of the format in ascending order, without -0.0.

    They are read from ml_dtypes.
    """
    bits = 4 if grid.name == "E2M1" else 8
    values = np.arange(2**bits, dtype=np.uint8).view(NUMPY[grid.name]).astype(np.float32)
    return torch.from_numpy(np.unique(values[np.isfinite(values)] + 0.0))


def with_neighbours(values: Tensor) -> Tensor:
    bits = values.view(torch.int32)
    return torch.cat([(bits + step).view(torch.float32) for step in (-1, 0, 1)])


@pytest.fixture(scope="module")
def many_values(all_bf16: Tensor) -> Tensor:
    """Return 2.2 million values with all ties of all grids.

    Every 1999th FP32 bit pattern, all BF16 values, and all grid values and ties with both
    neighbours.
    """
    patterns = torch.arange(-(2**31), 2**31, 1999).to(torch.int32).view(torch.float32)
    ties = [with_neighbours((values_of(grid)[1:] + values_of(grid)[:-1]) / 2) for grid in GRIDS]
    on_grid = [with_neighbours(values_of(grid)) for grid in GRIDS]
    special = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 464.0, -464.0, 61440.0, 5.0, 7.0]
    )
    values = torch.cat([patterns, all_bf16.float(), *ties, *on_grid, special])
    return values


@by_name
def test_rounding_equals_a_cast_of_the_clamped_value(
    grid: Grid, many_values: Tensor, assert_same_bits: Callable
):
    values = many_values[~many_values.isnan()]
    cast = (
        values.clamp(-grid.maximum, grid.maximum)
        .numpy()
        .astype(NUMPY[grid.name])
        .astype(np.float32)
    )
    assert_same_bits(round_to_grid(values, grid), torch.from_numpy(cast))


@by_name
def test_rounding_keeps_nan_and_the_sign_of_zeros(grid: Grid):
    x = torch.tensor([torch.nan, 0.0, -0.0, 1e-40, -1e-40])
    for rounded in (round_to_grid(x, grid), round_stochastically(x, grid, torch.full((5,), 0.5))):
        assert rounded[0].isnan()
        assert rounded[1:].tolist() == [0, 0, 0, 0] and rounded[1:].signbit().tolist() == [
            False,
            True,
            False,
            True,
        ]


@by_name
def test_stochastic_rounding_rounds_up_in_proportion_to_the_distance(grid: Grid):
    """All 16 equally spaced random numbers are tried on 16 points between all neighbours.

    The frequencies are therefore exact.
    """
    values = values_of(grid)
    lower, upper = values[:-1, None, None], values[1:, None, None]
    sixteenths = torch.arange(16)[None, :, None]
    x = (lower + (upper - lower) * sixteenths / 16).expand(-1, -1, 16)
    uniform = (torch.arange(16) / 16).expand_as(x)
    rounded = round_stochastically(x.contiguous(), grid, uniform)
    assert ((rounded == lower) | (rounded == upper)).all()
    went_up = (rounded == upper).sum(dim=2, keepdim=True)
    assert torch.equal(went_up, sixteenths.expand_as(went_up))
