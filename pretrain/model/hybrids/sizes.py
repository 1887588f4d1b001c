"""Sizes of hybrid models for the FLOP count, Muon and the memory estimate."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from pretrain.model.hybrids.families import mixers, mixing_functions

# Tokens that fla-core's kernel of the gated delta rule processes at once.
CHUNK = 64


def convolutions(model: PreTrainedModel) -> dict[str, Any]:
    """Return the weights of the convolutions by module name, [channels, 1, width].

    Each channel is convolved separately, so each weight has one multiply-add per token. The dict is
    empty for models that are not hybrid.
    """
    if not mixing_functions(model):
        return {}
    return {
        name: module.weight for name, module in model.named_modules() if type(module) is nn.Conv1d
    }


def state_products(model: PreTrainedModel) -> int:
    """Return the multiply-adds per token with the states of all layers, in forward.

    The count is that of the recurrence. The kernels compute in chunks, and need more. A gated delta
    rule multiplies the state S [D of keys, D of values] of a head with the key, adds the outer
    product of the key and the correction, and multiplies S with the query. A scan of Mamba-2 has
    only the last two products.
    """
    total = 0
    for _, mixer in mixers(model):
        if hasattr(mixer, "head_v_dim"):
            total += 3 * mixer.num_v_heads * mixer.head_k_dim * mixer.head_v_dim
        elif hasattr(mixer, "ssm_state_size"):
            total += 2 * mixer.num_heads * mixer.head_dim * mixer.ssm_state_size
    return total


def kept_values(model: PreTrainedModel) -> int:
    """Return the number of values per token that the states of all layers keep for backward.

    A value has two bytes. This is an estimate for fla-core's kernels. A convolution keeps its
    output. A gated delta rule keeps normalized queries and keys, its values and output, and a
    matrix of CHUNK columns for each head. A scan keeps queries, keys, inputs and values of each
    head in FP32, so each of them counts as two values.
    """
    total = 0
    for _, mixer in mixers(model):
        total += next(child for child in mixer.children() if type(child) is nn.Conv1d).out_channels
        if hasattr(mixer, "head_v_dim"):
            normalized = 2 * mixer.num_k_heads * mixer.head_k_dim
            total += normalized + mixer.num_v_heads * (2 * mixer.head_v_dim + CHUNK)
        elif hasattr(mixer, "ssm_state_size"):
            total += 4 * mixer.num_heads * (mixer.ssm_state_size + mixer.head_dim)
    return total


def layers_without_attention(model: PreTrainedModel) -> int:
    """Return the number of layers without attention. It is 0 for models that are not hybrid."""
    if not mixing_functions(model):
        return 0
    states = {name for name, _ in mixers(model)}
    attentions = [
        name
        for name, module in model.named_modules()
        if hasattr(module, "k_proj") and name not in states
    ]
    return model.config.get_text_config().num_hidden_layers - len(attentions)


def is_one_matrix(model: PreTrainedModel, module_name: str) -> bool:
    """Return True if Muon updates each weight of a module as one matrix, even if it is a stack.

    This holds for the projections of the recurrent layers. They stack matrices of different sizes,
    or stack matrices by heads, so they cannot be divided equally. For example, `in_proj_qkv` of
    Qwen3.5 has queries, keys and values.
    """
    return bool(mixing_functions(model)) and hasattr(model.get_submodule(module_name), "layer_idx")
