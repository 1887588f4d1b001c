"""The chunked loss and its penalties compared with their definitions on all logits in FP64."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from packing.arrow import IGNORE
from pretrain.model.loss.head import LossHead
from pretrain.settings.recipe import LossSettings, PenaltyKind
from tests.pretrain.model.test_loss import problem

KINDS = get_args(PenaltyKind)


def defined(kind: str | None, logits: Tensor) -> Tensor:
    """Return the penalty of each token [n] from FP64 logits [n, vocabulary], or zeros."""
    p = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
    if kind == "neg_entropy":
        return -(p * p.log()).sum(dim=-1)
    return p.sort(dim=-1, descending=True).values[:, 1:].sum(dim=-1) * (kind is not None)


def exact(kind: str | None, weight: float, *operands: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the sums of cross-entropies and penalties, and the gradients of the loss.

    Gradients are those of cross-entropy + weight * penalty for states, weight and bias.
    """
    states, *head, labels = operands
    inputs = [t.detach().double().requires_grad_() for t in (states, *head)]
    logits = F.linear(*inputs).flatten(0, -2)
    labels = labels.flatten()
    valid = labels != IGNORE
    cross_entropy = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    parts = torch.stack([cross_entropy, defined(kind, logits[valid]).sum()])
    return parts.detach(), list(torch.autograd.grad(parts[0] + weight * parts[1], inputs))


@given(
    kind=st.sampled_from([None, *KINDS]),
    weight=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    tokens=st.integers(1, 70),
    vocabulary=st.integers(1, 60),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    chunk=st.integers(1, 80),
    at_once=st.sampled_from([1, 100, 2**22]),
    sharpness=st.sampled_from([0.1, 1.0, 8.0]),
    bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_losses_and_gradients_are_exact_to_fp32_rounding(
    kind, weight, tokens, vocabulary, ignored, chunk, at_once, sharpness, bias, seed
) -> None:
    torch.manual_seed(seed)
    states, linear, labels = problem(tokens, 16, vocabulary, ignored, bias=bias)
    with torch.no_grad():
        linear.weight *= sharpness
    parts, gradients = exact(kind, weight, states, *linear.parameters(), labels)
    head = LossHead(
        linear, LossSettings(penalty=kind, penalty_weight=weight if kind else None, chunk=chunk)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pretrain.model.loss.head.LOGITS_AT_ONCE", at_once)
        trained = head(states, labels)
        trained.backward()
        training_sources = head.take_parts()
        with torch.no_grad():
            evaluated = head.eval()(states, labels).double()
        evaluation_parts = head.take_parts()
    assert evaluated == pytest.approx(parts[0].item(), rel=1e-6, abs=1e-6)
    assert trained.dtype == torch.float32
    assert trained.shape == ()
    if kind:
        for head_parts in (training_sources, evaluation_parts):
            torch.testing.assert_close(head_parts.double(), parts, rtol=1e-6, atol=1e-6 * tokens)
    expected = parts[0] + weight * parts[1]
    torch.testing.assert_close(
        trained.double(), expected, rtol=1e-6, atol=1e-6 * tokens * (1 + weight)
    )
    # The rounding error of a logit is proportional to its size, and is the relative error of its
    # probability.
    rounding = 1e-6 + torch.finfo(torch.float32).eps * linear(states).abs().max().item()
    for tensor, gradient in zip((states, *linear.parameters()), gradients, strict=True):
        size = max(gradient.abs().max().item(), 1.0)
        torch.testing.assert_close(tensor.grad.double(), gradient, rtol=1e-5, atol=rounding * size)
