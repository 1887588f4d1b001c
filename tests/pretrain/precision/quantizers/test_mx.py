"""MXFP8 and MXFP4 equal NumPy with ml_dtypes bit for bit."""

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


@pytest.fixture(scope="module")
def check(assert_same_bits: SameBits) -> Check:
    """Return a function that compares codes, scales and bytes of scales of x with NumPy's."""

    def check(x: Tensor, grid: Grid) -> None:
        quantized = blocks.quantize_mx(x, grid)
        codes, scales = in_numpy(blocks_of(x.float()).numpy(), grid)
        assert_same_bits(blocks_of(quantized.codes), torch.from_numpy(codes))
        decoded = torch.from_numpy(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
        assert_same_bits(blocks_of(quantized.block_scale), decoded.expand(codes.shape))
        # the bytes in memory
        in_bytes = blocks_of(quantized.block_scale)[..., :1].view(torch.int32) >> 23
        assert np.array_equal(in_bytes.numpy(), scales)

    return check


@pytest.mark.parametrize("grid", [E4M3, E5M2, E2M1], ids=lambda grid: grid.name)
def test_two_million_values_agree_with_numpy(check: Check, finite_bf16: Tensor, grid: Grid) -> None:
    check(finite_bf16, grid)


def test_amaxes_next_to_a_change_of_the_scale_agree_with_numpy(check: Check) -> None:
    """Blocks [n, 32] with an amax of 448 * 2^k and its neighbours, for all k and subnormals."""
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


def test_infinities_saturate_and_nan_does_not_spread(check: Check) -> None:
    x = torch.randn(4, 64)
    x[0, 3], x[1, 40], x[2, 5], x[3] = torch.inf, -torch.inf, torch.nan, torch.nan
    check(x, E4M3)
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
def test_any_shape_and_any_values_agree_with_numpy(
    check: Check, values: np.ndarray, grid: Grid
) -> None:
    check(torch.from_numpy(values), grid)
