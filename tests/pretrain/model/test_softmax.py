"""Losses and gradients of a chunk of logits: torch's formula; tests/test_interpreted_kernels.py has the kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from packing.arrow import IGNORE
from pretrain.model.loss.chunk import softmax_gradient_, token_losses


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 20), vocabulary=st.integers(1, 50), scale=st.sampled_from([0.0, 1.0, 30.0]), seed=st.integers(0, 9))
def test_losses_and_gradients_are_those_of_autograd_in_fp64(n: int, vocabulary: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, vocabulary, generator=generator) * scale
    labels = torch.randint(vocabulary, (n,), generator=generator)
    labels[::3] = IGNORE
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, labels, ignore_index=IGNORE, reduction="none")
    losses.sum().backward()
    torch.testing.assert_close(token_losses(logits, labels).double(), losses.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(softmax_gradient_(logits, labels).double(), losses.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_a_well_predicted_token_keeps_its_small_gradient_in_bf16() -> None:
    logits = torch.tensor([[9.0, 0.0]], dtype=torch.bfloat16)
    softmax_gradient_(logits, torch.tensor([0]))
    expected = 1 / (1 + torch.tensor(9.0).exp())
    torch.testing.assert_close(logits.float(), torch.stack([-expected, expected])[None], rtol=2**-8, atol=0)
