"""The softmax kernels against torch's cross_entropy and autograd in FP64, and their FP8 gradient against our quantizers.

Runs on a GPU, and on a CPU under Triton's interpreter (TRITON_INTERPRET=1).
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
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # relative, of a gradient


def draw(
    n: int, vocabulary: int, dtype: torch.dtype, scale: float = 3.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, vocabulary, generator=generator) * scale).to(dtype)
    labels = torch.randint(vocabulary, (n,), generator=generator)
    labels[::5] = IGNORE
    return logits.to(DEVICE), labels.to(DEVICE)


def reference(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and gradient of logits, FP64."""
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, labels, ignore_index=IGNORE, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    return losses.detach(), gradient


def check(logits: Tensor, labels: Tensor, block: int) -> None:
    """`block`: logits that a program takes at once."""
    losses, gradient = reference(logits, labels)
    ours = logits.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax_kernel, "BLOCK", block)
        alone = softmax_loss(logits, labels, IGNORE)
        assert torch.equal(softmax_loss(ours, labels, IGNORE, with_gradient=True), alone)
    torch.testing.assert_close(alone.double(), losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        ours.double(), gradient, rtol=ROUNDING[logits.dtype] + 1e-5, atol=2e-7
    )
    assert not ours[labels == IGNORE].any()


@settings(max_examples=6 if INTERPRETED else 30, deadline=None)
@given(
    n=st.integers(1, 6),
    vocabulary=st.integers(1, 150),
    block=st.sampled_from([16, 64, 8192]),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_losses_and_gradients_are_those_of_autograd_whatever_the_shape(
    n, vocabulary, block, scale, dtype, seed
) -> None:
    check(*draw(n, vocabulary, dtype, scale, seed), block)


def test_extreme_logits_keep_their_digits() -> None:
    vocabulary = 40
    logits = torch.zeros(6, vocabulary)
    logits[0] = torch.linspace(-1e4, 1e4, vocabulary)
    # a log-sum-exp of 1e4 has no digits left for these
    logits[1] = 1e4 + torch.linspace(0, 3, vocabulary)
    logits[2] = -1e4 - torch.linspace(0, 3, vocabulary)
    logits[3, :32] = -math.inf  # whole blocks of nothing, first and last
    logits[4, 8:] = -math.inf
    labels = torch.tensor([vocabulary - 2, 7, 7, 35, 2, 0])
    check(logits.to(DEVICE), labels.to(DEVICE), block=16)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_its_own_token_alone_and_not_where_it_is_ignored(
    bad: float,
) -> None:
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
def test_the_fp8_gradient_is_the_bf16_gradient_quantized_apart(
    fp8: torch.dtype, shape: tuple[int, int], scale: float | None
) -> None:
    """It is the gradient that the other kernel writes in BF16: rows with a scale each, columns with one."""
    logits, labels = draw(*shape, torch.bfloat16)
    given = None if scale is None else torch.tensor(scale, device=DEVICE)
    grid: Grid = GRIDS[fp8]
    plain = logits.clone()
    expected_losses = softmax_loss(plain, labels, IGNORE, with_gradient=True)
    before = 0.0 if scale is None else 1e-3
    amax = torch.full((1,), before, device=DEVICE)
    losses, gradient = quantized_softmax_gradient(logits, labels, IGNORE, fp8, amax, given)
    assert torch.equal(losses, expected_losses)
    assert amax.item() == max(before, absolute_maximum(plain).item())
    used = scale_from_amax(amax, grid.maximum) if given is None else given
    assert torch.equal(gradient.scale_inv, decode_scale(used).reshape(1))
    columns = quantize(plain, used, grid).operand.t()
    torch.testing.assert_close(
        decoded(gradient.columns, fp8), columns, rtol=0, atol=0, equal_nan=True
    )
    of_rows = scale_from_amax(plain.abs().amax(1).float(), grid.maximum)
    assert torch.equal(gradient.rows_scale_inv, decode_scale(of_rows))
    rows = torch.stack([quantize(*row, grid).operand for row in zip(plain, of_rows, strict=True)])
    torch.testing.assert_close(decoded(gradient.rows, fp8), rows, rtol=0, atol=0, equal_nan=True)
    # What the label's entry loses is less than BF16 would lose, and it is the largest code.
    tokens = (labels != IGNORE).nonzero()[:, 0]
    entry = decoded(gradient.rows, fp8)[tokens, labels[tokens]]
    assert (entry == -grid.maximum).all()


@cuda_only
def test_a_chunk_of_more_than_two_to_the_31_logits_is_right_to_its_last_row() -> None:
    vocabulary, n = 151_936, 14_208
    assert n * vocabulary > 2**31
    logits = torch.zeros(n, vocabulary, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.zeros(n, device=DEVICE, dtype=torch.int64)
    logits[-64:], labels[-64:] = draw(64, vocabulary, torch.bfloat16)
    losses, gradient = reference(logits[-64:], labels[-64:])
    amax = torch.zeros(1, device=DEVICE)
    ours, quantized = quantized_softmax_gradient(
        logits, labels, IGNORE, torch.float8_e5m2, amax, None
    )
    torch.testing.assert_close(ours[-64:].double(), losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[:-64], torch.full_like(ours[:-64], math.log(vocabulary)))
    of_rows = quantized.rows[-64:], quantized.rows_scale_inv[-64:, None]
    for codes, scale_inv in (of_rows, (quantized.columns[:, -64:].t(), quantized.scale_inv)):
        values = decoded(codes, torch.float8_e5m2) * scale_inv
        torch.testing.assert_close(values.double(), gradient, rtol=0.13, atol=2e-9)
    del quantized
    softmax_loss(logits, labels, IGNORE, with_gradient=True)
    torch.testing.assert_close(logits[-64:].double(), gradient, rtol=2**-8 + 1e-5, atol=2e-7)
