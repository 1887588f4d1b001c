"""Exact training FLOPs, and the formulas behind the MFU of other projects.

FLOPs of matrix products follow from the shapes of the model. FLOPs of attention follow from the
lengths of the documents in each step. Only matrix products count, with two operations per
multiply-add. Products that gradient checkpointing repeats do not count.

The formulas of other projects follow at the end, so that their MFU can be compared with ours. They
treat each sequence as one document of T tokens. docs/planning.md derives each formula and lists the
differences.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foundation.errors import InputError

# FLOPs per weight and token: 2 in forward, 2 for the input gradient, 2 for the weight gradient.
TRAINED = 6


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, read from its Hugging Face configuration."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shape:
        """Read the sizes of `model`.

        Raises InputError if the configuration lacks a size or has a different one for each layer.
        """
        config: PretrainedConfig = model.config.get_text_config()

        def first_of(*names: str, default: int = 0) -> int:
            """Return the first attribute that is set. Architectures name one width differently."""
            with suppress(RuntimeError):  # the size differs between layers
                values = (getattr(config, name, None) for name in names)
                return next(filter(None, values), default)
            return 0

        hidden = first_of("hidden_size")
        heads = first_of("num_attention_heads")
        kv_heads = first_of("num_key_value_heads", "num_kv_heads", default=heads)
        if first_of("multi_query") and not first_of("new_decoder_architecture"):
            kv_heads = 1
        sizes = {
            "layers": first_of("num_hidden_layers"),
            "hidden": hidden,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": first_of("head_dim", default=heads and hidden // heads),
            "feed_forward": first_of(
                "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden
            ),
            "vocabulary": first_of("vocab_size"),
        }
        missing = [name for name, size in sizes.items() if type(size) is not int or not size]
        if missing:
            raise InputError(
                f"model: {type(model).__name__} does not have equal layers with attention: it has "
                f"no single size for {', '.join(missing)}; use another model"
            )
        return cls(**sizes)

    @property
    def query_width(self) -> int:
        """Return the width of the queries of all heads.

        It may differ from `hidden`. Qwen3-0.6B has 2048 and 1024.
        """
        return self.heads * self.head_dim


@dataclass(frozen=True)
class ModelFlops:
    """Training FLOPs of a model, forward and backward together."""

    shape: Shape
    # Weights in the linears of attention.
    attention_weights: int
    # Weights in the other linears of the layers, and in the routers of a mixture of experts.
    mlp_weights: int
    # Weights of the head's product, also if they are tied to the embedding. The embedding lookup is
    # not a product.
    head_weights: int
    # Names of weights that belong to no recognized product or embedding. Empty if the count is
    # complete.
    uncounted: tuple[str, ...]
    # Number of parameters. Tied weights count once.
    parameters: int
    # Parameters of input embeddings, including learned positions.
    embedding_parameters: int
    position_parameters: int
    # The head is tied to the embedding.
    tied: bool
    # The norms are LayerNorm instead of RMSNorm.
    layer_norm: bool = False
    # Weights of the experts that a token is multiplied with, in a mixture of experts.
    expert_weights: int = 0
    # Weights of the other experts.
    idle_weights: int = 0
    # Number of experts per token and layer.
    choices: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFlops:
        """Count the weights of `model`.

        The model must be on the meta device, before its layers are fused or converted.
        """
        embeddings = {
            id(module.weight): module.weight.numel()
            for module in model.modules()
            if isinstance(module, nn.Embedding)
        }
        token_weight = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        linears = {
            name: module.weight
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and module is not head
        }
        in_linears = sum(map(torch.numel, linears.values()))
        in_attention = sum(
            weight.numel()
            for name, weight in linears.items()
            if "attn" in name or "attention" in name
        )
        counted = {*embeddings, *map(id, linears.values()), id(getattr(head, "weight", None))}
        remaining = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.ndim >= 2 and id(parameter) not in counted
        }
        choices = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
        if type(choices) is not int:  # absent, or different for each layer
            choices = 0
        experts, routers = _split_experts(remaining) if choices else ({}, {})
        products = [parameter for parameter in experts.values() if parameter.ndim == 3]  # no biases
        active = sum(choices * product[0].numel() for product in products)
        return cls(
            shape=Shape.of(model),
            attention_weights=in_attention,
            mlp_weights=in_linears - in_attention + sum(map(torch.numel, routers.values())),
            head_weights=head.weight.numel() if head is not None else 0,
            uncounted=tuple(name for name in remaining if name not in experts | routers),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            embedding_parameters=sum(embeddings.values()),
            position_parameters=sum(
                size for key, size in embeddings.items() if key != id(token_weight)
            ),
            tied=head is not None and head.weight is token_weight,
            layer_norm=any(isinstance(module, nn.LayerNorm) for module in model.modules()),
            expert_weights=active,
            idle_weights=sum(map(torch.numel, products)) - active,
            choices=choices if products else 0,
        )

    @property
    def left_out(self) -> str:
        """Return a warning that names the `uncounted` weights. There must be some."""
        more = ", ..." if len(self.uncounted) > 1 else ""
        return (
            "the FLOPs are incomplete, because they do not follow from the shape of "
            f"{self.uncounted[0]}{more}"
        )

    @property
    def gated(self) -> bool:
        """Return True if the MLP has three matrices (SwiGLU) instead of two.

        The size decides, because some architectures stack two of the three matrices.
        """
        one_matrix = self.shape.layers * self.shape.hidden * self.shape.feed_forward
        return self.mlp_weights > 2.5 * one_matrix

    @property
    def per_token_matrix(self) -> float:
        """Return the FLOPs per token of all products with weights."""
        in_layers = self.attention_weights + self.mlp_weights + self.expert_weights
        return float(TRAINED * (in_layers + self.head_weights))

    @property
    def per_squared_length(self) -> float:
        """Return the attention FLOPs per squared document length, as Megatron-LM counts them.

        In each layer, a document of n tokens takes 2 n² · query_width FLOPs for the scores and
        2 n² · query_width for the weighted sum of the values. Backward doubles both again, which
        makes 12 n² · query_width. Causal attention needs half of that. Sliding windows are not
        considered.
        """
        return 6.0 * self.shape.layers * self.shape.query_width

    def step(self, tokens: int, sum_squared_lengths: float) -> float:
        """Return the FLOPs of a step.

        Args:
            tokens: Number of tokens, including padding, which is computed too.
            sum_squared_lengths: Sum of the squared lengths of the documents.
        """
        return self.per_token_matrix * tokens + self.per_squared_length * sum_squared_lengths


def _split_experts(
    parameters: dict[str, nn.Parameter],
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return the stacked weights and biases of experts among `parameters`, and the routers."""
    experts = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.ndim == 3 or ".experts." in name
    }
    numbers_of_experts = {len(parameter) for parameter in experts.values()}
    routers = {
        name: parameter
        for name, parameter in parameters.items()
        if name not in experts and len(parameter) in numbers_of_experts
    }
    return experts, routers


# The formulas below return training FLOPs per token, forward and backward, for sequences of
# `length` tokens. L: layers, H: heads, Q: head dimension, T: length, N: parameters.


def ours(model: ModelFlops, length: int) -> float:
    """Count each product by its shape, with causal attention over one document per sequence.

    One document of `length` tokens is the most expensive content of a pack.
    """
    return model.step(length, length**2) / length


def palm(model: ModelFlops, length: int) -> float:
    """Return 6N + 12LHQT, where N excludes embeddings, a tied head, and idle experts."""
    return _square_attention(model, length, excluded=model.embedding_parameters)


def nanogpt(model: ModelFlops, length: int) -> float:
    """Return 6N + 12LHQT, where N excludes learned positions and idle experts.

    An untied input embedding counts, although no product uses it.
    """
    return _square_attention(model, length, excluded=model.position_parameters)


def combined_formula(model: ModelFlops, length: int) -> float:
    """Return the FLOPs by the second version of llm_TII.

    Attention takes 2 S H^2 (2 + 2/G) + 4 S^2 H for S tokens. The rotation of queries and keys
    counts.
    """
    return _components(model, length, 0 if model.position_parameters else 4 * model.shape.hidden)


def component_summation_v2025(model: ModelFlops, length: int) -> float:
    """Return the FLOPs by the third version of llm_TII, product by product without rotation."""
    return _components(model, length)


def megatron(model: ModelFlops, length: int) -> float:
    """Return Megatron-LM's `num_floating_point_operations` for one document per sequence.

    This is the version that does not halve attention for causality.
    """
    shape = model.shape
    hidden = shape.hidden
    kv_share = shape.kv_heads / shape.heads
    attention = (1 + kv_share + length / hidden) * shape.query_width / hidden
    mlp = shape.feed_forward / hidden * (1.5 if model.gated else 1)
    head = shape.vocabulary / (2 * shape.layers * hidden)
    return 12.0 * shape.layers * hidden**2 * (attention + mlp + head)


# The formulas by name.
FORMULAS: dict[str, Callable[[ModelFlops, int], float]] = {
    formula.__name__: formula
    for formula in (ours, palm, nanogpt, combined_formula, component_summation_v2025, megatron)
}


def attention_to_ffn_ratio(model: ModelFlops, length: int) -> float:
    """Return attention FLOPs divided by MLP FLOPs, by the third version of llm_TII.

    Projections are part of attention.
    """
    return _attention(model, length) / _feed_forward(model)


def _square_attention(model: ModelFlops, length: int, excluded: int) -> float:
    """Return 6N + 12LHQT. N are the parameters without idle experts and `excluded` ones.

    12LHQT are scores and weighted values for all pairs of tokens, also masked ones.
    """
    counted = model.parameters - model.idle_weights - excluded
    return 6.0 * counted + 12.0 * model.shape.layers * model.shape.query_width * length


def _attention(model: ModelFlops, length: int) -> float:
    """Return the forward FLOPs per token of one layer's attention, with all projections.

    llm_TII assumes that heads * head_dim equals `hidden`.
    """
    hidden = model.shape.hidden
    query = 2 * hidden**2
    key = query / (model.shape.heads / model.shape.kv_heads)
    # The output takes as much as the query, and the value as much as the key.
    return query + 2 * key + query + 4 * length * hidden


def _feed_forward(model: ModelFlops) -> float:
    """Return the forward FLOPs per token of one layer's MLP."""
    return (6 if model.gated else 4) * model.shape.hidden * model.shape.feed_forward


def _components(model: ModelFlops, length: int, rotation: int = 0) -> float:
    """Return the FLOPs per token of layers, norms and head by llm_TII, forward and backward.

    A norm takes 1.5 operations per value for RMSNorm and 2 for LayerNorm.
    """
    shape = model.shape
    norm = (2.0 if model.layer_norm else 1.5) * shape.hidden
    layer = _attention(model, length) + _feed_forward(model) + rotation + 2 * norm
    head = 2 * shape.hidden * shape.vocabulary
    return 3 * (shape.layers * layer + norm + head)
