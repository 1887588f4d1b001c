"""MXFP8 and MXFP4 against NumPy with ml_dtypes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from pretrain.precision.quantizers import E2M1, E4M3, E5M2, Grid, blocks
from tests.pretrain.precision.quantizers.test_rounding import NUMPY

SameBits = Callable[[Tensor, Tensor], None]
Check = Callable[[Tensor, Grid], None]


def in_numpy(blocks: np.ndarray, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """FP32 blocks [..., values] to their codes, FP32, and E8M0 scales [..., 1], by exponents and ml_dtypes' own conversions."""
    amax = np.fmax.reduce(np.abs(blocks), axis=-1, initial=0, keepdims=True)
    of_what = amax * (np.float32(1) / np.float32(grid.maximum))
    mantissa, exponent = np.frexp(of_what)  # mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5)
    exponent[of_what == 0] = -127
    exponent[np.isinf(amax)] = 127
    exponent = exponent.clip(-127, 127)
    scaled = np.ldexp(blocks, -exponent).clip(-grid.maximum, grid.maximum)
    return scaled.astype(NUMPY[grid.name]).astype(np.float32), (exponent + 127).astype(np.uint8)


def blocks_of(tensor: Tensor) -> Tensor:
    return tensor.unflatten(-1, (-1, blocks.MX_BLOCK))


@pytest.fixture(scope="module")
def check(assert_same_bits: SameBits) -> Check:
    """That x has the codes, scales and bytes of scales that NumPy finds."""

    def check(x: Tensor, grid: Grid) -> None:
        quantized = blocks.quantize_mx(x, grid)
        codes, scales = in_numpy(blocks_of(x.float()).numpy(), grid)
        assert_same_bits(blocks_of(quantized.codes), torch.from_numpy(codes))
        decoded = torch.from_numpy(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
        assert_same_bits(blocks_of(quantized.block_scale), decoded.expand(codes.shape))
        # as they lie in memory
        in_bytes = blocks_of(quantized.block_scale)[..., :1].view(torch.int32) >> 23
        assert np.array_equal(in_bytes.numpy(), scales)

    return check


@pytest.mark.parametrize("grid", [E4M3, E5M2, E2M1], ids=lambda grid: grid.name)
def test_two_million_values_have_the_codes_and_scales_that_numpy_finds(
    check: Check, finite_bf16: Tensor, grid: Grid
) -> None:
    check(finite_bf16, grid)


def test_fp32_values_a_bit_from_where_the_scale_changes_have_numpys_scales(check: Check) -> None:
    """Blocks [n, 32] whose amax is 448 * 2^k, one ulp more or less; over all k, subnormals too."""
    exact = torch.tensor(
        [448.0 * 2.0**k for k in range(-150, 119) if 448.0 * 2.0**k < 3e38], dtype=torch.float64
    ).float()
    amax = torch.cat(
        [
            exact,
            torch.nextafter(exact, torch.tensor(torch.inf)),
            torch.nextafter(exact, torch.tensor(0.0)),
        ]
    )
    check(amax[:, None] * torch.linspace(-1, 1, blocks.MX_BLOCK), E4M3)


def test_infinities_saturate_and_a_nan_leaves_its_neighbours_alone(check: Check) -> None:
    x = torch.randn(4, 64)
    x[0, 3], x[1, 40], x[2, 5], x[3] = torch.inf, -torch.inf, torch.nan, torch.nan
    check(x, E4M3)
    quantized = blocks.quantize_mx(x, E4M3)
    assert quantized.codes[0, 3] == 448
    assert quantized.operand[0, 3] == torch.inf
    assert quantized.operand.isnan().sum() == x.isnan().sum()


@pytest.mark.parametrize("grid", [E4M3, E5M2, E2M1], ids=lambda grid: grid.name)
def test_a_product_can_take_the_operand_in_bf16_without_losing_a_bit(
    finite_bf16: Tensor, grid: Grid
) -> None:
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
def test_any_shape_and_any_values_agree_with_numpy(
    check: Check, values: np.ndarray, grid: Grid
) -> None:
    check(torch.from_numpy(values), grid)
