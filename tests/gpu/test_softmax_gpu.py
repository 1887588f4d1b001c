"""Compare the softmax kernels with torch's cross entropy in FP64 and with our quantizers.

The tests run on a GPU, and on a CPU under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from packing.arrow import IGNORE
from pretrain.model.loss import softmax_kernel
from pretrain.model.loss.softmax_kernel import quantized_softmax_gradient, softmax_loss
from pretrain.precision.quantizers import E4M3, E5M2, Grid
from pretrain.precision.quantizers.tensor import (
    absolute_maximum,
    decode_scale,
    quantize,
    scale_from_amax,
)
from tests.gpu.conftest import DEVICE, INTERPRETED, cuda_only

pytestmark = pytest.mark.usefixtures("conversions_that_round")
GRIDS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
# Relative error of a gradient.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def draw(
    n: int, vocabulary: int, dtype: torch.dtype, scale: float = 3.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, vocabulary, generator=generator) * scale).to(dtype)
    labels = torch.randint(vocabulary, (n,), generator=generator)
    labels[::5] = IGNORE
    return logits.to(DEVICE), labels.to(DEVICE)


def reference(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses and the gradient of logits in FP64."""
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, labels, ignore_index=IGNORE, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    return losses.detach(), gradient


def check(logits: Tensor, labels: Tensor, block: int) -> None:
    """Compare losses and gradients with the reference. `block` logits are read at once."""
    expected_losses, expected_gradient = reference(logits, labels)
    gradient = logits.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax_kernel, "BLOCK", block)
        losses = softmax_loss(logits, labels, IGNORE)
        assert torch.equal(softmax_loss(gradient, labels, IGNORE, with_gradient=True), losses)
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradient.double(), expected_gradient, rtol=ROUNDING[logits.dtype] + 1e-5, atol=2e-7
    )
    assert not gradient[labels == IGNORE].any()


@settings(max_examples=6 if INTERPRETED else 30, deadline=None)
@given(
    n=st.integers(1, 6),
    vocabulary=st.integers(1, 150),
    block=st.sampled_from([16, 64, 8192]),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_losses_and_gradients_are_those_of_autograd(
    n, vocabulary, block, scale, dtype, seed
) -> None:
    check(*draw(n, vocabulary, dtype, scale, seed), block)


def test_extreme_logits_keep_their_accuracy() -> None:
    vocabulary = 40
    logits = torch.zeros(6, vocabulary)
    logits[0] = torch.linspace(-1e4, 1e4, vocabulary)
    # In FP32, a log-sum-exp of 1e4 has few digits for the differences of these logits.
    logits[1] = 1e4 + torch.linspace(0, 3, vocabulary)
    logits[2] = -1e4 - torch.linspace(0, 3, vocabulary)
    # The first and the last blocks have probability zero.
    logits[3, :32] = -math.inf
    logits[4, 8:] = -math.inf
    labels = torch.tensor([vocabulary - 2, 7, 7, 35, 2, 0])
    check(logits.to(DEVICE), labels.to(DEVICE), block=16)


def test_a_label_out_of_range_has_a_nan_loss_and_no_entry_in_the_gradient() -> None:
    logits, labels = draw(3, 40, torch.float32)
    labels[1], labels[2] = -7, 40
    expected = logits.double().softmax(1)
    losses = softmax_loss(logits, labels, IGNORE, with_gradient=True)
    assert losses[1:].isnan().all()
    torch.testing.assert_close(logits[1:].double(), expected[1:], rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_logit_affects_its_token_only_unless_ignored(bad: float) -> None:
    logits, labels = draw(6, 40, torch.float32)
    logits[0, 3] = logits[2, 3] = bad  # token 0 is ignored
    losses = softmax_loss(logits, labels, IGNORE, with_gradient=True)
    assert losses.isnan().tolist() == [False, False, True, False, False, False]
    assert logits.isnan().any(1).tolist() == [False, False, True, False, False, False]


def decoded(codes: Tensor, fp8: torch.dtype) -> Tensor:
    return codes.view(fp8).float()


@pytest.mark.parametrize(
    ("fp8", "shape", "scale"),
    [
        (torch.float8_e4m3fn, (16, 64), None),
        (torch.float8_e5m2, (32, 64), None),
        (torch.float8_e4m3fn, (24, 80), 1e6),
        (torch.float8_e5m2, (24, 80), 1e3),
    ],
)
def test_the_fp8_gradient_is_the_quantized_bf16_gradient(
    fp8: torch.dtype, shape: tuple[int, int], scale: float | None
) -> None:
    """The row-wise form has one scale per row. The column-wise form has one scale."""
    logits, labels = draw(*shape, torch.bfloat16)
    given_scale = None if scale is None else torch.tensor(scale, device=DEVICE)
    grid: Grid = GRIDS[fp8]
    plain = logits.clone()
    expected_losses = softmax_loss(plain, labels, IGNORE, with_gradient=True)
    earlier_amax = 0.0 if scale is None else 1e-3
    amax = torch.full((1,), earlier_amax, device=DEVICE)
    losses, gradient = quantized_softmax_gradient(logits, labels, IGNORE, fp8, amax, given_scale)
    assert torch.equal(losses, expected_losses)
    assert amax.item() == max(earlier_amax, absolute_maximum(plain).item())
    columns_scale = scale_from_amax(amax, grid.maximum) if given_scale is None else given_scale
    assert torch.equal(gradient.scale_inv, decode_scale(columns_scale).reshape(1))
    columns = quantize(plain, columns_scale, grid).operand.t()
    torch.testing.assert_close(
        decoded(gradient.columns, fp8), columns, rtol=0, atol=0, equal_nan=True
    )
    row_scales = scale_from_amax(plain.abs().amax(1).float(), grid.maximum)
    assert torch.equal(gradient.rows_scale_inv, decode_scale(row_scales))
    rows = torch.stack(
        [
            quantize(row, row_scale, grid).operand
            for row, row_scale in zip(plain, row_scales, strict=True)
        ]
    )
    torch.testing.assert_close(decoded(gradient.rows, fp8), rows, rtol=0, atol=0, equal_nan=True)
    # The gradient at the label has the largest code, because it is the amax of its row.
    tokens = (labels != IGNORE).nonzero()[:, 0]
    entry = decoded(gradient.rows, fp8)[tokens, labels[tokens]]
    assert (entry == -grid.maximum).all()


@cuda_only
def test_a_chunk_of_more_than_2_to_the_31_logits_is_right() -> None:
    vocabulary = 151_936
    n = 14_208
    assert n * vocabulary > 2**31
    logits = torch.zeros(n, vocabulary, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.zeros(n, device=DEVICE, dtype=torch.int64)
    logits[-64:], labels[-64:] = draw(64, vocabulary, torch.bfloat16)
    expected_losses, gradient = reference(logits[-64:], labels[-64:])
    amax = torch.zeros(1, device=DEVICE)
    losses, quantized = quantized_softmax_gradient(
        logits, labels, IGNORE, torch.float8_e5m2, amax, None
    )
    torch.testing.assert_close(losses[-64:].double(), expected_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses[:-64], torch.full_like(losses[:-64], math.log(vocabulary)))
    for codes, scale_inv in (
        (quantized.rows[-64:], quantized.rows_scale_inv[-64:, None]),
        (quantized.columns[:, -64:].t(), quantized.scale_inv),
    ):
        values = decoded(codes, torch.float8_e5m2) * scale_inv
        torch.testing.assert_close(values.double(), gradient, rtol=0.13, atol=2e-9)
    del quantized
    softmax_loss(logits, labels, IGNORE, with_gradient=True)
    torch.testing.assert_close(logits[-64:].double(), gradient, rtol=2**-8 + 1e-5, atol=2e-7)
