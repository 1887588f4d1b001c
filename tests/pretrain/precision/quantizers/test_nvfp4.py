"""NVFP4 and its Hadamard transform equal Transformer Engine's reference and NumPy bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from pretrain.precision.quantizers import blocks

SameBits = Callable[[Tensor, Tensor], None]
Check = Callable[[Tensor], None]


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


def in_numpy(blocks: np.ndarray, amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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


@pytest.fixture(scope="module")
def check(assert_same_bits: SameBits) -> Check:
    """Return a function that compares the codes and scales of x with NumPy's."""

    def check(x: Tensor) -> None:
        quantized = blocks.quantize_nvfp4(x, two_dimensional=False)
        values = x.float().unflatten(-1, (-1, blocks.NVFP4_BLOCK)).numpy()
        codes, scales = in_numpy(values, np.abs(values).max())
        assert_same_bits(quantized.codes, torch.from_numpy(codes).reshape(x.shape))
        assert_same_bits(
            quantized.block_scale,
            torch.from_numpy(scales).repeat_interleave(blocks.NVFP4_BLOCK, dim=-1),
        )

    return check


def test_the_hadamard_transform_equals_transformer_engines(
    te_reference: Callable[[str], ModuleType], finite_bf16: Tensor
) -> None:
    module = te_reference("reference_nvfp4")
    reference = module.NVFP4QuantizerRef(dtype=None, with_rht=True)
    x = finite_bf16[: finite_bf16.shape[0] // 16 * 16]
    assert torch.equal(
        blocks.hadamard(x).view(torch.int16), reference._apply_rht(x).view(torch.int16)
    )
    transposed = reference._apply_rht(x.t().contiguous())
    assert torch.equal(
        blocks.hadamard(x.t()).contiguous().view(torch.int16), transposed.view(torch.int16)
    )


@pytest.mark.parametrize("tile", [(1, 16), (16, 16)], ids=["rows", "squares"])
def test_codes_and_scales_equal_transformer_engines(
    te_reference: Callable[[str], ModuleType],
    assert_same_bits: SameBits,
    values: Tensor,
    tile: tuple[int, int],
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
        scales = reference.scale.float().repeat_interleave(blocks.NVFP4_BLOCK, dim=-1)
        assert_same_bits(quantized.block_scale, scales)
        amax = reference.global_amax_row.double().view(quantized.tensor_scale.shape)
        assert_same_bits(quantized.tensor_scale, (amax / (6 * 448)).float())
        values_of = quantized.codes * quantized.block_scale * quantized.tensor_scale
        assert_same_bits(quantized.dequantize(), values_of)


@pytest.mark.parametrize("two_dimensional", [False, True])
def test_zeros_stay_zeros_without_a_nan(assert_same_bits: SameBits, two_dimensional: bool) -> None:
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
def test_any_shape_and_any_values_agree_with_numpy(check: Check, values: np.ndarray) -> None:
    x = torch.from_numpy(values)
    if x.any():  # the tensor scale of zeros is a convention, tested above
        check(x)
