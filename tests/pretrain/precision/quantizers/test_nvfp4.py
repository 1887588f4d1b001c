"""NVFP4 against Transformer Engine's reference and against NumPy with ml_dtypes, bit for bit; and rounding by chance."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from pretrain.precision.quantizers import blocks
from pretrain.precision.quantizers.blocks import BlockQuantized

SameBits = Callable[[Tensor, Tensor], None]
Check = Callable[[Tensor], None]
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture(scope="module")
def values(finite_bf16: Tensor) -> Tensor:
    """Ten million BF16 values [rows, 1024] with every kind of block scale: rows from the tensor's amax down to 2^-40 of it."""
    rows = finite_bf16[:9824].float() * torch.exp2(-torch.arange(9824.0) % 41)[:, None]
    rows[3] = 0
    rows[5, ::2] = -0.0
    rows[7, 100:200] = 0
    rows[11] = 2.0**-130  # subnormal in FP32 and BF16
    rows[13:15] = torch.arange(-1024.0, 1024.0).view(2, 1024) * 0.25  # ties, where the scales are powers of two
    return rows.bfloat16().contiguous()


def in_numpy(blocks: np.ndarray, amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """FP32 blocks [..., values] and their tensor's amax to E2M1 codes and E4M3 scales, both FP32."""
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


@pytest.fixture(scope="module")
def check(assert_same_bits: SameBits) -> Check:
    """That x has the codes and scales that NumPy finds."""

    def check(x: Tensor) -> None:
        quantized = blocks.quantize_nvfp4(x, two_dimensional=False)
        values = x.float().unflatten(-1, (-1, blocks.NVFP4_BLOCK)).numpy()
        codes, scales = in_numpy(values, np.abs(values).max())
        assert_same_bits(quantized.codes, torch.from_numpy(codes).reshape(x.shape))
        assert_same_bits(quantized.block_scale, torch.from_numpy(scales).repeat_interleave(blocks.NVFP4_BLOCK, dim=-1))

    return check


def te_quantize(module: ModuleType, x: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and block scales, FP32, and the amax that the reference finds along the direction asked for."""
    quantizer = module.NVFP4QuantizerRef(dtype=module.reference_utils.Fp4Formats.E2M1, **options)
    result = quantizer.quantize(x)
    if options["rowwise"]:
        packed, scales, amax = result.data, result.scale, result.global_amax_row
    else:
        packed, scales, amax = result.data_t, result.scale_t, result.global_amax_col
    return module.cast_from_fp4x2(packed, torch.float32), scales.float(), amax


@pytest.fixture(scope="module")
def check_reference(assert_same_bits: SameBits) -> Callable[..., None]:
    """That quantized are the codes, scales and amax of the reference."""

    def check(quantized: BlockQuantized, codes: Tensor, scales: Tensor, amax: Tensor) -> None:
        assert_same_bits(quantized.codes, codes)
        assert_same_bits(quantized.block_scale, scales.repeat_interleave(blocks.NVFP4_BLOCK, dim=-1))
        assert_same_bits(quantized.tensor_scale, (amax.double() / 2688).float().squeeze())

    return check


@pytest.mark.parametrize("tile", [(1, 16), (16, 16)], ids=["rows", "squares"])
def test_ten_million_values_have_transformer_engines_codes_and_scales(
    te_reference: Callable[[str], ModuleType], check_reference: Callable[..., None], values: Tensor, tile: tuple[int, int]
) -> None:
    expected = te_quantize(te_reference("reference_nvfp4"), values, rowwise=True, columnwise=False, quant_tile_shape=tile)
    check_reference(blocks.quantize_nvfp4(values, two_dimensional=tile == (16, 16)), *expected)


def test_ten_million_transformed_values_have_transformer_engines_codes_and_scales(
    te_reference: Callable[[str], ModuleType], values: Tensor
) -> None:
    """But for one in a million: in which order a product of BF16 adds up is the machine's."""
    codes, scales, _ = te_quantize(te_reference("reference_nvfp4"), values, rowwise=False, columnwise=True, with_rht=True)
    quantized = blocks.quantize_nvfp4(blocks.hadamard(values.t()), two_dimensional=False)
    assert (quantized.codes != codes).double().mean() < 1e-6
    assert (quantized.block_scale != scales.repeat_interleave(blocks.NVFP4_BLOCK, dim=-1)).double().mean() < 1e-6


@pytest.mark.parametrize("exponent", [-140, -126, -116, 0, 100, 119])
def test_tensors_at_the_ends_of_fp32_agree_with_numpy(check: Check, exponent: int) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).double() * 2.0**exponent
    check(x.float())


def test_square_blocks_of_a_transpose_are_the_transpose(assert_same_bits: SameBits) -> None:
    x = torch.randn(48, 80).bfloat16()
    quantized, turned = (blocks.quantize_nvfp4(x, two_dimensional=True) for x in (x, x.t()))
    assert_same_bits(turned.operand.t(), quantized.operand)


@pytest.mark.parametrize("two_dimensional", [False, True])
def test_zeros_stay_zeros_without_a_nan(assert_same_bits: SameBits, two_dimensional: bool) -> None:
    x = torch.zeros(16, 32)
    x[:, ::2] = -0.0
    for uniform in (None, torch.zeros(16, 32)):
        quantized = blocks.quantize_nvfp4(x, two_dimensional=two_dimensional, uniform=uniform)
        for tensor in (quantized.codes, quantized.operand, quantized.dequantize()):
            assert_same_bits(tensor, torch.zeros(16, 32))


def test_an_infinity_or_a_nan_shows_in_the_tensor_scale() -> None:
    x = torch.randn(16, 32)
    x[3, 3] = -torch.inf
    quantized = blocks.quantize_nvfp4(x, two_dimensional=False)
    assert quantized.tensor_scale == torch.inf
    assert quantized.codes[3, 3] == -6
    assert quantized.codes.isfinite().all()
    x[5, 5] = torch.nan
    assert blocks.quantize_nvfp4(x, two_dimensional=False).tensor_scale.isnan()


@pytest.mark.parametrize("two_dimensional", [False, True])
def test_a_product_can_take_the_operand_in_bf16_without_losing_a_bit(values: Tensor, two_dimensional: bool) -> None:
    quantized = blocks.quantize_nvfp4(values[:1600], two_dimensional=two_dimensional)
    assert torch.equal(quantized.operand, quantized.operand_in(torch.bfloat16).float())
    mantissas = torch.frexp(quantized.operand).mantissa * 2**6
    assert torch.equal(mantissas, mantissas.round()), "more than six significant bits"


def scaled_by_one() -> Tensor:
    """x [64, 64] whose scales are all 1, so that codes are what each value itself is rounded to; but for the first row's."""
    x = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) * 12 - 6
    x[:, ::16] = 6
    x[0, 0] = 6 * 448  # the tensor's amax, which gives its own block the scale 448
    return x


def test_the_mean_over_evenly_spaced_numbers_is_the_value_itself() -> None:
    """Each code is off by less than the numbers' spacing, once, times the distance of its neighbours, 2 at most."""
    x, steps = scaled_by_one(), 512
    numbers = (torch.arange(steps) + 0.5) / steps
    codes = (blocks.quantize_nvfp4(x, two_dimensional=False, uniform=number.expand(x.shape)).codes.double() for number in numbers)
    assert (sum(codes) / steps - x)[1:].abs().max() <= 2 / steps


@given(
    values=npst.array_shapes(min_dims=1, max_dims=3, max_side=3).flatmap(
        lambda shape: npst.arrays(
            np.float32, (*shape[:-1], 16 * shape[-1]), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
        )
    )
)
def test_any_shape_and_any_values_agree_with_numpy(check: Check, values: np.ndarray) -> None:
    x = torch.from_numpy(values)
    if x.any():  # the tensor scale of zeros is a convention, tested above
        check(x)
