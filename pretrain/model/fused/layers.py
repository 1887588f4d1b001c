"""Fused decoder layers: which can be fused, and the forward that takes their own one's place.

A layer is fused where it is exactly one of the classes known here: a subclass may compute something else. Its modules and
parameters stay where they are; only its `forward` is another, and without packed documents, as in generation, it is the old one.

Each piece of a fused layer does in one autograd node what autograd would otherwise do in many. So a norm's output is written
once, in the format of the product that reads it, the residual's gradient is added where the norm's is computed, and weight
gradients go straight to where a step's gradients add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import AttentionInterface

from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.fused.rotary import rotate, rotate_backward
from pretrain.model.fused.stacked import HeadNorms, Heads, StackedProduct, StackedWeight
from pretrain.model.gpu_attention import cudnn_backward, cudnn_forward, flash_backward_in_parts, flash_forward
from pretrain.precision.observed import ProductObserver
from pretrain.precision.product import Backend, Operand
from pretrain.precision.scope import LINEARS, Decision
from pretrain.precision.transformer_engine import finish_backward

Gradients = tuple[Tensor | None, ...]
# Attention that is one with the rotation before it: forward and backward, by the name that transformers knows it by. Backward may
# give dk and dv in parts, which the rotation's sums.
ROTATED_ATTENTION: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, Tensor, Tensor]]]] = {
    "packed_cudnn": (cudnn_forward, cudnn_backward),
    "packed_fa4": (flash_forward, flash_backward_in_parts),
}
# The classes of layers with a fused form, by full name: the classes themselves would bring four architectures into every start.
_FUSED = {
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer",
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer",
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer",
}


# ── Which layers can be fused ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Parts:
    """What a decoder layer's linears and heads are for; linears by name in the layer, those of one mapping are one product."""

    qkv: Mapping[str, nn.Linear]
    head_norms: tuple[nn.Module, ...]  # of queries and keys, or none
    output: Mapping[str, nn.Linear]
    gate_up: Mapping[str, nn.Linear]
    down: Mapping[str, nn.Linear]
    heads: Heads

    @classmethod
    def of(cls, layer: nn.Module) -> Parts:
        """The parts of a layer that can be fused."""
        attention, mlp, config = layer.self_attn, layer.mlp, layer.self_attn.config
        return cls(
            qkv={f"self_attn.{name}": getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")},
            head_norms=(attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else (),
            output={"self_attn.o_proj": attention.o_proj},
            gate_up={f"mlp.{name}": getattr(mlp, name) for name in ("gate_proj", "up_proj")},
            down={"mlp.down_proj": mlp.down_proj},
            heads=Heads(config.num_attention_heads, config.num_key_value_heads, attention.head_dim),
        )

    @property
    def stacks(self) -> tuple[Mapping[str, nn.Linear], ...]:
        return self.qkv, self.output, self.gate_up, self.down


def assess_layer(name: str, layer: nn.Module, decisions: Mapping[str, Decision]) -> tuple[str | None, frozenset[str]]:
    """Why `layer`, called `name` in its model, stays unfused, None if it does not; and which of its linears are in low
    precision, by name in the model.

    `decisions`: what each linear is to compute in, empty where nothing is quantized. Where they differ among the linears of one
    stacked product, the layer stays unfused.
    """
    inner = [f"{name}.{part}" for part, module in layer.named_modules() if isinstance(module, LINEARS)]
    low = frozenset(linear for linear in inner if decisions and decisions[linear].reason is None)
    if any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules()):
        return "has hooks, which no module of a fused layer would run", low
    if f"{type(layer).__module__}.{type(layer).__qualname__}" not in _FUSED:
        return f"no fused form of {type(layer).__name__}", low
    if layer.self_attn.config.hidden_act not in ("silu", "swish"):
        return "has an activation that is not fused", low
    for stack in Parts.of(layer).stacks:
        if len({f"{name}.{member}" in low for member in stack}) > 1:
            members = ", ".join(member.rpartition(".")[2] for member in stack)
            return f"{members} are one product when fused, and would compute in different precisions", low
    return None, low


# ── The forward of a layer ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class FusedLayers:
    """The fused layers of one model, by name. `left_out` says of each other layer why it stayed as it was."""

    layers: Mapping[str, FusedLayer]
    left_out: Mapping[str, str]
    arithmetic: Arithmetic

    @property
    def products(self) -> list[StackedProduct]:
        return [product for layer in self.layers.values() for product in layer.products]

    @property
    def members(self) -> dict[str, StackedProduct]:
        """The linears that no module computes any more, and the products that do."""
        return {member: product for product in self.products for member in product.members}

    @property
    def stacks(self) -> list[list[nn.Parameter]]:
        """Parameters that are the rows of one matrix, whose gradients must be those of another."""
        return [product.weights.weights for product in self.products]

    @contextmanager
    def observed_by(self, observer: ProductObserver) -> Iterator[None]:
        """While entered, `observer` sees what the layers' products multiply, under the names of the linears in them."""
        with ExitStack() as watching:
            for product in self.products:
                watching.enter_context(product.observed_by(observer))
            yield

    def low_precision_weights(self, backend: Backend | None) -> int:
        """How many weights are multiplied in low precision where `backend` computes."""
        low = [product for product in self.products if backend in product.low]
        return sum(weight.numel() for product in low for weight in product.weights.weights)

    def describe(self) -> str:
        """Says for the audit: "28 of 28 layers, queries and keys kept for backward"."""
        reasons = Counter(self.left_out.values())
        why = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
        kept = ", queries and keys kept for backward" if self.arithmetic.keeps_rotated and self.layers else ""
        return f"{len(self.layers)} of {len(self.layers) + len(self.left_out)} layers{kept}{why}"


class FusedLayer:
    """The forward of one decoder layer. Not a module: what it computes with belongs to the layer that it stands in for."""

    def __init__(
        self, layer: nn.Module, name: str, arithmetic: Arithmetic, *, low_precision: Mapping[Backend, Collection[str]]
    ) -> None:
        """`layer`, called `name` in its model. `low_precision`: by each backend that may compute it, which of its linears are in
        low precision; the others are in the context's compute dtype."""
        self.unfused, self._arithmetic = layer.forward, arithmetic
        self._attention, self.norms = layer.self_attn, (layer.input_layernorm, layer.post_attention_layernorm)
        parts = Parts.of(layer)
        self._head_norms = parts.head_norms
        products = []
        for linears, joined in zip(parts.stacks, ("self_attn.qkv_proj", "", "mlp.gate_up_proj", ""), strict=True):
            weights, members = StackedWeight(list(linears.values())), tuple(f"{name}.{member}" for member in linears)
            weights.lay_together()
            backends = [backend for backend, low in low_precision.items() if members[0] in low]  # of one stack all are, or none
            stacked = members[0] if len(members) == 1 else f"{name}.{joined}"
            products.append(StackedProduct(stacked, members, weights, arithmetic, backends))
        self.products = self.qkv, self.output, self.gate_up, self.down = tuple(products)
        eps = self._head_norms[0].variance_epsilon if self._head_norms else 0.0
        self._before_attention = NormRotation(arithmetic, self.norms[0], self.qkv, parts.heads, eps)

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, tokens, hidden] -> the same; with `cu_seqlens` of packed documents, else as transformers does it."""
        if kwargs.get("cu_seqlens") is None:
            return self.unfused(hidden_states, *args, **kwargs)
        # Viewed and not indexed: the gradient of an index is a tensor of zeros, into which the layer's gradient would be copied.
        x, arithmetic, norm = hidden_states.squeeze(0), self._arithmetic, self.norms[1]
        arithmetic.differentiable = torch.is_grad_enabled()  # inside of an autograd.Function nobody could tell
        attended, x = self._attend(x, **kwargs)
        x = OutputProduct.apply(arithmetic, self.output, attended, x, *self.output.weights.parameters)
        parameters = (norm.weight, *self.gate_up.weights.parameters, *self.down.weights.parameters)
        return NormMLPAdd.apply(arithmetic, norm, self.gate_up, self.down, x, *parameters)[None]

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
        attention, pieces = self._attention, self._before_attention
        angles, head_norms = [table.flatten(0, -2) for table in position_embeddings], [each.weight for each in self._head_norms]
        inputs = (x, *angles, self.norms[0].weight, *head_norms, *self.qkv.weights.parameters)
        name = attention.config._attn_implementation
        window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))  # of this layer, or all
        if name in ROTATED_ATTENTION and (window is None or window >= max_seqlen):
            return RotatedAttention.apply(pieces, name, (cu_seqlens, max_seqlen, attention.scaling), *inputs)
        q, k, v, x = RotatedHeads.apply(pieces, *inputs)
        function = AttentionInterface().get_interface(name, None)
        options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "document_mask": document_mask, "sliding_window": window}
        q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
        return function(attention, q, k, v, None, scaling=attention.scaling, **options)[0].squeeze(0).flatten(1), x


# ── Its differentiable pieces ──────────────────────────────────────────────────────────────────────────────────────────────────
#
# Parameters are arguments only so that autograd, and through it FSDP2 and sums over ranks, knows of them: products look them up
# themselves.


@dataclass(frozen=True)
class NormRotation:
    """What stands before attention: the norm, the product that gives queries, keys and values, and their rotation, in one. So
    backward has both gradients of x at once and adds them in the norm's own kernel, and the rotation writes the gradient between
    it and the product as the product reads it. `eps`: of the heads' norms.

    Tensors come in one order: x [tokens, hidden], cos, sin, then the parameters: the norm's weight, the weights of the heads'
    norms, none or two, and the product's."""

    arithmetic: Arithmetic
    norm: nn.Module
    product: StackedProduct
    heads: Heads
    eps: float

    def forward(
        self, ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, Tensor, Tensor], list[Operand | None]]:
        """Queries, keys and values, rotated; and what `backward` is to be given again. Where heads are normed it needs what the
        product gave, from which queries, keys and values can be made again."""
        self.product.begin(x)
        ctx.is_first_in_forward = self.arithmetic.is_first_in_forward()
        ctx.set_materialize_grads(False)
        normed, rstd = self.arithmetic.norm(x, self.norm, self.product)
        qkv = self.product.forward(normed)
        norms = parameters[1 : len(parameters) - len(self.product.weights.parameters)]
        return self.rotate(qkv, cos, sin, norms), [x, normed, rstd, qkv if norms else None, cos, sin, *norms]

    def rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor, norms: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return rotate(qkv, cos, sin, self.heads, self._head_norms(norms, qkv.dtype))

    def backward(
        self, ctx: FunctionCtx, gradients: list[Tensor], residual: Tensor | None, saved: Sequence[Operand | None]
    ) -> Gradients:
        """The gradients of all tensors that came in, from those of queries, keys and values, which are taken out of the list, and
        that of x in the residual."""
        x, normed, rstd, qkv, cos, sin, *norms = saved
        head_norms = self._head_norms(norms, gradients[0].dtype)
        dqkv, *of_head_norms = rotate_backward(*gradients, qkv, cos, sin, self.heads, head_norms)
        gradients.clear()
        del qkv
        of_biases = self.product.weights.bias_gradients(dqkv)
        dqkv = self.product.gradient_operand(dqkv)  # the gradient in BF16 is free as soon as it has been quantized
        d_normed = self.product.input_gradient(dqkv)
        of_weights = self.product.weight_gradients(dqkv, normed)
        dx, of_norm = self.arithmetic.norm_backward(d_normed, x, rstd, self.norm, residual)
        if ctx.is_first_in_forward:
            finish_backward()
        return dx, None, None, of_norm, *of_head_norms[: len(norms)], *of_weights, *of_biases

    def _head_norms(self, norms: Sequence[Tensor], dtype: torch.dtype) -> HeadNorms | None:
        """The norms in the dtype of activations, as the unfused layer's working copies are. They are cast in here and not before:
        autograd would round the gradients to that dtype on their way back."""
        return HeadNorms(*(norm.to(dtype) for norm in norms), self.eps) if norms else None


class RotatedHeads(torch.autograd.Function):
    """x [tokens, hidden] -> rotated queries [tokens, query, dim], keys and values [tokens, kv, dim], and x itself, for the
    residual."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, pieces: NormRotation, x: Tensor, cos: Tensor, sin: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        states, saved = pieces.forward(ctx, x, cos, sin, parameters)
        ctx.pieces = pieces
        pieces.arithmetic.save(ctx, *saved)
        return *states, x

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dq: Tensor, dk: Tensor, dv: Tensor, residual: Tensor | None) -> Gradients:
        return None, *ctx.pieces.backward(ctx, [dq, dk, dv], residual, ctx.pieces.arithmetic.saved(ctx))


class RotatedAttention(torch.autograd.Function):
    """x [tokens, hidden] -> the output [tokens, query x dim] of an attention of `ROTATED_ATTENTION`, called `name`, and x itself.
    `documents`: cu_seqlens, the pack length, and the scale of q k^T.

    Where heads are normed, queries, keys and values are made again in backward unless they are kept too."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        pieces: NormRotation,
        name: str,
        documents: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        states, saved = pieces.forward(ctx, x, cos, sin, parameters)
        output, *statistics = ROTATED_ATTENTION[name][0](*states, *documents)
        rotated = states if pieces.arithmetic.keeps_rotated or saved[3] is None else [None] * 3
        ctx.pieces, ctx.name, ctx.documents, ctx.count = pieces, name, documents, len(saved)
        pieces.arithmetic.save(ctx, *saved, *rotated, output, *statistics)
        return output.view(len(x), -1), x

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_output: Tensor, residual: Tensor | None) -> Gradients:
        tensors = ctx.pieces.arithmetic.saved(ctx)
        saved, (q, k, v, output, *statistics) = tensors[: ctx.count], tensors[ctx.count :]
        if q is None:
            q, k, v = ctx.pieces.rotate(*saved[3:6], saved[6:])
        differentiate = ROTATED_ATTENTION[ctx.name][1]
        gradients = list(differentiate(d_output.view(output.shape), q, k, v, output, *statistics, *ctx.documents))
        del tensors, q, k, v, output, statistics, d_output
        return None, None, None, *ctx.pieces.backward(ctx, gradients, residual, saved)


class OutputProduct(torch.autograd.Function):
    """x [tokens, in], residual [tokens, out] -> x w^T + b + residual."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, arithmetic: Arithmetic, product: StackedProduct, x: Tensor, residual: Tensor, *parameters: Tensor
    ) -> Tensor:
        product.begin(x)
        operand = product.operand(x)
        y = product.forward(operand, residual)
        ctx.pieces = (arithmetic, product)
        arithmetic.save(ctx, operand)  # after the product: it takes the operand apart
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_sum: Tensor) -> Gradients:
        arithmetic, product = ctx.pieces
        (operand,) = arithmetic.saved(ctx)
        bias_gradients = product.weights.bias_gradients(d_sum)
        dy = product.gradient_operand(d_sum)
        dx = product.input_gradient(dy)
        return None, None, dx, d_sum, *product.weight_gradients(dy, operand), *bias_gradients


class NormMLPAdd(torch.autograd.Function):
    """x [tokens, hidden] -> x + swiglu(norm(x) gate_up^T + b) down^T + c."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        arithmetic: Arithmetic,
        norm: nn.Module,
        gate_up: StackedProduct,
        down: StackedProduct,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        gate_up.begin(x)
        normed, rstd = arithmetic.norm(x, norm, gate_up)
        hidden = gate_up.forward(normed)
        down.begin(hidden)
        activated, kept = arithmetic.activate(hidden, gate_up, down)
        y = down.forward(activated, x)
        ctx.pieces = (arithmetic, norm, gate_up, down)
        arithmetic.save(ctx, x, normed, hidden, kept, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> Gradients:
        arithmetic, norm, gate_up, down = ctx.pieces
        x, normed, hidden, kept, rstd = arithmetic.saved(ctx)
        down_bias = down.weights.bias_gradients(dy)
        quantized = down.gradient_operand(dy)
        d_activated = down.input_gradient(quantized)
        d_hidden, activated, gate_up_bias = arithmetic.activate_backward(d_activated, hidden, kept, gate_up, down)
        del d_activated, hidden, kept
        down_weights = down.weight_gradients(quantized, activated)
        del quantized, activated
        d_normed = gate_up.input_gradient(d_hidden)
        gate_up_weights = gate_up.weight_gradients(d_hidden, normed)
        dx, of_norm = arithmetic.norm_backward(d_normed, x, rstd, norm, residual=dy)
        return *(None,) * 4, dx, of_norm, *gate_up_weights, *gate_up_bias, *down_weights, *down_bias
