"""Blocks in MXFP8, MXFP4, NVFP4 and FP8 equal NumPy with ml_dtypes bit for bit.

NVFP4 and its Hadamard transform also equal Transformer Engine's reference. The loop over FP8 blocks
follows the rule of Transformer Engine's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from pretrain.precision.quantizers import E2M1, E4M3, E5M2, Grid, blocks
from tests.pretrain.precision.quantizers.conftest import assert_same_bits
from tests.pretrain.precision.quantizers.test_tensor import NUMPY

# ── MXFP8 and MXFP4 ──


def mx_in_numpy(blocks: np.ndarray, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Return FP32 codes and E8M0 scales [..., 1] of FP32 blocks [..., values], by exponents."""
    amax = np.fmax.reduce(np.abs(blocks), axis=-1, initial=0, keepdims=True)
    ratio = amax * (np.float32(1) / np.float32(grid.maximum))
    mantissa, exponent = np.frexp(ratio)  # mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5)
    exponent[ratio == 0] = -127
    exponent[np.isinf(amax)] = 127
    exponent = exponent.clip(-127, 127)
    scaled = np.ldexp(blocks, -exponent).clip(-grid.maximum, grid.maximum)
    return scaled.astype(NUMPY[grid.name]).astype(np.float32), (exponent + 127).astype(np.uint8)


def blocks_of(tensor: Tensor) -> Tensor:
    return tensor.unflatten(-1, (-1, blocks.MX_BLOCK))


def check_mx(x: Tensor, grid: Grid) -> None:
    """Compare codes, scales and bytes of scales of x with NumPy's."""
    quantized = blocks.quantize_mx(x, grid)
    codes, scales = mx_in_numpy(blocks_of(x.float()).numpy(), grid)
    assert_same_bits(blocks_of(quantized.codes), torch.from_numpy(codes))
    decoded = torch.from_numpy(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert_same_bits(blocks_of(quantized.block_scale), decoded.expand(codes.shape))
    # the bytes in memory
    in_bytes = blocks_of(quantized.block_scale)[..., :1].view(torch.int32) >> 23
    assert np.array_equal(in_bytes.numpy(), scales)


@pytest.mark.parametrize("grid", [E4M3, E5M2, E2M1], ids=lambda grid: grid.name)
def test_two_million_values_of_mx_agree_with_numpy(finite_bf16: Tensor, grid: Grid) -> None:
    check_mx(finite_bf16, grid)


def test_amaxes_next_to_a_change_of_the_scale_agree_with_numpy() -> None:
    """Blocks [n, 32] with an amax of 448 * 2^k and its neighbours, for all k and subnormals."""
    exact = (448 * torch.exp2(torch.arange(-150.0, 119.0).double())).float()
    exact = exact[exact < 3e38]
    neighbours = (torch.nextafter(exact, torch.tensor(towards)) for towards in (torch.inf, 0.0))
    amax = torch.cat([exact, *neighbours])
    check_mx(amax[:, None] * torch.linspace(-1, 1, blocks.MX_BLOCK), E4M3)


def test_infinities_saturate_and_nan_does_not_spread() -> None:
    x = torch.randn(4, 64)
    x[0, 3], x[1, 40], x[2, 5], x[3] = torch.inf, -torch.inf, torch.nan, torch.nan
    check_mx(x, E4M3)
    quantized = blocks.quantize_mx(x, E4M3)
    assert quantized.codes[0, 3] == 448
    assert quantized.operand[0, 3] == torch.inf
    assert quantized.operand.isnan().sum() == x.isnan().sum()


@pytest.mark.parametrize("grid", [E4M3, E5M2, E2M1], ids=lambda grid: grid.name)
def test_mx_operands_are_exact_in_bf16(finite_bf16: Tensor, grid: Grid) -> None:
    quantized = blocks.quantize_mx(finite_bf16, grid)
    operand = blocks_of(quantized.operand)
    amax = blocks_of(finite_bf16.float().abs()).amax(dim=-1)
    ordinary = operand[(amax == 0) | ((amax > 2.0**-100) & (amax < 2.0**127))]
    assert ordinary.numel() > 1_900_000
    assert torch.equal(ordinary, ordinary.bfloat16().float())
    assert torch.equal(blocks_of(quantized.operand_in(torch.bfloat16)), operand.bfloat16())


@given(
    values=npst.array_shapes(min_dims=1, max_dims=3, max_side=3).flatmap(
        lambda shape: npst.arrays(
            np.float32, (*shape[:-1], 32 * shape[-1]), elements=st.floats(width=32, allow_nan=False)
        )
    ),
    grid=st.sampled_from([E4M3, E5M2, E2M1]),
)
def test_any_shape_and_any_values_of_mx_agree_with_numpy(values: np.ndarray, grid: Grid) -> None:
    check_mx(torch.from_numpy(values), grid)


# ── NVFP4 ──


@pytest.fixture(scope="module")
def values(finite_bf16: Tensor) -> Tensor:
    """Half a million BF16 values [rows, 1024] with all kinds of block scales.

    Rows range from the tensor's amax down to 2^-40 of it.
    """
    rows = finite_bf16[1520:2016].float() * torch.exp2(-torch.arange(496.0) % 41)[:, None]
    rows[3] = 0
    rows[5, ::2] = -0.0
    rows[7, 100:200] = 0
    rows[11] = 2.0**-130  # subnormal in FP32 and BF16
    # ties, if the scales are powers of two
    rows[13:15] = torch.arange(-1024.0, 1024.0).view(2, 1024) * 0.25
    return rows.bfloat16().contiguous()


def nvfp4_in_numpy(blocks: np.ndarray, amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return FP32 codes (E2M1) and scales (E4M3) of FP32 blocks [..., values].

    `amax` is the largest absolute value of the tensor.
    """
    one, six, largest = np.float32(1), np.float32(6), np.finfo(np.float32).max
    with np.errstate(divide="ignore", over="ignore"):
        encode = np.minimum(np.float32(2688) / np.float32(amax), largest)
        encode = one if encode == 0 else encode
        scale = np.minimum(np.abs(blocks).max(axis=-1) * (encode * (one / six)), np.float32(448))
        scale = scale.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        factor = np.minimum(one / (scale * (one / encode)), largest)
        scaled = np.clip(blocks * factor[..., None], -six, six)
    scaled[scaled == 0] = 0  # no -0.0
    return scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float32), scale


def repeated(scales: Tensor) -> Tensor:
    return scales.float().repeat_interleave(blocks.NVFP4_BLOCK, dim=-1)


def test_the_hadamard_transform_equals_transformer_engines(
    te_reference: Callable[[str], ModuleType], finite_bf16: Tensor
) -> None:
    module = te_reference("reference_nvfp4")
    reference = module.NVFP4QuantizerRef(dtype=None, with_rht=True)
    x = finite_bf16[: finite_bf16.shape[0] // 16 * 16]
    for values in (x, x.t()):
        expected = reference._apply_rht(values.contiguous())
        assert_same_bits(blocks.hadamard(values).float(), expected.float())


@pytest.mark.parametrize("tile", [(1, 16), (16, 16)], ids=["rows", "squares"])
def test_codes_and_scales_equal_transformer_engines(
    te_reference: Callable[[str], ModuleType], values: Tensor, tile: tuple[int, int]
) -> None:
    module = te_reference("reference_nvfp4")
    reference = module.NVFP4QuantizerRef(
        dtype=module.reference_utils.Fp4Formats.E2M1,
        rowwise=True,
        columnwise=False,
        quant_tile_shape=tile,
    ).quantize(values)
    for x in (values, values.t().contiguous().t()):
        quantized = blocks.quantize_nvfp4(x, two_dimensional=tile == (16, 16))
        assert_same_bits(quantized.codes, module.cast_from_fp4x2(reference.data, torch.float32))
        assert_same_bits(quantized.block_scale, repeated(reference.scale))
        amax = reference.global_amax_row.double().view(quantized.tensor_scale.shape)
        assert_same_bits(quantized.tensor_scale, (amax / (6 * 448)).float())
        values_of = quantized.codes * quantized.block_scale * quantized.tensor_scale
        assert_same_bits(quantized.dequantize(), values_of)


@pytest.mark.parametrize("two_dimensional", [False, True])
def test_zeros_stay_zeros_without_a_nan(two_dimensional: bool) -> None:
    x = torch.zeros(16, 32)
    x[:, ::2] = -0.0
    for uniform in (None, torch.zeros(16, 32)):
        quantized = blocks.quantize_nvfp4(x, two_dimensional=two_dimensional, uniform=uniform)
        for tensor in (quantized.codes, quantized.operand, quantized.dequantize()):
            assert_same_bits(tensor, torch.zeros(16, 32))


def test_infinity_and_nan_show_in_the_tensor_scale() -> None:
    x = torch.randn(16, 32)
    x[3, 3] = -torch.inf
    quantized = blocks.quantize_nvfp4(x, two_dimensional=False)
    assert quantized.tensor_scale == torch.inf
    assert quantized.codes[3, 3] == -6
    assert quantized.codes.isfinite().all()
    x[5, 5] = torch.nan
    assert blocks.quantize_nvfp4(x, two_dimensional=False).tensor_scale.isnan()


@pytest.mark.parametrize("two_dimensional", [False, True])
def test_nvfp4_operands_are_exact_in_bf16(values: Tensor, two_dimensional: bool) -> None:
    quantized = blocks.quantize_nvfp4(values[:1600], two_dimensional=two_dimensional)
    assert torch.equal(quantized.operand, quantized.operand_in(torch.bfloat16).float())
    mantissas = torch.frexp(quantized.operand).mantissa * 2**6
    assert torch.equal(mantissas, mantissas.round()), "more than six significant bits"


@given(
    values=npst.array_shapes(min_dims=1, max_dims=3, max_side=3).flatmap(
        lambda shape: npst.arrays(
            np.float32,
            (*shape[:-1], 16 * shape[-1]),
            elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
        )
    )
)
def test_any_shape_and_any_values_of_nvfp4_agree_with_numpy(values: np.ndarray) -> None:
    x = torch.from_numpy(values)
    if x.any():  # the tensor scale of zeros is a convention, tested above
        quantized = blocks.quantize_nvfp4(x, two_dimensional=False)
        in_blocks = values.reshape(*values.shape[:-1], -1, blocks.NVFP4_BLOCK)
        codes, scales = nvfp4_in_numpy(in_blocks, np.abs(values).max())
        assert_same_bits(quantized.codes, torch.from_numpy(codes).reshape(x.shape))
        assert_same_bits(quantized.block_scale, repeated(torch.from_numpy(scales)))


# ── FP8 ──

by_layout = pytest.mark.parametrize("two_dimensional", [False, True], ids=["rows", "squares"])


def check_slice_by_slice(x: Tensor, grid: Grid, *, two_dimensional: bool) -> None:
    """Compare codes and decode scales of x with a loop over its blocks."""
    values = x.float().numpy()
    scaled = np.empty_like(values)
    decode = np.empty_like(values)
    height = 128 if two_dimensional else 1
    with np.errstate(all="ignore"):
        for row in range(0, values.shape[0], height):
            for column in range(0, values.shape[1], 128):
                region = np.s_[row : row + height, column : column + 128]
                scale = fp8_scale(values[region], grid.maximum, torch.finfo(x.dtype).max)
                scale = np.float32(2.0 ** (math.frexp(scale)[1] - 1))
                scaled[region] = values[region] * scale
                decode[region] = np.float32(1) / scale
    codes = np.clip(scaled, -grid.maximum, grid.maximum).astype(NUMPY[grid.name]).astype(np.float32)
    quantized = blocks.quantize_fp8(x, grid, two_dimensional=two_dimensional)
    assert_same_bits(quantized.codes, torch.from_numpy(codes))
    assert_same_bits(quantized.block_scale.expand(codes.shape), torch.from_numpy(decode))
    assert quantized.tensor_scale == 1


def fp8_scale(values: np.ndarray, maximum: float, overflow: float) -> np.float32:
    amax = np.float32(np.fmax.reduce(np.abs(values), axis=None, initial=0))  # fmax ignores NaN
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1)
    scale = np.float32(maximum) / amax
    return np.float32(overflow) if np.isinf(scale) else scale


@pytest.fixture(scope="module")
def values_of_blocks(finite_bf16: Tensor, all_bf16: Tensor) -> Tensor:
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
    two_dimensional: bool, values_of_blocks: Tensor
) -> None:
    check_slice_by_slice(values_of_blocks, E4M3, two_dimensional=two_dimensional)


@settings(max_examples=60)
@given(
    shape=st.tuples(*[st.sampled_from([128, 256, 384])] * 2),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    grid=st.sampled_from([E4M3, E5M2]),
    transposed=st.booleans(),
    two_dimensional=st.booleans(),
)
def test_any_shape_dtype_and_stride_equals_the_loop_over_slices(
    shape, seed, dtype, grid, transposed, two_dimensional
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(
        8 * torch.randn(shape[0], 1, generator=generator)
    )
    x = (x.t() if transposed else x).to(dtype)
    check_slice_by_slice(x, grid, two_dimensional=two_dimensional)
