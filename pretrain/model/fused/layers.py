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

from pretrain.model.attention.cudnn import cudnn_backward, cudnn_forward
from pretrain.model.attention.flash import flash_backward_in_parts, flash_forward
from pretrain.model.attention.operator import HeadNorms, Heads
from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.fused.rotary import rotate, rotate_backward
from pretrain.model.fused.stacked import StackedProduct, StackedWeight
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


@dataclass(frozen=True)
class Attending:
    """What rotation and attention over packed documents are told. `eps`: of the heads' norms. `scale`: of q k^T."""

    name: str  # in `ROTATED_ATTENTION`
    heads: Heads
    eps: float
    ends: Tensor  # cu_seqlens
    longest: int
    scale: float


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
        self._heads, self._head_norms = parts.heads, parts.head_norms
        products = []
        for linears, joined in zip(parts.stacks, ("self_attn.qkv_proj", "", "mlp.gate_up_proj", ""), strict=True):
            weights, members = StackedWeight(list(linears.values())), tuple(f"{name}.{member}" for member in linears)
            weights.lay_together()
            backends = [backend for backend, low in low_precision.items() if members[0] in low]  # of one stack all are, or none
            stacked = members[0] if len(members) == 1 else f"{name}.{joined}"
            products.append(StackedProduct(stacked, members, weights, arithmetic, backends))
        self.products = self.qkv, self.output, self.gate_up, self.down = tuple(products)

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
        attention, heads, norm = self._attention, self._heads, self.norms[0]
        head_norms = [each.weight for each in self._head_norms]
        name, eps = attention.config._attn_implementation, self._head_norms[0].variance_epsilon if head_norms else 0.0
        angles = [table.flatten(0, -2) for table in position_embeddings]
        before, parameters = (self._arithmetic, norm, self.qkv), self.qkv.weights.parameters
        window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))  # of this layer, or all
        if name in ROTATED_ATTENTION and (window is None or window >= max_seqlen):
            attending = Attending(name, heads, eps, cu_seqlens, max_seqlen, attention.scaling)
            return NormAttention.apply(*before, attending, x, *angles, norm.weight, *head_norms, *parameters)
        qkv, x = NormProduct.apply(*before, x, norm.weight, *parameters)
        q, k, v = Rotation.apply(qkv, *angles, heads, eps, *head_norms)
        function = AttentionInterface().get_interface(name, None)
        options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "document_mask": document_mask, "sliding_window": window}
        q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
        return function(attention, q, k, v, None, scaling=attention.scaling, **options)[0].squeeze(0).flatten(1), x


# ── Its differentiable pieces ──────────────────────────────────────────────────────────────────────────────────────────────────
#
# Parameters are arguments only so that autograd, and through it FSDP2 and sums over ranks, knows of them: products look them up
# themselves.


class NormProduct(torch.autograd.Function):
    """x [tokens, hidden] -> norm(x) w^T + b [tokens, out], and x itself, for the residual: so backward has both of its gradients
    at once, and adds them in the norm's own kernel."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, arithmetic: Arithmetic, norm: nn.Module, product: StackedProduct, x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        y, normed, rstd = _norm_product(ctx, arithmetic, norm, product, x)
        arithmetic.save(ctx, x, normed, rstd)
        return y, x

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor, residual: Tensor | None) -> Gradients:
        return None, None, None, *_norm_product_backward(ctx, dy, residual, *ctx.pieces[0].saved(ctx))


def _norm_product(
    ctx: FunctionCtx, arithmetic: Arithmetic, norm: nn.Module, product: StackedProduct, x: Tensor
) -> tuple[Tensor, Operand, Tensor]:
    """norm(x) w^T + b, norm(x) as the product's operand, and what else the norm's backward needs."""
    product.begin(x)
    ctx.is_first_in_forward, ctx.pieces = arithmetic.is_first_in_forward(), (arithmetic, norm, product)
    ctx.set_materialize_grads(False)
    normed, rstd = arithmetic.norm(x, norm, product)
    return product.forward(normed), normed, rstd


def _norm_product_backward(
    ctx: FunctionCtx, dy: Tensor, residual: Tensor | None, x: Tensor, normed: Operand, rstd: Tensor
) -> list[Tensor | None]:
    """The gradients of x, of the norm's weight, and of the product's parameters."""
    arithmetic, norm, product = ctx.pieces
    bias_gradients = product.weights.bias_gradients(dy)
    dy = product.gradient_operand(dy)
    d_normed = product.input_gradient(dy)
    weight_gradients = product.weight_gradients(dy, normed)
    dx, of_norm = arithmetic.norm_backward(d_normed, x, rstd, norm, residual)
    if ctx.is_first_in_forward:
        finish_backward()
    return [dx, of_norm, *weight_gradients, *bias_gradients]


class NormAttention(torch.autograd.Function):
    """`NormProduct`, `Rotation` and an attention of `ROTATED_ATTENTION` in one: x [tokens, hidden] -> attention's output
    [tokens, query x dim], and x itself. So the gradient between attention and product is written as the product reads it.

    Where heads are normed, backward needs what the product gave, and makes queries, keys and values again from it unless they are
    kept, too; elsewhere they are kept in its place. `norms` of the heads, none or two, stand before the product's parameters.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        arithmetic: Arithmetic,
        norm: nn.Module,
        product: StackedProduct,
        attending: Attending,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        qkv, normed, rstd = _norm_product(ctx, arithmetic, norm, product, x)
        norms = parameters[1 : len(parameters) - len(product.weights.parameters)]
        q, k, v = rotate(qkv, cos, sin, attending.heads, _head_norms(norms, attending.eps, qkv.dtype))
        attend, _ = ROTATED_ATTENTION[attending.name]
        output, *statistics = attend(q, k, v, attending.ends, attending.longest, attending.scale)
        rotated = [q, k, v] if arithmetic.keeps_rotated or not norms else [None] * 3
        ctx.attending, ctx.normed_heads = attending, len(norms)
        arithmetic.save(ctx, x, normed, rstd, qkv if norms else None, *rotated, output, cos, sin, *norms, *statistics)
        return output.view(len(qkv), -1), x

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_output: Tensor, residual: Tensor | None) -> Gradients:
        attending, normed_heads = ctx.attending, ctx.normed_heads
        x, normed, rstd, qkv, q, k, v, output, cos, sin, *rest = ctx.pieces[0].saved(ctx)
        norms, statistics = rest[:normed_heads], rest[normed_heads:]
        head_norms = _head_norms(norms, attending.eps, output.dtype)
        if q is None:
            q, k, v = rotate(qkv, cos, sin, attending.heads, head_norms)
        _, differentiate = ROTATED_ATTENTION[attending.name]
        d_output = d_output.view(output.shape)
        gradients = differentiate(d_output, q, k, v, output, *statistics, attending.ends, attending.longest, attending.scale)
        del q, k, v, output, statistics, rest, d_output
        head_gradients = list(rotate_backward(*gradients, qkv, cos, sin, attending.heads, head_norms))
        del gradients, qkv
        # Taken out of the list, so that the gradient in BF16 is free as soon as it has been quantized.
        dx, of_norm, *of_product = _norm_product_backward(ctx, head_gradients.pop(0), residual, x, normed, rstd)
        return *(None,) * 4, dx, None, None, of_norm, *head_gradients[:normed_heads], *of_product


class OutputProduct(torch.autograd.Function):
    """x [tokens, in], residual [tokens, out] -> x w^T + b + residual."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, arithmetic: Arithmetic, product: StackedProduct, x: Tensor, residual: Tensor, *parameters: Tensor
    ) -> Tensor:
        product.begin(x)
        operand = product.operand(x)
        ctx.pieces = (arithmetic, product)
        arithmetic.save(ctx, operand)
        return product.forward(operand, residual)

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


class Rotation(torch.autograd.Function):
    """`rotate`, differentiable."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, eps: float, *norms: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.heads, ctx.eps = heads, eps
        ctx.save_for_backward(cos, sin, *((qkv, *norms) if norms else ()))
        return rotate(qkv, cos, sin, heads, _head_norms(norms, eps, qkv.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
        cos, sin, *rest = ctx.saved_tensors
        qkv, *norms = rest or (None,)
        head_norms = _head_norms(norms, ctx.eps, dq.dtype)
        dqkv, *norm_gradients = rotate_backward(dq, dk, dv, qkv, cos, sin, ctx.heads, head_norms)
        return dqkv, None, None, None, None, *norm_gradients[: len(norms)]


def _head_norms(norms: Sequence[Tensor], eps: float, dtype: torch.dtype) -> HeadNorms | None:
    """Returns the norms in the dtype of activations, as the unfused layer's working copies are. They are cast in here and not
    before: autograd would round the gradients to that dtype on their way back."""
    return HeadNorms(*(norm.to(dtype) for norm in norms), eps) if norms else None
