"""Rounding equals casts of ml_dtypes, and FP8 per tensor equals Transformer Engine's rules."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pretrain.precision.quantizers import E2M1, E4M3, E5M2, Grid, tensor
from pretrain.precision.quantizers.tensor import round_stochastically, round_to_grid
from tests.pretrain.precision.quantizers.conftest import assert_same_bits

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
    return torch.cat([patterns, all_bf16.float(), *ties, *on_grid, special])


@by_name
def test_rounding_equals_a_cast_of_the_clamped_value(grid: Grid, many_values: Tensor) -> None:
    values = many_values[~many_values.isnan()]
    cast = values.clamp(-grid.maximum, grid.maximum).numpy().astype(NUMPY[grid.name])
    expected = torch.from_numpy(cast.astype(np.float32))
    assert_same_bits(round_to_grid(values, grid), expected)


@by_name
def test_rounding_keeps_nan_and_the_sign_of_zeros(grid: Grid):
    x = torch.tensor([torch.nan, 0.0, -0.0, 1e-40, -1e-40])
    for rounded in (round_to_grid(x, grid), round_stochastically(x, grid, torch.full((5,), 0.5))):
        assert_same_bits(rounded, torch.tensor([torch.nan, 0.0, -0.0, 0.0, -0.0]))


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


# ── Scales of a tensor ──

FP32_MAX = np.finfo(np.float32).max
TORCH = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
by_grid = pytest.mark.parametrize("grid", [E4M3, E5M2], ids=lambda grid: grid.name)
by_power_of_two = pytest.mark.parametrize("power_of_two", [False, True])
AMAX = st.one_of(st.floats(0, width=32), st.sampled_from([0.0, 1e-45, 1e-37, 1.0, math.inf]))


@pytest.fixture(scope="module")
def every_amax() -> Tensor:
    """Every 997th FP32 bit pattern from zero to infinity and NaN, 2.2 million values."""
    patterns = torch.arange(0, 2**31, 997).to(torch.int32).view(torch.float32)
    return torch.cat(
        [patterns, torch.tensor([torch.inf, torch.nan, 448.0, 57344.0, 1.3165537e-36])]
    )


@by_grid
@by_power_of_two
def test_scales_equal_the_rule_in_fp32_arithmetic(
    grid: Grid, power_of_two: bool, every_amax: Tensor
) -> None:
    amax = every_amax.numpy()
    with np.errstate(all="ignore"):
        scale = np.float32(grid.maximum) / amax
    scale[np.isinf(scale)] = FP32_MAX
    if power_of_two:
        scale = np.ldexp(np.float32(1), np.frexp(scale)[1] - 1)
    scale[(amax == 0) | ~np.isfinite(amax)] = 1
    assert_same_bits(
        tensor.scale_from_amax(every_amax, grid.maximum, power_of_two=power_of_two),
        torch.from_numpy(scale),
    )


def test_decode_scales_are_fp32_reciprocals_even_if_subnormal(every_amax: Tensor) -> None:
    scales = every_amax[every_amax > 0]
    with np.errstate(over="ignore"):
        reciprocals = np.float32(1) / scales.numpy()
    assert_same_bits(tensor.decode_scale(scales), torch.from_numpy(reciprocals))
    assert 0 < tensor.decode_scale(torch.tensor(float(FP32_MAX))) < torch.finfo(torch.float32).tiny


@by_grid
@by_power_of_two
def test_current_scaling_equals_transformer_engines_reference(
    grid: Grid,
    power_of_two: bool,
    finite_bf16: Tensor,
    te_reference: Callable,
) -> None:
    """The reference leaves infinities and overflowing scales to the kernels.

    The tested values have neither.
    """
    reference = te_reference("reference_current_scaling").CurrentScalingQuantizerRef(
        TORCH[grid.name], pow_2_scales=power_of_two
    )
    reference_result = reference.quantize(finite_bf16)
    scale = tensor.scale_from_amax(
        tensor.absolute_maximum(finite_bf16), grid.maximum, power_of_two=power_of_two
    )
    quantized = tensor.quantize(finite_bf16, scale, grid)
    assert_same_bits(quantized.codes, reference_result.data.float())
    assert_same_bits(quantized.codes.t(), reference_result.data_t.float())
    assert_same_bits(quantized.tensor_scale.reshape(1), reference_result.scale)


# ── History of delayed scaling ─────────────────────────────────────────────────────────


def one_column(
    history: list[float], scale: float, maximum: float, margin: int, algorithm: str
) -> tuple[list[float], float]:
    """Return history and scale of one tensor after an update by the rule of TE's fused kernel."""
    newest = history[0]
    if newest == 0:
        return history, scale
    if algorithm == "max":
        largest = max((value for value in history if not math.isnan(value)), default=0.0)
    else:
        largest = newest
    if math.isfinite(largest) and largest > 0:
        with np.errstate(over="ignore"):
            scale = min(
                float(np.float32(maximum * 2.0**-margin) / np.float32(largest)), float(FP32_MAX)
            )
    return [0.0, *history[2:], newest][: len(history)], scale


@st.composite
def histories(draw: st.DrawFn, amax: st.SearchStrategy[float] = AMAX) -> Tensor:
    length = draw(st.integers(1, 6))
    columns = draw(st.integers(1, 4))
    return torch.tensor([[draw(amax) for _ in range(columns)] for _ in range(length)])


@settings(deadline=None)
@given(
    histories(AMAX | st.just(math.nan)),
    st.sampled_from([448.0, 57344.0]),
    st.integers(-2, 4),
    st.sampled_from(["max", "most_recent"]),
)
def test_an_update_of_history_and_scale_equals_the_fused_kernel(
    history: Tensor, maximum: float, margin: int, algorithm: str
):
    scale = torch.arange(1, history.shape[1] + 1).float()
    moved, updated = tensor.update_scale(history, scale, maximum, margin, algorithm)
    columns = zip(history.t().tolist(), scale.tolist(), strict=True)
    expected = [one_column(column, old, maximum, margin, algorithm) for column, old in columns]
    torch.testing.assert_close(
        moved.t(), torch.tensor([column for column, _ in expected]), rtol=0, atol=0, equal_nan=True
    )
    assert torch.equal(updated, torch.tensor([new for _, new in expected]))
