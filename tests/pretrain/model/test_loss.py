"""The loss of the head compared with cross_entropy on FP64 logits: values, gradients and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from foundation.errors import InputError
from packing.arrow import IGNORE
from pretrain.model.loss import head as loss
from pretrain.model.loss.head import LossHead, token_losses
from pretrain.settings.recipe import LossSettings
from tests.pretrain.conftest import QUANTIZED, context_of, emulation_of


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


def exact(
    states: Tensor, linear: nn.Linear, labels: Tensor, scale: float = 1.0
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and its gradients of states, weight and bias, from all logits in FP64."""
    inputs = [t.detach().double().requires_grad_() for t in (states, *linear.parameters())]
    logits = F.linear(*inputs)
    value = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return value.detach(), list(torch.autograd.grad(value * scale, inputs))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected).norm() / expected.norm().clamp(min=1e-30))


def test_a_well_predicted_token_keeps_its_small_gradient_in_bf16() -> None:
    logits = torch.tensor([[9.0, 0.0]], dtype=torch.bfloat16)
    token_losses(logits, torch.tensor([0]), with_gradient=True)
    expected = 1 / (1 + torch.tensor(9.0).exp())
    torch.testing.assert_close(
        logits.float(), torch.stack([-expected, expected])[None], rtol=2**-8, atol=0
    )


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_bf16_errs_by_no_more_than_its_roundings(weights: torch.dtype) -> None:
    torch.manual_seed(0)
    states, linear, labels = problem(512, 64, 1000, 0.1)
    value, gradients = exact(states, linear, labels, 1 / 460)
    linear.to(weights)
    head = LossHead(linear, LossSettings(chunk=128))
    loss_sum = head(states.bfloat16(), labels)
    (loss_sum / 460).backward()
    # The 512 rounding errors, each 2^-9 of a logit, average out.
    assert relative_error(loss_sum, value) < 1e-4
    assert relative_error(states.grad, gradients[0]) < 2**-7
    assert relative_error(linear.weight.grad, gradients[1]) < 2**-7
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
    expected = sum(exact(states, linear, labels, scale)[1][1] for scale in scales)
    linear.weight.main_grad = torch.full((30, 8), -0.0, dtype=main)
    head = LossHead(linear, LossSettings(chunk=16))
    for scale in scales:
        (head(states, labels) * scale).backward()
    assert linear.weight.grad is None
    assert states.grad is not None
    tolerance = 1e-6 if main == torch.float32 else 2**-8
    assert relative_error(linear.weight.main_grad, expected) < tolerance


@pytest.mark.parametrize("precision", QUANTIZED)
def test_every_chunk_of_a_quantized_head_agrees_with_the_unquantized_head(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    states, linear, labels = problem(384, 128, 256, 0.1)
    with torch.no_grad():
        linear.weight.mul_(4)
    # Gradients of all logits in FP64.
    logits = F.linear(states.detach()[0].double(), linear.weight.detach().double())
    logits.requires_grad_()
    token_loss = F.cross_entropy(logits, labels[0], ignore_index=IGNORE, reduction="none")
    (d_logits,) = torch.autograd.grad(token_loss.sum(), logits)
    d_states = d_logits @ linear.weight.detach().double()

    engine = emulation_of(precision)
    context = context_of(engine, low_precision=True)
    head = LossHead(linear, LossSettings(chunk=128), context)
    head.state.add(128, 256)
    seen: list[tuple[Tensor, Tensor]] = []

    def recorded(logits: Tensor, labels: Tensor, *rest: Any, **options: Any) -> Tensor:
        losses = real(logits, labels, *rest, **options)
        seen.append((losses.clone(), logits.clone()))
        return losses

    real = loss.token_losses
    monkeypatch.setattr(loss, "token_losses", recorded)
    # Delayed scaling computes its scales in the first two passes.
    for _ in range(3):
        seen.clear()
        states.grad = None
        with engine.forward():
            value = head(states, labels)
        value.backward()
    assert len(seen) == 3
    assert value.item() == pytest.approx(token_loss.sum().item(), rel=0.03)
    expected = zip(*(part.split(128) for part in (token_loss, d_logits, d_states)), strict=True)
    for (losses, gradient), d_hidden, references in zip(
        seen, states.grad[0].split(128), expected, strict=True
    ):
        assert losses.sum().item() == pytest.approx(references[0].sum().item(), rel=0.05)
        for actual, reference in zip((gradient, d_hidden), references[1:], strict=True):
            cosine = F.cosine_similarity(actual.double().flatten(), reference.flatten(), dim=0)
            assert cosine > 0.9
            assert relative_error(actual, reference) < 0.4


class LargestResult(TorchDispatchMode):
    """Record the largest number of elements that one operation has written."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
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


@pytest.mark.parametrize(
    ("model_type", "changes", "key"),
    [
        ("gemma2", {}, "final_logit_softcapping"),
        ("cohere", {}, "logit_scale: 0.0625"),
        ("granite", {"logits_scaling": 8.0}, "logits_scaling: 8.0"),
    ],
)
def test_a_model_that_changes_its_logits_is_rejected(
    model_type: str, changes: dict, key: str
) -> None:
    with pytest.raises(InputError, match=key):
        loss.check(AutoConfig.for_model(model_type, **changes), LossSettings())
