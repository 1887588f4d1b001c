"""Fused decoder layers: which can be fused, and the forward that takes their own one's place.

A layer is fused where it is exactly one of the classes known here: a subclass may compute something else. Its modules and
parameters stay where they are; only its `forward` is another, and without packed documents, as in generation, it is the old one.

Each piece of a fused layer does in one autograd node what autograd would otherwise do in many. So a norm's output is written
once, in the format of the product that reads it, the residual's gradient is added where the norm's is computed, and weight
gradients go straight to where a step's gradients add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import AttentionInterface

from pretrain.model.attention import flash_backward_in_parts, flash_forward
from pretrain.model.fused.arithmetic import Arithmetic, StackedLinear
from pretrain.model.fused.formulas import HeadNorms, Heads
from pretrain.precision.gemm import GemmEngine
from pretrain.precision.scope import LINEARS, Decision

Gradients = tuple[Tensor | None, ...]
# is one with the rotation before it, whose backward adds up the parts of dk and dv
ROTATED_ATTENTION = "packed_fa4"
# The classes of layers with a fused form, by full name: the classes themselves would bring four architectures into every start.
_FUSED = {
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer",
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer",
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer",
}
# Of such a layer: its products, each of the linears that it stacks.
_STACKS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


# ── Which layers can be fused ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Parts:
    """What the parts of a decoder layer are for. `stacks`: linears by name in the layer, those of one product in one mapping:
    queries, keys and values; the attention's output; gate and up; down. `head_norms`: of queries and keys, or none."""

    stacks: tuple[Mapping[str, nn.Linear], ...]
    head_norms: tuple[nn.Module, ...]
    heads: Heads

    @classmethod
    def of(cls, layer: nn.Module) -> Parts:
        """The parts of a layer that can be fused."""
        attention, config = layer.self_attn, layer.self_attn.config
        stacks = tuple(
            {name: layer.get_submodule(name) for name in names} for names in _STACKS.values()
        )
        norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
        return cls(
            stacks,
            norms,
            Heads(config.num_attention_heads, config.num_key_value_heads, attention.head_dim),
        )


def assess_layer(
    name: str, layer: nn.Module, decisions: Mapping[str, Decision]
) -> tuple[str | None, frozenset[str]]:
    """Why `layer`, called `name` in its model, stays unfused, None if it does not; and which of its linears are in low
    precision, by name in the model.

    `decisions`: what each linear is to compute in, empty where nothing is quantized. Where they differ among the linears of one
    stacked product, the layer stays unfused.
    """
    inner = [
        f"{name}.{part}" for part, module in layer.named_modules() if isinstance(module, LINEARS)
    ]
    low = frozenset(linear for linear in inner if decisions and decisions[linear].reason is None)
    if f"{type(layer).__module__}.{type(layer).__qualname__}" not in _FUSED:
        return f"no fused form of {type(layer).__name__}", low
    if layer.self_attn.config.hidden_act not in ("silu", "swish"):
        return "has an activation that is not fused", low
    for stack in Parts.of(layer).stacks:
        if len({f"{name}.{member}" in low for member in stack}) > 1:
            members = ", ".join(member.rpartition(".")[2] for member in stack)
            return (
                f"{members} are one product when fused, and would compute in different precisions",
                low,
            )
    if any(
        linear.bias is not None for stack in Parts.of(layer).stacks[1:] for linear in stack.values()
    ):
        return "has a bias elsewhere than in queries, keys and values", low
    return None, low


# ── The forward of a layer ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class FusedLayers:
    """The fused layers of one model, by name. `left_out` says of each other layer why it stayed as it was."""

    layers: Mapping[str, FusedLayer]
    left_out: Mapping[str, str]
    arithmetic: Arithmetic

    @property
    def products(self) -> list[StackedLinear]:
        return [product for layer in self.layers.values() for product in layer.products]

    @property
    def members(self) -> dict[str, StackedLinear]:
        """The linears that no module computes any more, and the products that do."""
        return {member: product for product in self.products for member in product.members}

    @property
    def stacks(self) -> list[list[nn.Parameter]]:
        """Parameters that are the rows of one matrix, whose gradients must be those of another."""
        return [product.weights for product in self.products]

    def describe(self) -> str:
        """Says for the audit: "28 of 28 layers, queries and keys kept for backward"."""
        reasons = Counter(self.left_out.values())
        why = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
        kept = (
            ", queries and keys kept for backward"
            if self.arithmetic.keeps_rotated and self.layers
            else ""
        )
        return f"{len(self.layers)} of {len(self.layers) + len(self.left_out)} layers{kept}{why}"


class FusedLayer:
    """The forward of one decoder layer. Not a module: what it computes with belongs to the layer that it stands in for."""

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        arithmetic: Arithmetic,
        *,
        low_precision: Mapping[GemmEngine, Collection[str]],
    ) -> None:
        """`layer`, called `name` in its model. `low_precision`: by each engine that may compute it, which of its linears are in
        low precision; the others are in the context's compute dtype."""
        self.unfused, self.arithmetic = layer.forward, arithmetic
        self.attention, self.norms = (
            layer.self_attn,
            (layer.input_layernorm, layer.post_attention_layernorm),
        )
        parts = Parts.of(layer)
        self.heads, self.head_norms = parts.heads, parts.head_norms
        products = []
        for joined, stack in zip(_STACKS, parts.stacks, strict=True):
            linears = {f"{name}.{member}": linear for member, linear in stack.items()}
            first = next(iter(linears))  # of one stack all are in low precision, or none
            engines = [engine for engine, low in low_precision.items() if first in low]
            products.append(StackedLinear(f"{name}.{joined}", linears, arithmetic, engines))
            products[-1].lay_together()
        self.products = self.qkv, self.output, self.gate_up, self.down = tuple(products)

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, tokens, hidden] -> the same; with `cu_seqlens` of packed documents, else as transformers does it."""
        if kwargs.get("cu_seqlens") is None:
            return self.unfused(hidden_states, *args, **kwargs)
        # Viewed and not indexed: the gradient of an index is a tensor of zeros, into which the layer's gradient would be copied.
        x = hidden_states.squeeze(0)
        # inside of an autograd.Function nobody could tell
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
        """x [tokens, hidden] -> attention's output [tokens, query x dim], and x for the residual."""
        attention, head_norms = self.attention, [norm.weight for norm in self.head_norms]
        angles = [table.flatten(0, -2) for table in position_embeddings]
        inputs = (
            x,
            *angles,
            self.norms[0].weight,
            *head_norms,
            *self.qkv.weights,
            *self.qkv.biases,
        )
        name = attention.config._attn_implementation
        # of this layer, or all
        window = getattr(
            attention, "sliding_window", getattr(attention.config, "sliding_window", None)
        )
        if name == ROTATED_ATTENTION and (window is None or window >= max_seqlen):
            return NormedAttention.apply(self, (cu_seqlens, max_seqlen, attention.scaling), *inputs)
        *states, x = NormedAttention.apply(self, None, *inputs)
        function = AttentionInterface().get_interface(name, None)
        options = {
            "cu_seqlens": cu_seqlens,
            "max_seqlen": max_seqlen,
            "document_mask": document_mask,
            "sliding_window": window,
        }
        q, k, v = (each.transpose(0, 1)[None] for each in states)
        return function(attention, q, k, v, None, scaling=attention.scaling, **options)[0].squeeze(
            0
        ).flatten(1), x

    def head_norms_in(self, dtype: torch.dtype) -> HeadNorms | None:
        """The norms in the dtype of activations, as the unfused layer's working copies are. They are cast within a node:
        autograd would round the gradients to that dtype on their way back."""
        weights = [norm.weight.detach().to(dtype) for norm in self.head_norms]
        return HeadNorms(*weights, self.head_norms[0].variance_epsilon) if weights else None


# ── Its differentiable pieces ──────────────────────────────────────────────────────────────────────────────────────────────────
#
# Parameters are arguments only so that autograd, and through it FSDP2 and sums over ranks, knows of them: products and norms look
# them up themselves.


class NormedAttention(torch.autograd.Function):
    """x [tokens, hidden] -> queries [tokens, query, dim], keys and values [tokens, kv, dim], normed and rotated, and x itself,
    for the residual. With `documents`, cu_seqlens, the pack length and the scale of q k^T, FlashAttention-4's output
    [tokens, query x dim] stands in place of the three.

    In one node, so that backward has both gradients of x at once and adds them in the norm's own kernel, and the rotation writes
    the gradient between it and the product as the product reads it. Where heads are normed, what the product gave is kept, and
    queries, keys and values are made again from it in backward unless they are kept too."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        layer: FusedLayer,
        documents: Any | None,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        arithmetic, product = layer.arithmetic, layer.qkv.start(x)
        ctx.layer, ctx.product, ctx.documents = layer, product, documents
        ctx.is_first_in_forward = arithmetic.gemm_class.is_first_in_forward()
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
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Gradients:
        layer, arithmetic, product, heads = (
            ctx.layer,
            ctx.layer.arithmetic,
            ctx.product,
            ctx.layer.heads,
        )
        *gradients, residual = gradients
        x, normed, rstd, qkv, cos, sin, *attended = arithmetic.saved(ctx)
        head_norms = layer.head_norms_in(x.dtype)
        if ctx.documents is not None:
            q, k, v, output, log_sums = attended
            if q is None:
                q, k, v = arithmetic.rotation(heads).rotate(qkv, cos, sin, heads, head_norms)
            d_output = gradients.pop().view(output.shape)
            gradients += flash_backward_in_parts(
                d_output, q, k, v, output, log_sums, *ctx.documents
            )
            del attended, q, k, v, output, log_sums, d_output
        dqkv, of_head_norms, of_biases = arithmetic.rotate_backward(
            gradients, qkv, cos, sin, heads, head_norms, product
        )
        d_normed = product.input_gradient(dqkv)
        of_weights = product.weight_gradients(dqkv, normed)
        dx, of_norm = arithmetic.norm_backward(d_normed, x, rstd, layer.norms[0], residual)
        if ctx.is_first_in_forward:
            arithmetic.gemm_class.finish_backward()
        of_head_norms = of_head_norms[: len(layer.head_norms)]
        return None, None, dx, None, None, of_norm, *of_head_norms, *of_weights, *of_biases


class OutputAndMLP(torch.autograd.Function):
    """attended [tokens, in], residual [tokens, hidden] -> x = attended w^T + residual -> x + swiglu(norm(x) gate_up^T) down^T."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, layer: FusedLayer, attended: Tensor, residual: Tensor, *_: Tensor
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
        ctx.layer = layer
        ctx.products = output, gate_up, down
        y = down.project(activated, x)
        # after the products: it takes operands apart
        arithmetic.save(ctx, operand, x, normed, hidden, kept, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> Gradients:
        layer, arithmetic = ctx.layer, ctx.layer.arithmetic
        output, gate_up, down = ctx.products
        operand, x, normed, hidden, kept, rstd = arithmetic.saved(ctx)
        quantized = down.quantize("grad_output", dy)
        d_activated = down.input_gradient(quantized)
        d_hidden, activated = arithmetic.activate_backward(d_activated, hidden, kept, gate_up, down)
        del d_activated, hidden, kept
        down_weights = down.weight_gradients(quantized, activated)
        del quantized, activated
        d_normed = gate_up.input_gradient(d_hidden)
        gate_up_weights = gate_up.weight_gradients(d_hidden, normed)
        del d_hidden, normed
        dx, of_norm = arithmetic.norm_backward(d_normed, x, rstd, layer.norms[1], residual=dy)
        del d_normed, x
        quantized = output.quantize("grad_output", dx)
        d_attended = output.input_gradient(quantized)
        output_weights = output.weight_gradients(quantized, operand)
        return None, d_attended, dx, *output_weights, of_norm, *gate_up_weights, *down_weights
