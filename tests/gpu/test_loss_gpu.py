"""Test the accuracy and the memory of the head's losses on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packing.arrow import IGNORE
from pretrain.model.loss.head import LossHead
from pretrain.settings.recipe import LossSettings
from tests.gpu.conftest import relative_error


def problem(
    tokens: int, hidden: int, vocabulary: int, weights: torch.dtype = torch.bfloat16
) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    states = torch.randn(1, tokens, hidden, device="cuda").bfloat16().requires_grad_()
    linear = nn.Linear(hidden, vocabulary, bias=False, device="cuda", dtype=weights)
    nn.init.normal_(linear.weight, std=0.05)
    labels = torch.randint(vocabulary, (1, tokens), device="cuda")
    labels[:, ::10] = IGNORE
    return states, linear, labels


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["chunked", "cce"])
def test_loss_and_gradients_are_exact_within_the_rounding_of_bf16(
    kind: Literal["chunked", "cce"], weights: torch.dtype
) -> None:
    if kind == "cce":
        pytest.importorskip("cut_cross_entropy")
    states, linear, labels = problem(2000, 256, 32_003, weights)
    rounded = linear.weight.detach().bfloat16().double().requires_grad_()
    exact_states = states.detach().double().requires_grad_()
    exact_loss = F.cross_entropy(
        F.linear(exact_states, rounded)[0], labels[0], ignore_index=IGNORE, reduction="sum"
    )
    (exact_loss / 131_072).backward()

    head = LossHead(linear, LossSettings(kind=kind, chunk=512))
    loss = head(states, labels)
    (loss / 131_072).backward()
    assert loss.dtype == torch.float32
    assert relative_error(loss, exact_loss.detach()) < 1e-4
    # cce skips gradients that it considers negligible. Its error on an H200 is 2.8 %.
    bound = 0.01 if kind == "chunked" else 0.05
    assert relative_error(states.grad, exact_states.grad) < bound
    assert relative_error(linear.weight.grad, rounded.grad) < bound
    with torch.no_grad():
        assert relative_error(head(states, labels), exact_loss.detach()) < 1e-4


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak of the memory that `run` allocates.

    The first call compiles and is not counted.
    """
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def test_peak_memory_is_one_chunk_of_logits_and_the_gradients() -> None:
    tokens = 16_384
    hidden = 512
    vocabulary = 50_304
    chunk = 1024
    states, linear, labels = problem(tokens, hidden, vocabulary)
    head = LossHead(linear, LossSettings(chunk=chunk))

    def train() -> None:
        gradients = torch.autograd.grad(head(states, labels), (states, linear.weight))
        assert len(gradients) == 2

    def evaluate() -> None:
        with torch.no_grad():
            head(states, labels)

    logits = 2 * tokens * vocabulary
    chunk_logits = 2 * chunk * vocabulary
    # The states' gradient is BF16. The weight's gradient is FP32, with a copy in BF16.
    gradients = 2 * tokens * hidden + (4 + 2) * vocabulary * hidden
    training = peak_bytes(train)
    assert training < 1.1 * (chunk_logits + gradients) < 0.3 * logits
    assert peak_bytes(evaluate) < min(1.1 * chunk_logits, training)
