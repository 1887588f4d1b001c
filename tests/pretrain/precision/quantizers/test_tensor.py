"""Compare per-tensor FP8 with Transformer Engine's published rules and its reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pretrain.precision.quantizers import E4M3, E5M2, Grid, tensor

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
    grid: Grid, power_of_two: bool, every_amax: Tensor, assert_same_bits: Callable
):
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


def test_decode_scales_are_fp32_reciprocals_even_if_subnormal(
    every_amax: Tensor, assert_same_bits: Callable
):
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
    assert_same_bits: Callable,
):
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
