"""Compare our Triton attention with attention in FP64, one document at a time.

The tests run on a GPU, and on a CPU under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pretrain.model.attention import document_bounds
from pretrain.model.attention_kernel import attend, attend_backward
from pretrain.model.fused.formulas import Heads
from tests.gpu.conftest import DEVICE, INTERPRETED
from tests.pretrain.model.fused.fused_models import ARCHITECTURES, build, one_pass, packed

# The interpreter cannot multiply matrices in BF16.
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
SCALE = 0.21
LENGTHS = st.lists(st.integers(1, 80), min_size=1, max_size=4)


def offsets(lengths: list[int], spare: int) -> Tensor:
    """Return the offsets of the documents. The last offset occurs `spare` more times."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat([ends, ends[-1:].repeat(spare)]).to(DEVICE, torch.int32)


def draw(heads: Heads, tokens: int, *, stacked: bool = False) -> list[Tensor]:
    """Return queries, keys, values and the gradient of the output, in DTYPE.

    With `stacked`, queries, keys and values are views of one tensor.
    """
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, heads.width, generator=generator).to(DEVICE, DTYPE)
    d_output = torch.randn(tokens, heads.query, heads.dim, generator=generator)
    states = heads.split(qkv)
    if not stacked:
        states = tuple(state.clone() for state in states)
    return [*states, d_output.to(DEVICE, DTYPE)]


def reference(states: list[Tensor], lengths: list[int]) -> tuple[Tensor, ...]:
    """Return the output, the log-sums [heads, tokens], and the gradients of q, k and v, in FP64."""
    q, k, v, d_output = (state.double() for state in states)
    leaves = [state.requires_grad_() for state in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    outputs = []
    log_sums = []
    for query, key, value in zip(*(leaf.split(lengths) for leaf in leaves), strict=True):
        key, value = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (key, value))
        scores = query.transpose(0, 1) @ key.transpose(1, 2) * SCALE
        is_later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, -torch.inf)
        outputs.append((F.softmax(scores, dim=-1) @ value).transpose(0, 1))
        log_sums.append(scores.logsumexp(dim=-1))
    output = torch.cat(outputs)
    gradients = torch.autograd.grad(output, leaves, d_output)
    return output.detach(), torch.cat(log_sums, dim=1).detach(), *gradients


def check(heads: Heads, lengths: list[int], *, spare: int = 0, stacked: bool = False) -> None:
    states = draw(heads, sum(lengths), stacked=stacked)
    expected = reference(states, lengths)
    q, k, v, d_output = states
    bounds = document_bounds(offsets(lengths, spare), len(q))
    output, log_sums = attend(q, k, v, bounds, SCALE)
    gradients = attend_backward(d_output, q, k, v, output, log_sums, bounds, SCALE)
    torch.testing.assert_close(log_sums.double(), expected[1], rtol=0, atol=1e-4)
    results = (output, *gradients)
    assert all(result.is_contiguous() for result in results)
    for result, exact in zip(results, (expected[0], *expected[2:]), strict=True):
        assert result.dtype == DTYPE
        assert (result.double() - exact).norm() < 2**-7 * exact.norm() + 1e-4
        # In a document of one token, the exact gradients of the query and the key are 0. So the
        # error of each document is compared with the usual size of the values.
        usual = exact.square().mean().sqrt() + 1e-4
        pairs = zip(result.double().split(lengths), exact.split(lengths), strict=True)
        for actual, of_document in pairs:
            assert (actual - of_document).square().mean().sqrt() < 2**-6 * usual


@given(LENGTHS, st.sampled_from([Heads(4, 2, 16), Heads(3, 1, 32), Heads(2, 2, 64)]), st.booleans())
@settings(max_examples=6, deadline=None)
def test_attention_equals_attention_of_single_documents(
    lengths: list[int], heads: Heads, stacked: bool
) -> None:
    check(heads, lengths, spare=3, stacked=stacked)


def test_attention_equals_attention_of_single_documents_over_several_blocks() -> None:
    check(Heads(2, 1, 64), [1, 63, 65, 130])


def test_a_gradient_that_is_a_view_has_the_same_result() -> None:
    q, k, v, d_output = draw(Heads(2, 1, 32), 100)
    bounds = document_bounds(offsets([40, 60], 0), len(q))
    output, log_sums = attend(q, k, v, bounds, SCALE)
    expected = attend_backward(d_output, q, k, v, output, log_sums, bounds, SCALE)
    view = d_output.transpose(0, 1).contiguous().transpose(0, 1)
    gradients = attend_backward(view, q, k, v, output, log_sums, bounds, SCALE)
    assert all(map(torch.equal, gradients, expected))


def test_documents_do_not_affect_each_other() -> None:
    q, k, v, d_output = draw(Heads(2, 1, 32), 100)
    bounds = document_bounds(offsets([40, 60], 0), len(q))
    output, log_sums = attend(q, k, v, bounds, SCALE)
    gradients = attend_backward(d_output, q, k, v, output, log_sums, bounds, SCALE)
    for changed in (q, k, v, d_output):
        changed[40:] *= 3
    again, log_sums = attend(q, k, v, bounds, SCALE)
    assert torch.equal(again[:40], output[:40])
    changed_gradients = attend_backward(d_output, q, k, v, again, log_sums, bounds, SCALE)
    for gradient, first in zip(changed_gradients, gradients, strict=True):
        assert torch.equal(gradient[:40], first[:40])


@pytest.mark.skipif(not INTERPRETED, reason="the fused layers of this test are those for a CPU")
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])  # without and with rotation and head norms
def test_fused_layers_have_the_gradients_of_layers_with_sdpa(name: str) -> None:
    loss, gradients = one_pass(packed(build(ARCHITECTURES[name], backend="packed_triton")))
    expected_loss, expected = one_pass(packed(build(ARCHITECTURES[name], backend="packed_sdpa")))
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    largest = max(gradient.norm() for gradient in expected.values())
    for parameter, gradient in expected.items():
        error = (gradients[parameter] - gradient).norm()
        assert error <= 2e-6 * largest + 1e-5 * gradient.norm(), parameter
