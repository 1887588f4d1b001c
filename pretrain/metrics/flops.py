"""Compute the exact FLOPs of training, and the FLOPs by nanoGPT's formula.

Only matrix products are counted. A multiply-add is two operations. The FLOPs of linear layers
and experts are computed from the number of their weights. The FLOPs of attention are computed from
the lengths of the documents in each step. A product that gradient checkpointing computes twice is
counted once.

nanoGPT's formula treats each sequence as one document of T tokens. docs/developers/flops.md
derives both formulas, and lists the formulas of other projects.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foundation.errors import InputError
from pretrain.model.hybrids.sizes import (
    convolutions,
    kept_values,
    layers_without_attention,
    state_products,
)
from pretrain.model.scores import changed_scores

# FLOPs per weight and token: 2 in forward, 2 for the input gradient, 2 for the weight gradient.
FLOPS_PER_WEIGHT = 6
# Names of the width of the feed-forward layer in the configurations of architectures.
_FEED_FORWARD = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")


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
        """Read the sizes of `model` from its configuration.

        Raises InputError if the configuration lacks a size, or if a size differs between layers.
        """
        config: PretrainedConfig = model.config.get_text_config()

        def first_of(*names: str, default: int = 0) -> int:
            """Return the value of the first attribute in `names` that is set, else `default`.

            Architectures use different names for the same size. Return 0 if the size differs
            between layers.
            """
            with suppress(RuntimeError):  # raised by transformers if the size differs
                values = (getattr(config, name, None) for name in names)
                return next(filter(None, values), default)
            return 0

        hidden = first_of("hidden_size")
        heads = first_of("num_attention_heads")
        sizes = {
            "layers": first_of("num_hidden_layers"),
            "hidden": hidden,
            "heads": heads,
            "kv_heads": first_of("num_key_value_heads", "num_kv_heads", default=heads),
            "head_dim": first_of("head_dim", default=hidden // heads if heads else 0),
            "feed_forward": first_of(*_FEED_FORWARD, default=4 * hidden),
            "vocabulary": first_of("vocab_size"),
        }
        missing = [name for name, size in sizes.items() if type(size) is not int or not size]
        if missing:
            raise InputError(
                f"model: the configuration of {type(model).__name__} does not define one value of "
                f"{', '.join(missing)} for all layers, so its FLOPs cannot be counted; choose a "
                "model with attention in every layer and with layers of equal size"
            )
        return cls(**sizes)

    @property
    def query_width(self) -> int:
        """Return the width of the queries of all heads together.

        The width may differ from `hidden`. In Qwen3-0.6B, the width is 2048 and `hidden` is 1024.
        """
        return self.heads * self.head_dim


@dataclass(frozen=True)
class ModelFlops:
    """Training FLOPs of a model, forward and backward together."""

    shape: Shape
    # Number of weights in the linears of attention.
    attention_weights: int
    # Number of weights in the other linears of the layers, and in the routers of a mixture of
    # experts.
    mlp_weights: int
    # Number of weights of the LM head. Weights that are tied to the embedding are included, because
    # the head multiplies by them. The embedding lookup is no matrix product and is not counted.
    head_weights: int
    # Names of weights whose FLOPs are not counted, because the weights belong to no embedding and
    # to no module whose matrix products are known. Empty if all FLOPs are counted.
    uncounted: tuple[str, ...]
    # Number of parameters. Tied weights are counted once.
    parameters: int
    # Number of parameters of the input embeddings, including learned positions.
    embedding_parameters: int
    # Number of parameters of learned positions.
    position_parameters: int
    # True if the LM head is tied to the embedding.
    tied: bool
    # For a mixture of experts: number of expert weights that one token is multiplied by, summed
    # over the layers.
    expert_weights: int = 0
    # Number of all other expert weights, summed over the layers. They belong to the experts that
    # the token does not choose.
    idle_weights: int = 0
    # Number of experts that a token chooses in each layer, or 0 without experts.
    experts_per_token: int = 0
    # Number of weights that Muon updates, or 0 with AdamW.
    muon_weights: int = 0
    # Change of the attention scores in words, or "". Only some kernels compute changed scores.
    changed_scores: str = ""
    # For a hybrid model: number of layers without attention.
    without_attention: int = 0
    # For a hybrid model: multiply-adds per token with the states of its layers, in forward.
    state_products: int = 0
    # For a hybrid model: number of 2-byte values per token that its states keep for backward.
    state_values: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFlops:
        """Count the weights of `model`.

        The model must be on the meta device. Its layers must not be fused or converted yet.
        """
        embeddings = {
            id(module.weight): module.weight.numel()
            for module in model.modules()
            if isinstance(module, nn.Embedding)
        }
        token_weight: Any = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        head_weight: Any = head.weight if head is not None else None
        linears = _linear_weights(model)  # without the LM head, which is counted separately
        in_attention = [
            weight for name, weight in linears.items() if "attn" in name or "attention" in name
        ]
        # Compare weights by identity, because tied weights have several names.
        counted = {*embeddings, *map(id, linears.values()), id(head_weight)}
        remaining = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.ndim >= 2 and id(parameter) not in counted
        }
        experts_per_token = _experts_per_token(model)
        experts, routers = _split_experts(remaining) if experts_per_token else ({}, {})
        # Stacked weights are [experts, rows, columns]. The biases of the experts have two
        # dimensions, and no matrix product uses them.
        stacked = [parameter for parameter in experts.values() if parameter.ndim == 3]
        # A token is multiplied by the weights of the experts that it chooses. `[0]` is one expert.
        expert_weights = sum(experts_per_token * parameter[0].numel() for parameter in stacked)
        attention_weights = _size(in_attention)
        embedding_parameters = sum(embeddings.values())
        return cls(
            shape=Shape.of(model),
            attention_weights=attention_weights,
            mlp_weights=_size(linears.values()) - attention_weights + _size(routers.values()),
            head_weights=head_weight.numel() if head_weight is not None else 0,
            uncounted=tuple(name for name in remaining if name not in experts | routers),
            parameters=_size(model.parameters()),
            embedding_parameters=embedding_parameters,
            position_parameters=embedding_parameters - embeddings[id(token_weight)],
            tied=head_weight is token_weight,
            expert_weights=expert_weights,
            idle_weights=_size(stacked) - expert_weights,
            experts_per_token=experts_per_token if stacked else 0,
            changed_scores=changed_scores(model),
            without_attention=layers_without_attention(model),
            state_products=state_products(model),
            state_values=kept_values(model),
        )

    @property
    def uncounted_warning(self) -> str:
        """Return a warning about the `uncounted` weights. `uncounted` must not be empty."""
        return (
            "the FLOPs are incomplete, because the FLOPs of some weights cannot be computed from "
            f"their shape, for example of {self.uncounted[0]}"
        )

    @property
    def per_token_matrix(self) -> float:
        """Return the FLOPs per token of products with weights and states, forward and backward."""
        in_layers = self.attention_weights + self.mlp_weights + self.expert_weights
        return float(FLOPS_PER_WEIGHT * (in_layers + self.head_weights + self.state_products))

    @property
    def per_squared_length(self) -> float:
        """Return the attention FLOPs per squared document length, as Megatron-LM counts them.

        In each layer, the forward of a document of n tokens takes 2 n² · query_width FLOPs for the
        scores and 2 n² · query_width for the weighted sum of the values. Backward takes twice the
        FLOPs of forward, so both together take 12 n² · query_width. Causal attention takes half of
        that. Sliding windows are ignored.
        """
        return 6.0 * (self.shape.layers - self.without_attention) * self.shape.query_width

    def step(self, tokens: int, sum_squared_lengths: float) -> float:
        """Return the FLOPs of a step.

        Args:
            tokens: Number of tokens in the step. It includes padding, because the products are
                computed for padding too.
            sum_squared_lengths: Sum of the squared lengths of the documents in the step.
        """
        return self.per_token_matrix * tokens + self.per_squared_length * sum_squared_lengths


def _linear_weights(model: PreTrainedModel) -> dict[str, Any]:
    """Return the weights of the linear layers of `model` by module name, without the LM head.

    The convolutions of hybrid models are included.
    """
    head = model.get_output_embeddings()
    linears = {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    return linears | convolutions(model)


def _experts_per_token(model: PreTrainedModel) -> int:
    """Return the number of experts that a token chooses in each layer.

    Return 0 if the model has no experts, or if the number differs between layers. The weights of
    such experts are then `uncounted`.
    """
    number = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if type(number) is not int:
        return 0
    return number


def _size(tensors: Iterable[torch.Tensor]) -> int:
    """Return the number of values in all tensors."""
    return sum(map(torch.numel, tensors))


def _split_experts(
    parameters: dict[str, nn.Parameter],
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Select the parameters of experts and of routers from `parameters`.

    Return two dicts by parameter name: the stacked weights and biases of the experts, and the
    weights of the routers. Parameters that belong to neither are dropped.
    """
    # Stacked weights are [experts, rows, columns].
    experts = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.ndim == 3 or ".experts." in name
    }
    numbers_of_experts = {len(parameter) for parameter in experts.values()}
    # The weight of a router has a row for each expert.
    routers = {
        name: parameter
        for name, parameter in parameters.items()
        if name not in experts and len(parameter) in numbers_of_experts
    }
    return experts, routers


def flops_of_nanogpt(model: ModelFlops, length: int) -> float:
    """Return the training FLOPs per token by the formula of nanoGPT, 6N + 12LHQT.

    The FLOPs are for forward and backward together, for sequences of `length` tokens. N is the
    number of parameters without learned positions and idle experts. N includes an untied input
    embedding, although no matrix product uses it. The term 12LHQT counts the scores and the
    weighted sum of the values for all pairs of tokens, including masked pairs. L: layers with
    attention, H: heads, Q: head dimension, T: length.
    """
    counted = model.parameters - model.idle_weights - model.position_parameters
    layers = model.shape.layers - model.without_attention
    return 6.0 * counted + 12.0 * layers * model.shape.query_width * length
