"""Which decoder layers can be fused, and the forward that takes their place.

A layer is fused where it is exactly one of the classes known here: a subclass may compute something else. Its modules and
parameters stay where they are; only its `forward` is another, and without packed documents, as in generation, it is the old one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from pretrain.model.fused.arithmetic import Activation, Arithmetic, Norm, StackedProduct
from pretrain.model.fused.functions import NormMLPAdd, NormProduct, ProductAdd, RotatedAttention, Rotation
from pretrain.model.fused.heads import Heads
from pretrain.model.fused.weights import StackedWeight

# transformers' names of the activations -> ours, for gated layers and for GPT-2's.
_GATED: dict[str, Activation] = {"silu": "swiglu", "swish": "swiglu"}
_PLAIN: dict[str, Activation] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


@dataclass(frozen=True)
class Parts:
    """The modules of a decoder layer by what they do; names are those inside the layer."""

    attention: nn.Module
    attention_norm: Norm
    qkv: Mapping[str, nn.Module]  # one stacked product
    head_norms: tuple[nn.Module, ...]  # of queries and keys, or none
    output: Mapping[str, nn.Module]
    mlp_norm: Norm
    below: Mapping[str, nn.Module]  # gate and up, or one
    activation: Activation
    above: Mapping[str, nn.Module]
    heads: Heads
    rotary: bool


def unfit(layer: nn.Module) -> str | None:
    """Why `layer` cannot be fused; None if it can."""
    if any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules()):
        return "has hooks, which no module of a fused layer would run"
    if type(layer) is GPT2Block:
        if layer.attn.reorder_and_upcast_attn or hasattr(layer, "crossattention"):
            return "attends in a way of its own"
        if any(m.p for m in layer.modules() if isinstance(m, nn.Dropout)):
            return "has dropout"
        return None if layer.attn.config.activation_function in _PLAIN else "has an activation that is not fused"
    if type(layer) not in (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer):
        return f"no fused form of {type(layer).__name__}"
    return None if layer.self_attn.config.hidden_act in _GATED else "has an activation that is not fused"


def parts_of(layer: nn.Module) -> Parts:
    """The parts of a layer that is not `unfit`."""
    if type(layer) is GPT2Block:
        attention, mlp = layer.attn, layer.mlp
        return Parts(
            attention=attention,
            attention_norm=Norm(layer.ln_1, "layer", layer.ln_1.eps),
            qkv={"attn.c_attn": attention.c_attn},
            head_norms=(),
            output={"attn.c_proj": attention.c_proj},
            mlp_norm=Norm(layer.ln_2, "layer", layer.ln_2.eps),
            below={"mlp.c_fc": mlp.c_fc},
            activation=_PLAIN[attention.config.activation_function],
            above={"mlp.c_proj": mlp.c_proj},
            heads=Heads(attention.num_heads, attention.num_heads, attention.head_dim),
            rotary=False,
        )
    attention, mlp, config = layer.self_attn, layer.mlp, layer.self_attn.config
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    normed = hasattr(attention, "q_norm")
    return Parts(
        attention=attention,
        attention_norm=Norm(first, "rms", first.variance_epsilon),
        qkv={f"self_attn.{name}": getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")},
        head_norms=(attention.q_norm, attention.k_norm) if normed else (),
        output={"self_attn.o_proj": attention.o_proj},
        mlp_norm=Norm(second, "rms", second.variance_epsilon),
        below={f"mlp.{name}": getattr(mlp, name) for name in ("gate_proj", "up_proj")},
        activation=_GATED[config.hidden_act],
        above={"mlp.down_proj": mlp.down_proj},
        heads=Heads(config.num_attention_heads, config.num_key_value_heads, attention.head_dim),
        rotary=True,
    )


class FusedLayer:
    """The forward of one decoder layer. Not a module: what it computes with belongs to the layer that it stands in for."""

    def __init__(self, layer: nn.Module, name: str, arithmetic: Arithmetic, *, low_precision: bool) -> None:
        """`layer`, called `name` in its model, in the recipe's low precision or else in the arithmetic's own dtype."""
        parts = parts_of(layer)
        self.parts = parts
        self.low_precision = low_precision
        self._arithmetic = arithmetic
        self.unfused = layer.forward

        def make(linears: Mapping[str, nn.Module], joined: str) -> StackedProduct:
            weights = StackedWeight(list(linears.values()))
            weights.lay_together()
            members = tuple(f"{name}.{member}" for member in linears)
            stacked = members[0] if len(members) == 1 else f"{name}.{joined}"
            return arithmetic.product(stacked, members, weights, low_precision=low_precision)

        self.qkv = make(parts.qkv, "self_attn.qkv_proj")
        self.output = make(parts.output, "")
        self.below = make(parts.below, "mlp.gate_up_proj")
        self.above = make(parts.above, "")

    @property
    def products(self) -> tuple[StackedProduct, ...]:
        return self.qkv, self.output, self.below, self.above

    @torch.compiler.disable
    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        cu_seqlens: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """[1, tokens, hidden] -> the same; with `cu_seqlens` of packed documents, else as transformers does it."""
        if cu_seqlens is None:
            if position_embeddings is not None:
                kwargs["position_embeddings"] = position_embeddings
            return self.unfused(hidden_states, *args, **kwargs)
        # Viewed and not indexed: the gradient of an index is a tensor of zeros, into which the layer's gradient would be copied.
        x, parts, arithmetic = hidden_states.squeeze(0), self.parts, self._arithmetic
        arithmetic.differentiable = torch.is_grad_enabled()  # inside of an autograd.Function nobody could tell
        qkv, x = NormProduct.apply(
            arithmetic, parts.attention_norm, self.qkv, x, *parts.attention_norm.parameters, *self.qkv.weights.parameters
        )
        attended = self._attend(qkv, position_embeddings, cu_seqlens, **kwargs)
        x = ProductAdd.apply(arithmetic, self.output, attended, x, *self.output.weights.parameters)
        parameters = (*parts.mlp_norm.parameters, *self.below.weights.parameters, *self.above.weights.parameters)
        return NormMLPAdd.apply(arithmetic, parts.mlp_norm, self.below, parts.activation, self.above, x, *parameters)[None]

    def _attend(
        self,
        qkv: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        cu_seqlens: Tensor,
        *,
        max_seqlen: int,
        document_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """qkv [tokens, (query + 2 kv) x dim] -> [tokens, query x dim]."""
        attention, heads = self.parts.attention, self.parts.heads
        name, norms = attention.config._attn_implementation, [norm.weight for norm in self.parts.head_norms]
        eps = self.parts.head_norms[0].variance_epsilon if norms else 0.0
        if not self.parts.rotary:
            q, k, v = (part.unflatten(1, (-1, heads.dim)) for part in qkv.split(heads.query * heads.dim, dim=1))
        else:
            cos, sin = (table.flatten(0, -2) for table in position_embeddings)
            if name == "packed_cudnn":
                scale = attention.scaling
                return RotatedAttention.apply(qkv, cos, sin, heads, eps, cu_seqlens, max_seqlen, scale, *norms)
            q, k, v = Rotation.apply(qkv, cos, sin, heads, eps, *norms)
        function = AttentionInterface().get_interface(name, None)
        options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "scaling": attention.scaling}
        if document_mask is not None:
            options["document_mask"] = document_mask
        q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
        return function(attention, q, k, v, None, **options)[0].squeeze(0).flatten(1)
