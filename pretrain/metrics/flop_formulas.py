"""Training FLOPs a token by the formulas behind other launchers' MFU, so that their figures can be compared with ours.

All of them take every sequence for one document of T tokens. docs/planning.md derives each and says where it differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pretrain.metrics.flops import FORWARD_AND_BACKWARD, ModelFlops


@dataclass(frozen=True)
class Formula:
    """`per_token(model, length)`: FLOPs a token, forward and backward, of sequences of `length` tokens."""

    key: str
    says: str
    per_token: Callable[[ModelFlops, int], float]


def ours(model: ModelFlops, length: int) -> float:
    """Every product by its shape, attention causal: one document of `length` tokens, which is the most that a pack can cost."""
    return model.step(length, length**2) / length


def palm(model: ModelFlops, length: int) -> float:
    """6N + 12LHQT, N without any embedding, a tied head among them."""
    return 6.0 * (model.parameters - model.embedding_parameters) + _square_attention(model, length)


def nanogpt(model: ModelFlops, length: int) -> float:
    """6N + 12LHQT, N without learned positions only: an input embedding of its own counts, though it multiplies nothing."""
    return 6.0 * (model.parameters - model.position_parameters) + _square_attention(model, length)


def combined_formula(model: ModelFlops, length: int) -> float:
    """llm_TII's second version: attention as 2 S H^2 (2 + 2/G) + 4 S^2 H for S tokens, and the rotation of queries and keys."""
    h = model.shape.hidden
    rotation = 0 if model.position_parameters else 4 * h
    group = model.shape.heads / model.shape.kv_heads
    attention = 2 * h**2 * (2 + 2 / group) + 4 * length * h
    return _components(model, attention + _feed_forward(model) + rotation)


def component_summation(model: ModelFlops, length: int) -> float:
    """llm_TII's third version, `component_summation_v2025`: the same without the rotation, product by product."""
    return _components(model, _attention(model, length) + _feed_forward(model))


def megatron(model: ModelFlops, length: int) -> float:
    """`num_floating_point_operations` of Megatron-LM for one document a sequence, before it halved attention for causality."""
    s, h = model.shape, model.shape.hidden
    attention = (1 + s.kv_heads / s.heads + length / h) * s.query_width / h
    mlp = s.feed_forward / h * (1.5 if model.gated else 1)
    return 12.0 * s.layers * h**2 * (attention + mlp + s.vocabulary / (2 * s.layers * h))


FORMULAS = (
    Formula("ours", "products by their shapes, attention causal and within documents", ours),
    Formula("palm", "PaLM: 6N + 12LHQT, N without embeddings", palm),
    Formula("nanogpt", "nanoGPT: 6N + 12LHQT, N with token embeddings", nanogpt),
    Formula("combined_formula", "llm_TII v2: components, and the rotation", combined_formula),
    Formula("component_summation_v2025", "llm_TII v3: components", component_summation),
    Formula("megatron", "Megatron-LM: products by their shapes, the whole square of attention", megatron),
)


def attention_to_ffn_ratio(model: ModelFlops, length: int) -> float:
    """FLOPs of a layer's attention, projections among them, over those of its MLP, as llm_TII's third version has it."""
    return _attention(model, length) / _feed_forward(model)


def _square_attention(model: ModelFlops, length: int) -> float:
    """12 LHQT: scores and their sums over values for every pair of tokens, also those that causality masks."""
    return 12.0 * model.shape.layers * model.shape.query_width * length


def _attention(model: ModelFlops, length: int) -> float:
    """Forward FLOPs a token of a layer's attention, where heads * head_dim is taken to be `hidden`: Q, K, V, O and T x T."""
    h = model.shape.hidden
    group = model.shape.heads / model.shape.kv_heads
    query, key_value, output = 2 * h**2, 2 * (2 * h**2 / group), 2 * h**2
    return query + key_value + output + 4 * length * h


def _feed_forward(model: ModelFlops) -> float:
    return (6 if model.gated else 4) * model.shape.hidden * model.shape.feed_forward


def _components(model: ModelFlops, of_layer: float) -> float:
    """Forward and backward of layers that cost `of_layer`, their norms (1.5 operations a value of RMSNorm, 2 of LayerNorm), and
    the head."""
    s, norm = model.shape, (2.0 if model.layer_norm else 1.5) * model.shape.hidden
    return FORWARD_AND_BACKWARD * (s.layers * (of_layer + 2 * norm) + norm + 2 * s.hidden * s.vocabulary)
