"""Training FLOPs, exactly: matrix products from the model's shapes, attention from the documents that were really there.

Only matrix products count, two operations a multiply-add, and those that gradient checkpointing repeats do not.

At the end stand the formulas behind other launchers' MFU, so that their figures can be compared with ours. All of them take every
sequence for one document of T tokens. docs/planning.md derives each and says where it differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foundation.errors import InputError

# FLOPs a weight and token: two forward, and as many for each of the gradients of input and weight
TRAINED = 6


@dataclass(frozen=True)
class Shape:
    """The sizes that formulas ask for, under the field's names; read from a Hugging Face configuration."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shape:
        """InputError where the configuration lacks one of the sizes, or has one for each layer."""
        config: PretrainedConfig = model.config.get_text_config()

        # architectures call one width by several names
        def first_of(*names: str, otherwise: int | None = None) -> int | None:
            try:
                return next(
                    (value for name in names if (value := getattr(config, name, None))), otherwise
                )
            except RuntimeError:  # it differs by layer
                return None

        hidden, heads = first_of("hidden_size", otherwise=0), first_of("num_attention_heads")
        one_head = getattr(config, "multi_query", False) and not getattr(
            config, "new_decoder_architecture", False
        )
        sizes = {
            "layers": first_of("num_hidden_layers"),
            "hidden": hidden,
            "heads": heads,
            "kv_heads": 1
            if one_head
            else first_of("num_key_value_heads", "num_kv_heads", otherwise=heads),
            "head_dim": first_of("head_dim", otherwise=heads and hidden // heads),
            "feed_forward": first_of(
                "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", otherwise=4 * hidden
            ),
            "vocabulary": first_of("vocab_size"),
        }
        if unknown := [name for name, size in sizes.items() if type(size) is not int]:
            what = f"{type(model).__name__} is not of equal layers with attention: it has no one size for {', '.join(unknown)}"
            raise InputError(f"model: {what}; name another")
        return cls(**sizes)

    @property
    def query_width(self) -> int:
        """Width of all heads' queries together; not always `hidden` (Qwen3-0.6B: 2048 against 1024)."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class ModelFlops:
    """What one model costs to train. All figures are forward and backward together."""

    shape: Shape
    attention_weights: int  # of the layers' linears that are attention's
    mlp_weights: int  # of all others, and of a mixture's routers
    # of the head's product, though it may share them with the embedding; looking up a row is no
    # product
    head_weights: int
    # weights in no known product or embedding; empty: the count is complete
    uncounted: tuple[str, ...]
    parameters: int  # tied weights once
    embedding_parameters: int  # input embeddings, learned positions among them
    position_parameters: int
    tied: bool
    layer_norm: bool = False  # its norms are LayerNorm; else RMSNorm
    expert_weights: int = 0  # of a mixture: of the stacked experts that a token is multiplied with
    idle_weights: int = 0  # and of those that it is not
    choices: int = 0  # experts of a token in a layer

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFlops:
        """Count `model`, which is on the meta device, before its layers are fused or converted to another precision."""
        embeddings = {
            id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)
        }
        token_weight, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        linears = {
            n: m.weight
            for n, m in model.named_modules()
            if isinstance(m, nn.Linear | Conv1D) and m is not head
        }
        attention = sum(
            w.numel() for name, w in linears.items() if "attn" in name or "attention" in name
        )
        inside = sum(map(torch.numel, linears.values()))
        known = {*embeddings, *map(id, linears.values()), id(getattr(head, "weight", None))}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        unknown = {name: p for name, p in trained.items() if p.ndim >= 2 and id(p) not in known}
        # experts a token
        chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
        chosen = chosen if type(chosen) is int else None  # it may differ by layer
        stacks = {
            name: p
            for name, p in unknown.items()
            if chosen and (p.ndim == 3 or ".experts." in name)
        }
        routers = {
            name: p
            for name, p in unknown.items()
            if name not in stacks and len(p) in map(len, stacks.values())
        }
        products = [p for p in stacks.values() if p.ndim == 3]  # without their biases
        active = sum(chosen * p[0].numel() for p in products)
        return cls(
            shape=Shape.of(model),
            attention_weights=attention,
            mlp_weights=inside - attention + sum(map(torch.numel, routers.values())),
            head_weights=head.weight.numel() if head is not None else 0,
            uncounted=tuple(name for name in unknown if name not in stacks | routers),
            parameters=sum(p.numel() for p in model.parameters()),
            embedding_parameters=sum(embeddings.values()),
            position_parameters=sum(
                size for key, size in embeddings.items() if key != id(token_weight)
            ),
            tied=head is not None and head.weight is token_weight,
            layer_norm=any(isinstance(module, nn.LayerNorm) for module in model.modules()),
            expert_weights=active,
            idle_weights=sum(map(torch.numel, products)) - active,
            choices=chosen if products else 0,
        )

    @property
    def left_out(self) -> str:
        """What to know of the `uncounted`, where there are some."""
        more = ", ..." if len(self.uncounted) > 1 else ""
        return f"FLOPs are not complete, as shapes of weights do not tell them: {self.uncounted[0]}{more}"

    @property
    def gated(self) -> bool:
        """Whether the MLP is three matrices (SwiGLU) and not two: by its size, as some architectures stack two of the three."""
        return (
            self.mlp_weights > 2.5 * self.shape.layers * self.shape.hidden * self.shape.feed_forward
        )

    @property
    def per_token_matrix(self) -> float:
        """FLOPs a token, attention products not included."""
        return float(
            TRAINED
            * (self.attention_weights + self.mlp_weights + self.expert_weights + self.head_weights)
        )

    @property
    def per_squared_length(self) -> float:
        """FLOPs for each unit of a document's squared length, as Megatron-LM counts variable-length attention.

        A document of n tokens takes 2 n² · query_width for the scores and as many for their sum over values, in each layer,
        three times with backward: 12 n² · query_width. Causality leaves half of that. A sliding window is not considered.
        """
        return 6.0 * self.shape.layers * self.shape.query_width

    def step(self, tokens: int, sum_squared_lengths: float) -> float:
        """FLOPs of a step over `tokens` tokens (padding included: it is computed) whose documents have these squared lengths."""
        return self.per_token_matrix * tokens + self.per_squared_length * sum_squared_lengths


def ours(model: ModelFlops, length: int) -> float:
    """Every product by its shape, attention causal: one document of `length` tokens, which is the most that a pack can cost."""
    return model.step(length, length**2) / length


def palm(model: ModelFlops, length: int) -> float:
    """6N + 12LHQT, N without any embedding, a tied head among them, and without a mixture's idle experts."""
    return 6.0 * (
        model.parameters - model.idle_weights - model.embedding_parameters
    ) + _square_attention(model, length)


def nanogpt(model: ModelFlops, length: int) -> float:
    """6N + 12LHQT, N without learned positions only: an input embedding of its own counts, though it multiplies nothing."""
    return 6.0 * (
        model.parameters - model.idle_weights - model.position_parameters
    ) + _square_attention(model, length)


def combined_formula(model: ModelFlops, length: int) -> float:
    """llm_TII's second version: attention as 2 S H^2 (2 + 2/G) + 4 S^2 H for S tokens, and the rotation of queries and keys."""
    rotation = 0 if model.position_parameters else 4 * model.shape.hidden
    return _components(model, length, rotation)


def component_summation_v2025(model: ModelFlops, length: int) -> float:
    """llm_TII's third version, `component_summation_v2025`: the same without the rotation, product by product."""
    return _components(model, length)


def megatron(model: ModelFlops, length: int) -> float:
    """`num_floating_point_operations` of Megatron-LM for one document a sequence, before it halved attention for causality."""
    s, h = model.shape, model.shape.hidden
    attention = (1 + s.kv_heads / s.heads + length / h) * s.query_width / h
    mlp = s.feed_forward / h * (1.5 if model.gated else 1)
    return 12.0 * s.layers * h**2 * (attention + mlp + s.vocabulary / (2 * s.layers * h))


# By name: FLOPs a token, forward and backward, of sequences of so many tokens.
FORMULAS: dict[str, Callable[[ModelFlops, int], float]] = {
    formula.__name__: formula
    for formula in (ours, palm, nanogpt, combined_formula, component_summation_v2025, megatron)
}


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


def _components(model: ModelFlops, length: int, rotation: int = 0) -> float:
    """Forward and backward of layers, their norms (1.5 operations a value of RMSNorm, 2 of LayerNorm), and the head."""
    of_layer = _attention(model, length) + _feed_forward(model) + rotation
    s, norm = model.shape, (2.0 if model.layer_norm else 1.5) * model.shape.hidden
    return 3 * (s.layers * (of_layer + 2 * norm) + norm + 2 * s.hidden * s.vocabulary)
