"""Fuse the second half of decoder layers whose first half stays in transformers.

The layers of a hybrid model have a state, or an attention with an output gate, which have no fused
implementation. But their MLP is that of Llama. `HalfFusedLayer` fuses it, with the norm before it:

    x = x + mixer(norm(x))                  FirstHalf, by modules of transformers
    y = x + down(silu(gate(n)) * up(n))     OutputAndMLP, with n = norm(x)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.fused.formulas import ACTIVATIONS
from pretrain.model.fused.layers import (
    LLAMA_MLP,
    FusedLayer,
    full_name,
    mixed_stack,
    stacked_linears,
)

# Full names of the layer classes, whose MLP may be a mixture of experts.
_CLASSES = (
    "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5DecoderLayer",
    "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextDecoderLayer",
    "transformers.models.olmo_hybrid.modeling_olmo_hybrid.OlmoHybridLinearAttentionDecoderLayer",
)


def can_fuse_mlp(name: str, layer: Any, low_precision: Iterable[Collection[str]]) -> bool:
    """Return True if a HalfFusedLayer can replace the forward of a decoder layer.

    See `assess_layer` for the arguments.
    """
    if full_name(layer) not in _CLASSES or not hasattr(layer.mlp, "gate_proj"):
        return False
    if mixed_stack(name, LLAMA_MLP, low_precision):
        return False
    return layer.mlp.config.hidden_act in ACTIVATIONS[True]


class FirstHalf(GradientCheckpointingLayer):
    """First half of a decoder layer, which torch.compile can compile as it compiles a layer.

    The norm and the mixer belong to the decoder layer.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.norm = layer.input_layernorm
        self.mixer = getattr(layer, "linear_attn", None) or layer.self_attn

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the sum of `hidden_states` [1, tokens, hidden] and the output of the mixer."""
        mixed = self.mixer(hidden_states=self.norm(hidden_states), **kwargs)
        return hidden_states + (mixed if isinstance(mixed, Tensor) else mixed[0])


class HalfFusedLayer(FusedLayer):
    """Forward of a decoder layer whose second half is fused. See `FusedLayer` for the arguments."""

    def __init__(self, layer: Any, name: str, arithmetic: Arithmetic) -> None:
        self.unfused = layer.forward
        self.arithmetic = arithmetic
        self.first_half = FirstHalf(layer)
        self.mlp_norm = layer.post_attention_layernorm
        self.gated = True
        self.products = stacked_linears(layer, name, LLAMA_MLP, arithmetic)
        self.gate_up, self.down = self.products

    def _attend(self, x: Tensor, differentiable: bool, **kwargs: Any) -> tuple[None, Tensor]:
        """Return None in place of attention's output, which is part of x, and the new x."""
        return None, self.first_half(x[None], **kwargs).squeeze(0)
