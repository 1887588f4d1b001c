"""Compare block-wise FP8 with a loop over blocks in NumPy and ml_dtypes.

The loop follows the rule of Transformer Engine's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pretrain.precision.quantizers import E4M3, E5M2, Grid, Quantized, blocks
from tests.pretrain.precision.quantizers.test_rounding import NUMPY

by_layout = pytest.mark.parametrize("two_dimensional", [False, True], ids=["rows", "squares"])


def slice_by_slice(x: Tensor, grid: Grid, *, two_dimensional: bool) -> tuple[Tensor, Tensor]:
    """Return codes and decode scales, FP32 of x's shape."""
    values = x.float().numpy()
    scaled = np.empty_like(values)
    decode = np.empty_like(values)
    height = 128 if two_dimensional else 1
    with np.errstate(all="ignore"):
        for row in range(0, values.shape[0], height):
            for column in range(0, values.shape[1], 128):
                region = np.s_[row : row + height, column : column + 128]
                scale = scale_of(values[region], grid.maximum, torch.finfo(x.dtype).max)
                scale = np.float32(2.0 ** (math.frexp(scale)[1] - 1))
                scaled[region] = values[region] * scale
                decode[region] = np.float32(1) / scale
    codes = np.clip(scaled, -grid.maximum, grid.maximum).astype(NUMPY[grid.name]).astype(np.float32)
    return torch.from_numpy(codes), torch.from_numpy(decode)


def scale_of(values: np.ndarray, maximum: float, overflow: float) -> np.float32:
    amax = np.float32(np.fmax.reduce(np.abs(values), axis=None, initial=0))  # fmax ignores NaN
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1)
    scale = np.float32(maximum) / amax
    return np.float32(overflow) if np.isinf(scale) else scale


def assert_slice_by_slice(
    quantized: Quantized, x: Tensor, assert_same_bits: Callable, **options: bool
) -> None:
    codes, decode = slice_by_slice(x, quantized.grid, **options)
    assert_same_bits(quantized.codes, codes)
    assert_same_bits(quantized.block_scale.expand_as(codes), decode)
    assert quantized.tensor_scale == 1


@pytest.fixture(scope="module")
def many_values(finite_bf16: Tensor, all_bf16: Tensor) -> Tensor:
    """Two million BF16 values with all finite ones, and rows and squares of other kinds."""
    x = torch.cat([all_bf16.view(64, 1024), finite_bf16])
    x = torch.cat([x, x[: -len(x) % 128]])
    x[64 : 64 + 128, :128] = 0
    x[200, :128] = -0.0
    x[300, 5], x[301, 6], x[302, 7] = torch.nan, torch.inf, -torch.inf
    x[310, :128] = torch.nan
    x[512:640, 256:384] = 1e-39  # The scale of this block overflows.
    x[640:768, 256:384] *= 2.0**-110
    return x


@by_layout
def test_two_million_values_equal_the_loop_over_slices(
    two_dimensional: bool, many_values: Tensor, assert_same_bits: Callable
):
    options = {"two_dimensional": two_dimensional}
    assert_slice_by_slice(
        blocks.quantize_fp8(many_values, E4M3, **options), many_values, assert_same_bits, **options
    )


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(*[st.sampled_from([128, 256, 384])] * 2),
    st.integers(0, 2**16),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.sampled_from([E4M3, E5M2]),
    st.booleans(),
    st.booleans(),
)
def test_any_shape_dtype_and_stride_equals_the_loop_over_slices(
    assert_same_bits: Callable,
    shape: tuple[int, int],
    seed: int,
    dtype: torch.dtype,
    grid: Grid,
    transposed: bool,
    two_dimensional: bool,
):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(
        8 * torch.randn(shape[0], 1, generator=generator)
    )
    x = (x.t() if transposed else x).to(dtype)
    options = {"two_dimensional": two_dimensional}
    assert_slice_by_slice(blocks.quantize_fp8(x, grid, **options), x, assert_same_bits, **options)


@by_layout
def test_a_block_equals_transformer_engines_reference_of_current_scaling(
    two_dimensional: bool,
    finite_bf16: Tensor,
    te_reference: Callable,
    assert_same_bits: Callable,
):
    """Transformer Engine has no Python reference of block scaling.

    Its reference of current scaling quantizes each block as a tensor of its own.
    """
    reference = te_reference("reference_current_scaling").CurrentScalingQuantizerRef(
        torch.float8_e4m3fn, pow_2_scales=True
    )
    x = finite_bf16[-256:]
    height = 128 if two_dimensional else 1
    quantized = blocks.quantize_fp8(x, E4M3, two_dimensional=two_dimensional)
    for row in range(0, 256, height):
        for column in range(0, 1024, 128):
            region = np.s_[row : row + height, column : column + 128]
            expected = reference.quantize(x[region].contiguous())
            # The reference leaves scales that overflow to the kernels.
            assert_same_bits(quantized.codes[region], expected.data.float())
            assert_same_bits(quantized.block_scale[region][0, :1], expected.scale)
