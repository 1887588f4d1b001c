"""Fused decoder layers: the choice of layers, and the forward that replaces theirs.

Only layers of known classes are fused. A subclass may compute something else, so it is not. Modules
and parameters of a fused layer stay where they are; only its `forward` is replaced. Without packed
documents, as in generation, the original forward is called.

A fused layer has two autograd nodes instead of many. The output of a norm is written once, in the
format that the next matrix product reads. The gradient of the residual is added in the kernel of
the norm's gradient. Weight gradients are added directly to the main gradients of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from pretrain.model.attention import flash_backward_in_parts, flash_forward
from pretrain.model.fused.arithmetic import Arithmetic, StackedLinear
from pretrain.model.fused.heads import HeadNorms, Heads
from pretrain.precision.gemm import GemmEngine
from pretrain.precision.scope import LINEARS, Decision

Gradients = tuple[Tensor | None, ...]
# The attention that is one node with the rotation: the backward of the rotation sums the parts of
# dk and dv.
ROTATED_ATTENTION = "packed_fa4"
# Classes of layers that can be fused, by full name. Importing the classes would import four
# architectures at every start.
_FUSED = {
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer",
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer",
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer",
}
# The products of such a layer, with the linears that are stacked in each.
_STACKS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


# ── The choice of layers ──


@dataclass(frozen=True)
class Parts:
    """Linears, head norms and head layout of a decoder layer that can be fused.

    `stacks` has one mapping for each product: queries, keys and values; attention output; gate and
    up; down. A mapping has the stacked linears by their name in the layer. `head_norms` are the
    norms of queries and keys, or empty.
    """

    stacks: tuple[Mapping[str, nn.Linear], ...]
    head_norms: tuple[Any, ...]
    heads: Heads

    @classmethod
    def of(cls, layer: Any) -> Parts:
        """Return the parts of a layer whose class is in `_FUSED`."""
        attention = layer.self_attn
        config = attention.config
        stacks = tuple(
            {name: layer.get_submodule(name) for name in names} for names in _STACKS.values()
        )
        norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
        heads = Heads(config.num_attention_heads, config.num_key_value_heads, attention.head_dim)
        return cls(stacks, norms, heads)


def assess_layer(
    name: str, layer: Any, decisions: Mapping[str, Decision]
) -> tuple[str | None, frozenset[str]]:
    """Return why a layer cannot be fused, or None, and its linears in low precision.

    A layer is not fused if the linears of one stacked product have different precisions.

    Args:
        name: Name of the layer in its model.
        layer: The decoder layer.
        decisions: Precision of each linear of the model by name. Empty if nothing is quantized.

    Returns:
        The reason, and the names in the model of the linears that are in low precision.
    """
    linears = [
        f"{name}.{part}" for part, module in layer.named_modules() if isinstance(module, LINEARS)
    ]
    low = frozenset(linear for linear in linears if decisions and decisions[linear].reason is None)
    if f"{type(layer).__module__}.{type(layer).__qualname__}" not in _FUSED:
        return f"no fused form of {type(layer).__name__}", low
    if layer.self_attn.config.hidden_act not in ("silu", "swish"):
        return "has an activation that is not fused", low
    stacks = Parts.of(layer).stacks
    for stack in stacks:
        if len({f"{name}.{member}" in low for member in stack}) > 1:
            members = ", ".join(member.rpartition(".")[2] for member in stack)
            return (
                f"{members} are one product when fused, and would compute in different precisions",
                low,
            )
    if any(linear.bias is not None for stack in stacks[1:] for linear in stack.values()):
        return "has a bias elsewhere than in queries, keys and values", low
    return None, low


# ── The forward of a layer ──


@dataclass(frozen=True)
class FusedLayers:
    """Fused layers of one model by name. `left_out` has the reason for each layer not fused."""

    layers: Mapping[str, FusedLayer]
    left_out: Mapping[str, str]
    arithmetic: Arithmetic

    @property
    def products(self) -> list[StackedLinear]:
        """Stacked linears of all fused layers."""
        return [product for layer in self.layers.values() for product in layer.products]

    @property
    def members(self) -> dict[str, StackedLinear]:
        """Names of the linears that fused layers compute, with their stacked linears."""
        return {member: product for product in self.products for member in product.members}

    @property
    def stacks(self) -> list[list[Tensor]]:
        """Parameters that are the rows of one matrix; so must be their main gradients."""
        return [product.weights for product in self.products]

    def describe(self) -> str:
        """Return a text for the audit: "28 of 28 layers, queries and keys kept for backward"."""
        reasons = Counter(self.left_out.values())
        not_fused = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
        is_kept = self.arithmetic.keeps_rotated and self.layers
        kept = ", queries and keys kept for backward" if is_kept else ""
        count = len(self.layers)
        return f"{count} of {count + len(self.left_out)} layers{kept}{not_fused}"


class FusedLayer:
    """Fused forward of one decoder layer.

    It is not a module: its parameters belong to the layer whose forward it replaces.

    Args:
        layer: The decoder layer.
        name: Name of the layer in its model.
        arithmetic: Norms, rotation and activation between the products.
        low_precision: For each backend, the linears of the layer that it computes in low precision.
            The others are computed in the context's compute dtype.
    """

    def __init__(
        self,
        layer: Any,
        name: str,
        arithmetic: Arithmetic,
        *,
        low_precision: Mapping[GemmEngine | None, Collection[str]],
    ) -> None:
        self.unfused = layer.forward
        self.arithmetic = arithmetic
        self.attention = layer.self_attn
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm)
        parts = Parts.of(layer)
        self.heads = parts.heads
        self.head_norms = parts.head_norms
        products = []
        for stacked_name, stack in zip(_STACKS, parts.stacks, strict=True):
            linears = {f"{name}.{member}": linear for member, linear in stack.items()}
            # Either all linears of a stack are in low precision or none.
            first = next(iter(linears))
            engines = [engine for engine, low in low_precision.items() if engine and first in low]
            product = StackedLinear(f"{name}.{stacked_name}", linears, arithmetic, engines)
            product.lay_together()
            products.append(product)
        self.products = tuple(products)
        self.qkv, self.output, self.gate_up, self.down = self.products

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer on [1, tokens, hidden] and return the same shape.

        Calls the original forward unless `cu_seqlens` of packed documents is given.
        """
        if kwargs.get("cu_seqlens") is None:
            return self.unfused(hidden_states, *args, **kwargs)
        # A view and not an index. The gradient of an index is a tensor of zeros into which the
        # layer's gradient would be copied.
        x = hidden_states.squeeze(0)
        # Inside of an autograd.Function gradients are always disabled.
        self.arithmetic.differentiable = torch.is_grad_enabled()
        attended, x = self._attend(x, **kwargs)
        weights = [
            *self.output.weights,
            self.norms[1].weight,
            *self.gate_up.weights,
            *self.down.weights,
        ]
        return OutputAndMLP.apply(self, attended, x, *weights)[None]

    def _attend(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor,
        max_seqlen: int,
        position_embeddings: tuple[Tensor, Tensor],
        document_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of attention [tokens, query x dim], and x [tokens, hidden].

        The returned x is an output of the autograd node, to be used by the residual.
        """
        attention = self.attention
        inputs = (
            x,
            *(table.flatten(0, -2) for table in position_embeddings),
            self.norms[0].weight,
            *(norm.weight for norm in self.head_norms),
            *self.qkv.weights,
            *self.qkv.biases,
        )
        name = attention.config._attn_implementation
        # Some models have a window in each layer, others one for all layers.
        window = getattr(
            attention, "sliding_window", getattr(attention.config, "sliding_window", None)
        )
        if name == ROTATED_ATTENTION and (window is None or window >= max_seqlen):
            return NormedAttention.apply(self, (cu_seqlens, max_seqlen, attention.scaling), *inputs)
        *states, x = NormedAttention.apply(self, None, *inputs)
        q, k, v = (state.transpose(0, 1)[None] for state in states)
        output = AttentionInterface()[name](
            attention,
            q,
            k,
            v,
            None,
            scaling=attention.scaling,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            document_mask=document_mask,
            sliding_window=window,
        )[0]
        return output.squeeze(0).flatten(1), x

    def head_norms_in(self, dtype: torch.dtype) -> HeadNorms | None:
        """Return the head norms cast to the dtype of activations, or None if there are none.

        The working copies of the unfused layer have that dtype too. They are cast inside of an
        autograd node, because autograd would round their gradients to that dtype.
        """
        if not self.head_norms:
            return None
        query, key = (norm.weight.detach().to(dtype) for norm in self.head_norms)
        return HeadNorms(query, key, self.head_norms[0].variance_epsilon)


# ── The autograd nodes of a layer ──
#
# Parameters are arguments only to register them with autograd, and through it with FSDP2 and the
# sums over ranks. Products and norms read them from the layer.


class NormedAttention(torch.autograd.Function):
    """Norm, query-key-value product and rotation, and attention if `documents` are given.

    Maps x [tokens, hidden] to queries [tokens, query, dim], keys and values [tokens, kv, dim],
    normalized and rotated. The last output is x itself, for the residual. `documents` has
    cu_seqlens, the pack length and the scale of q k^T. With them, the output of FlashAttention-4
    [tokens, query x dim] replaces queries, keys and values.

    As one node, backward has both gradients of x and adds them in the kernel of the norm, and the
    rotation writes its gradient in the format that the product reads. If heads are normalized, the
    output of the product is saved. Queries, keys and values are then recomputed in backward, unless
    they are saved too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: FusedLayer,
        documents: Any | None,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        arithmetic = layer.arithmetic
        product = layer.qkv.start(x)
        ctx.call = (layer, product, documents, arithmetic.gemm_class.is_first_in_forward())
        normed, rstd = arithmetic.norm(x, layer.norms[0], product)
        qkv = product.project(normed)
        results = arithmetic.rotation(layer.heads).rotate(
            qkv, cos, sin, layer.heads, layer.head_norms_in(qkv.dtype)
        )
        saved = [x, normed, rstd, qkv if layer.head_norms else None, cos, sin]
        if documents is not None:
            output, log_sums = flash_forward(*results, *documents)
            kept = results if arithmetic.keeps_rotated or not layer.head_norms else [None] * 3
            saved += [*kept, output, log_sums]
            results = (output.view(len(x), -1),)
        arithmetic.save(ctx, *saved)
        return *results, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_results: Tensor) -> Gradients:
        layer, product, documents, is_first_in_forward = ctx.call
        arithmetic = layer.arithmetic
        *gradients, residual = of_results
        del of_results
        # `saved` has qkv, cos and sin, then inputs and results of attention if it is in this node.
        x, normed, rstd, *saved = arithmetic.saved(ctx)
        inputs = (*saved[:3], layer.heads, layer.head_norms_in(x.dtype))
        if documents is not None:
            gradients = _flash_backward(layer, gradients.pop(), saved[3:], inputs, documents)
        del saved
        dqkv, d_head_norms, d_biases = arithmetic.rotate_backward(gradients, *inputs, product)
        d_normed = product.input_gradient(dqkv)
        d_weights = product.weight_gradients(dqkv, normed)
        dx, d_norm = arithmetic.norm_backward(d_normed, x, rstd, layer.norms[0], residual)
        if is_first_in_forward:
            arithmetic.gemm_class.finish_backward()
        d_head_norms = d_head_norms[: len(layer.head_norms)]
        return None, None, dx, None, None, d_norm, *d_head_norms, *d_weights, *d_biases


def _flash_backward(
    layer: FusedLayer,
    d_output: Tensor,
    attended: Sequence[Any],
    rotation_inputs: tuple[Any, ...],
    documents: Any,
) -> list[Tensor]:
    """Return the gradients of queries, keys and values from that of the attention output.

    `attended` has queries, keys, values, the output and the log-sums of `flash_forward`. Queries,
    keys and values are recomputed from `rotation_inputs` if they are None.
    """
    q, k, v, output, log_sums = attended
    if q is None:
        q, k, v = layer.arithmetic.rotation(layer.heads).rotate(*rotation_inputs)
    d_output = d_output.view(output.shape)
    return list(flash_backward_in_parts(d_output, q, k, v, output, log_sums, *documents))


class OutputAndMLP(torch.autograd.Function):
    """Attention output projection and MLP, with both residuals.

    Maps attended [tokens, in] and residual [tokens, hidden] to y [tokens, hidden]:
    x = attended w^T + residual, then y = x + swiglu(norm(x) gate_up^T) down^T.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: FusedLayer, attended: Tensor, residual: Tensor, *_: Tensor
    ) -> Tensor:
        arithmetic = layer.arithmetic
        output = layer.output.start(attended)
        operand = output.quantize("input", attended)
        x = output.project(operand, residual)
        gate_up = layer.gate_up.start(x)
        normed, rstd = arithmetic.norm(x, layer.norms[1], gate_up)
        hidden = gate_up.project(normed)
        down = layer.down.start(hidden)
        activated, kept = arithmetic.activate(hidden, gate_up, down)
        ctx.call = (layer, output, gate_up, down)
        y = down.project(activated, x)
        # Save after the products, because saving takes quantized operands apart.
        arithmetic.save(ctx, operand, x, normed, hidden, kept, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        layer, output, gate_up, down = ctx.call
        arithmetic = layer.arithmetic
        operand, x, normed, hidden, kept, rstd = arithmetic.saved(ctx)
        quantized = down.quantize("grad_output", dy)
        d_activated = down.input_gradient(quantized)
        d_hidden, activated = arithmetic.activate_backward(d_activated, hidden, kept, gate_up, down)
        del d_activated, hidden, kept
        d_down = down.weight_gradients(quantized, activated)
        del quantized, activated
        d_normed = gate_up.input_gradient(d_hidden)
        d_gate_up = gate_up.weight_gradients(d_hidden, normed)
        del d_hidden, normed
        dx, d_norm = arithmetic.norm_backward(d_normed, x, rstd, layer.norms[1], residual=dy)
        del d_normed, x
        quantized = output.quantize("grad_output", dx)
        d_attended = output.input_gradient(quantized)
        d_output = output.weight_gradients(quantized, operand)
        return None, d_attended, dx, *d_output, d_norm, *d_gate_up, *d_down
