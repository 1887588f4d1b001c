"""The Hadamard transform against Transformer Engine's reference, bit for bit, and block by block in any shape."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pretrain.precision.quantizers import blocks


def test_two_million_bf16_values_are_transformed_as_by_transformer_engine(
    te_reference: Callable[[str], ModuleType], finite_bf16: Tensor
) -> None:
    module = te_reference("reference_nvfp4")
    reference = module.NVFP4QuantizerRef(dtype=None, with_rht=True)
    x = finite_bf16[: finite_bf16.shape[0] // 16 * 16]
    assert torch.equal(blocks.hadamard(x).view(torch.int16), reference._apply_rht(x).view(torch.int16))
    transposed = reference._apply_rht(x.t().contiguous())
    assert torch.equal(blocks.hadamard(x.t()).contiguous().view(torch.int16), transposed.view(torch.int16))


@given(shape=st.lists(st.integers(1, 4), min_size=0, max_size=3), count=st.integers(1, 4), seed=st.integers(0, 99))
def test_any_shape_is_transformed_block_by_block(shape: list[int], count: int, seed: int) -> None:
    x = torch.randn(*shape, 16 * count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    matrix = blocks.hadamard_matrix(torch.float64, x.device)
    expected = torch.cat([part @ matrix for part in x.split(16, dim=-1)], dim=-1)
    torch.testing.assert_close(blocks.hadamard(x), expected, rtol=1e-13, atol=1e-13)
    if x.dim() > 1:
        strided = x.mT.contiguous().mT
        torch.testing.assert_close(blocks.hadamard(strided), expected, rtol=1e-13, atol=1e-13)
