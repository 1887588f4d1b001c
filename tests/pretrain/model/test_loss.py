"""The chunked loss and its penalties compared with their definitions on all logits in FP64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from packing.arrow import IGNORE
from pretrain.model.loss.head import LossHead, token_losses
from pretrain.model.loss.logit_change import UNCHANGED, LogitChange
from pretrain.settings.recipe import LossSettings, PenaltyKind
from tests.pretrain.conftest import QUANTIZED, context_of, emulation_of

KINDS = get_args(PenaltyKind)
CHANGES = [UNCHANGED, LogitChange(0.25), LogitChange(cap=1.5), LogitChange(2.0, 5.0)]


def problem(
    tokens: int, hidden: int, vocabulary: int, ignored: float, *, bias: bool = False
) -> tuple[Tensor, nn.Linear, Tensor]:
    """Return random hidden states, a head, and labels with a share of ignored ones."""
    states = torch.randn(1, tokens, hidden, requires_grad=True)
    linear = nn.Linear(hidden, vocabulary, bias=bias)
    labels = torch.randint(vocabulary, (1, tokens)).masked_fill(
        torch.rand(1, tokens) < ignored, IGNORE
    )
    return states, linear, labels


def defined(kind: str | None, logits: Tensor) -> Tensor:
    """Return the penalty of each token [n] from FP64 logits [n, vocabulary], or zeros."""
    p = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
    if kind is None:
        return torch.zeros_like(p[:, 0])
    if kind == "neg_entropy":
        return -(p * p.log()).sum(dim=-1)
    return p.sort(dim=-1, descending=True).values[:, 1:].sum(dim=-1)


def exact(
    states: Tensor,
    linear: nn.Linear,
    labels: Tensor,
    kind: str | None = None,
    weight: float = 0.0,
    change: LogitChange = UNCHANGED,
) -> tuple[Tensor, list[Tensor]]:
    """Return the sums of cross-entropies and penalties, and the gradients of the loss, in FP64.

    Gradients are those of cross-entropy + weight * penalty for states, weight and bias.
    """
    inputs = [t.detach().double().requires_grad_() for t in (states, *linear.parameters())]
    logits = change(F.linear(*inputs).flatten(0, -2))
    labels = labels.flatten()
    valid = labels != IGNORE
    cross_entropy = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    parts = torch.stack([cross_entropy, defined(kind, logits[valid]).sum()])
    return parts.detach(), list(torch.autograd.grad(parts[0] + weight * parts[1], inputs))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected).norm() / expected.norm().clamp(min=1e-30))


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
    change=st.sampled_from(CHANGES),
    seed=st.integers(0, 9),
)
def test_losses_and_gradients_are_exact_to_fp32_rounding(
    kind, weight, tokens, vocabulary, ignored, chunk, at_once, sharpness, bias, change, seed
) -> None:
    torch.manual_seed(seed)
    states, linear, labels = problem(tokens, 16, vocabulary, ignored, bias=bias)
    with torch.no_grad():
        linear.weight *= sharpness
    parts, gradients = exact(states, linear, labels, kind, weight, change)
    settings = LossSettings(penalty=kind, penalty_weight=weight if kind else None, chunk=chunk)
    head = LossHead(linear, settings, change=change)
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


def test_a_well_predicted_token_keeps_its_small_gradient_in_bf16() -> None:
    logits = torch.tensor([[9.0, 0.0]], dtype=torch.bfloat16)
    token_losses(logits, torch.tensor([0]), None, UNCHANGED, with_gradient=True)
    expected = 1 / (1 + torch.tensor(9.0).exp())
    torch.testing.assert_close(
        logits.float(), torch.stack([-expected, expected])[None], rtol=2**-8, atol=0
    )


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_bf16_errs_by_no_more_than_its_roundings(weights: torch.dtype) -> None:
    torch.manual_seed(0)
    states, linear, labels = problem(512, 64, 1000, 0.1)
    parts, gradients = exact(states, linear, labels)
    linear.to(weights)
    head = LossHead(linear, LossSettings(chunk=128))
    loss_sum = head(states.bfloat16(), labels)
    (loss_sum / 460).backward()
    # The 512 rounding errors, each 2^-9 of a logit, average out.
    assert relative_error(loss_sum, parts[0]) < 1e-4
    for tensor, gradient in zip((states, linear.weight), gradients, strict=True):
        assert relative_error(tensor.grad, gradient / 460) < 2**-7
    assert linear.weight.grad.dtype == weights and states.grad.dtype == torch.float32


def test_a_frozen_head_has_no_gradient_and_passes_on_that_of_states() -> None:
    states, linear, labels = problem(20, 8, 30, 0.0)
    _, gradients = exact(states, linear, labels)
    linear.requires_grad_(False)
    LossHead(linear, LossSettings(chunk=8))(states, labels).backward()
    assert linear.weight.grad is None
    torch.testing.assert_close(states.grad.double(), gradients[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
def test_microbatches_are_summed_in_the_main_gradient(main: torch.dtype) -> None:
    torch.manual_seed(0)
    states, linear, labels = problem(60, 8, 30, 0.2)
    scales = (1 / 7, 1 / 3)
    expected = exact(states, linear, labels)[1][1] * sum(scales)
    linear.weight.main_grad = torch.full((30, 8), -0.0, dtype=main)
    head = LossHead(linear, LossSettings(chunk=16))
    for scale in scales:
        (head(states, labels) * scale).backward()
    assert linear.weight.grad is None
    assert states.grad is not None
    tolerance = 1e-6 if main == torch.float32 else 2**-8
    assert relative_error(linear.weight.main_grad, expected) < tolerance


@pytest.mark.parametrize(
    ("precision", "change"), [*zip(QUANTIZED, itertools.cycle(CHANGES), strict=False)]
)
def test_every_chunk_of_a_quantized_head_agrees_with_the_unquantized_head(
    precision: str, change: LogitChange
) -> None:
    """Chunks of 100 tokens would not suit all precisions. They become chunks of 128 tokens."""
    torch.manual_seed(0)
    states, linear, labels = problem(384, 128, 256, 0.1)
    with torch.no_grad():
        linear.weight.mul_(4)
    parts, (d_states, d_weight) = exact(states, linear, labels, change=change)
    engine = emulation_of(precision)
    context = context_of(engine, low_precision=True)
    head = LossHead(linear, LossSettings(chunk=100), context, change=change)
    head.state.create_gemm(128, 256)
    for _ in range(3):  # Delayed scaling computes its scales in the first two passes.
        states.grad = linear.weight.grad = None
        with engine.forward():
            value = head(states, labels)
        value.backward()
    assert value.item() == pytest.approx(parts[0].item(), rel=0.03)
    actual = (linear.weight.grad, *states.grad[0].split(128))
    for gradient, reference in zip(actual, (d_weight, *d_states[0].split(128)), strict=True):
        assert relative_error(gradient, reference) < 0.4


class LargestResult(TorchDispatchMode):
    """Record the largest number of elements that one operation has written."""

    elements = 0

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("grad", [True, False])
def test_no_operation_writes_more_than_one_chunk_of_logits(grad: bool) -> None:
    states, linear, labels = problem(512, 8, 1000, 0.1)
    head = LossHead(linear, LossSettings(chunk=32))
    with LargestResult() as largest, torch.set_grad_enabled(grad):
        value = head(states, labels)
        if grad:
            value.backward()
    assert largest.elements == 32 * 1000
