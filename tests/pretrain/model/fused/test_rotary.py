"""The rotation's formulas against transformers' own attention layers and autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from pretrain.model.fused.formulas import HeadNorms, Heads, rotate, rotate_backward

FP64, FP32 = torch.float64, torch.float32
TOLERANCE = {FP64: {"rtol": 1e-12, "atol": 1e-12}, FP32: {"rtol": 2e-5, "atol": 2e-5}}

layouts = st.builds(
    lambda kv, group, half: Heads(kv * group, kv, 2 * half), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 4, 12, 32])
)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


def qwen3(heads: Heads, dtype: torch.dtype) -> tuple[Qwen3Attention, Qwen3Config]:
    config = Qwen3Config(
        hidden_size=8, num_attention_heads=heads.query, num_key_value_heads=heads.kv, head_dim=heads.dim, num_hidden_layers=1
    )
    attention = Qwen3Attention(config, 0).to(dtype)
    for seed, norm in enumerate((attention.q_norm, attention.k_norm)):
        norm.weight.data = 1 + normal(heads.dim, dtype=dtype, seed=seed) / 4
    return attention, config


def angles(tokens: int, embedding: torch.nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, dim], of two documents whose positions start at 0 and at 1."""
    positions = torch.cat([torch.arange(tokens // 2), 1 + torch.arange(tokens - tokens // 2)])
    cos, sin = embedding(torch.empty(0, dtype=dtype), positions[None])
    return cos[0], sin[0]


def as_transformers_does(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, attention: Qwen3Attention | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.split([heads.query * heads.dim, heads.kv * heads.dim, heads.kv * heads.dim], dim=-1)
    q, k, v = (part.view(1, len(qkv), -1, heads.dim) for part in (q, k, v))
    if attention is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos[None], sin[None])
    return q[0].transpose(0, 1), k[0].transpose(0, 1), v[0]


@pytest.mark.parametrize("dtype", [FP64, FP32])
@given(tokens=st.integers(1, 9), heads=layouts, normed=st.booleans())
def test_both_directions_are_transformers_own(dtype: torch.dtype, tokens: int, heads: Heads, normed: bool) -> None:
    attention, config = qwen3(heads, dtype)
    cos, sin = angles(tokens, Qwen3RotaryEmbedding(config), dtype)
    close = TOLERANCE[FP32 if normed else dtype]  # transformers' norm computes in FP32 whatever it is given
    qkv = normal(tokens, heads.width, dtype=dtype).requires_grad_()
    expected = as_transformers_does(qkv, cos, sin, heads, attention if normed else None)
    norms = HeadNorms(attention.q_norm.weight.detach(), attention.k_norm.weight.detach(), config.rms_norm_eps) if normed else None
    with torch.no_grad():
        found = rotate(qkv, cos, sin, heads, norms)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.is_contiguous() and ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, **close)

    gradients = [normal(*each.shape, dtype=dtype, seed=seed) for seed, each in enumerate(expected)]
    leaves = [qkv, *([attention.q_norm.weight, attention.k_norm.weight] if normed else [])]
    wanted = torch.autograd.grad(expected, leaves, gradients)
    ours = rotate_backward(*gradients, qkv.detach() if normed else None, cos, sin, heads, norms)
    assert normed or ours[1:] == (None, None)
    for mine, theirs in zip(ours, wanted, strict=normed):
        torch.testing.assert_close(mine, theirs, **close)
