"""The encoding of FP32 masters as BF16 weights and remainders is exact for every bit pattern."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pretrain.optimizer.exact_weights import join, split

NANS = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFF8000, 0xFFFFFFFF]


def floats(patterns: list[int] | Tensor) -> Tensor:
    """Return the FP32 numbers with these bits."""
    bits = torch.as_tensor(patterns, dtype=torch.int64)
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


@given(
    st.lists(
        st.integers(0, 2**32 - 1) | st.sampled_from([0x7F800000, 0xFF800000]),
        min_size=1,
        max_size=50,
    )
)
def test_join_restores_every_master_except_nan(patterns: list[int]) -> None:
    master = floats(patterns)
    master = master[~master.isnan()]
    weight, remainder = split(master)
    assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert same_bits(join(weight, remainder), master)


@pytest.mark.parametrize("sign", [0, 0x8000])
def test_weights_are_hardware_roundings_except_on_ties(sign: int) -> None:
    """Tested with all 65,536 low halves of eight high halves."""
    highs = sign | torch.tensor([0x0, 0x1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F])
    bits = (highs[:, None] * 65536 + torch.arange(65536)).flatten()
    master = floats(bits)
    tie = bits % 65536 == 0x8000
    weight, remainder = split(master)
    assert same_bits(weight[~tie], master.bfloat16()[~tie])
    assert (weight[tie].float().abs() > master[tie].abs()).all(), "ties are rounded away from zero"
    assert not remainder[bits % 65536 == 0].any(), "a BF16 number has remainder 0"
    assert same_bits(join(weight, remainder), master)


def test_every_nan_stays_a_nan_in_the_weight() -> None:
    weight, remainder = split(floats(NANS))
    assert weight.isnan().all()
    assert join(weight, remainder).isnan().all()
