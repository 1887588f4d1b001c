"""Fused decoder layers: which can be fused, what they compute with on a device, and the forward that takes their place.

A layer is fused where it is exactly one of the classes known here: a subclass may compute something else. Its modules and
parameters stay where they are; only its `forward` is another, and without packed documents, as in generation, it is the old one.

Each piece of a fused layer does in one autograd node what autograd would otherwise do in many. So a norm's output is written
once, in the format of the product that reads it, the residual's gradient is added where the norm's is computed, and weight
gradients go straight to where a step's gradients add up.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import AttentionInterface

from foundation.errors import InputError
from pretrain.model.attention.cudnn import cudnn_backward, cudnn_forward
from pretrain.model.attention.flash import flash_backward_in_parts, flash_forward
from pretrain.model.attention.operator import HeadNorms, Heads
from pretrain.model.fused.arithmetic import Arithmetic, Norm
from pretrain.model.fused.rotary import rotate, rotate_backward
from pretrain.model.fused.stacked import By, StackedProduct, StackedWeight
from pretrain.precision.linear import Backend, PrecisionContext
from pretrain.precision.observed import ProductObserver
from pretrain.precision.product import Operand
from pretrain.precision.scope import LINEARS, Decision
from pretrain.precision.settings import ActivePrecision
from pretrain.precision.transformer_engine import finish_backward
from pretrain.settings.recipe import Switch

Gradients = tuple[Tensor | None, ...]
# Attention that is one with the rotation before it: forward and backward, by the name that transformers knows it by. Backward may
# give dk and dv in parts, which the rotation's sums.
ROTATED_ATTENTION: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, Tensor, Tensor]]]] = {
    "packed_cudnn": (cudnn_forward, cudnn_backward),
    "packed_fa4": (flash_forward, flash_backward_in_parts),
}
HAS_TRITON = importlib.util.find_spec("triton") is not None  # as torch's CUDA builds for Linux bring it
# The classes of layers with a fused form, by full name: the classes themselves would bring five architectures into every start.
_FUSED = {
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer",
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer",
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer",
}


# ── What fused layers compute with ──────────────────────────────────────────────────────────────────────────────────────────────


def choose_arithmetic(
    setting: Switch, active: ActivePrecision, device_type: str, context: PrecisionContext
) -> tuple[Arithmetic | None, str]:
    """The arithmetic for the model of `context`, or None and the reason, worded for the audit; raises as `not_fused_because`."""
    dtype = context.compute_dtype
    if reason := not_fused_because(setting, active, device_type, dtype):
        return None, reason
    if active.backend == "torch":
        return Arithmetic(context, By.FORMULAS if _no_faster(device_type, dtype) else By.KERNELS), ""
    return Arithmetic(context, By.TRANSFORMER_ENGINE), ""


def not_fused_because(setting: Switch, active: ActivePrecision, device_type: str, dtype: torch.dtype) -> str | None:
    """Why no layer is fused, whatever its architecture; None: those that can be are. InputError for what cannot be `on`."""
    if setting == "off":
        return "nothing: model.fused is off"
    if active.backend == "emulation":
        if setting == "on":
            raise InputError("`model.fused: on`: emulated products are computed one by one; set `model.fused: auto`")
        return "nothing: emulated products are computed one by one"
    if setting == "on" or active.backend == "transformer_engine":
        return None
    slow = _no_faster(device_type, dtype)
    return f"nothing: {slow}; model.fused: on does it all the same" if slow else None


def _no_faster(device_type: str, dtype: torch.dtype) -> str | None:
    """Why fused layers gain nothing where nothing is quantized."""
    if device_type == "cpu":
        return "it gains nothing on a CPU"  # 5 to 6 % slower with the demo's model: benchmarks/results/cpu_fused.json
    if dtype != torch.bfloat16:
        return "on a GPU it gains in BF16 and below"
    if device_type != "cuda":
        return "it needs a CUDA device"
    return None if HAS_TRITON else "it needs Triton, which is not installed (pip install triton)"


# ── Which layers can be fused ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Parts:
    """The modules of a decoder layer by what they do; names are those inside the layer."""

    attention: nn.Module
    attention_norm: Norm
    qkv: Mapping[str, nn.Linear]  # one stacked product
    head_norms: tuple[nn.Module, ...]  # of queries and keys, or none
    output: Mapping[str, nn.Linear]
    mlp_norm: Norm
    gate_up: Mapping[str, nn.Linear]
    down: Mapping[str, nn.Linear]
    heads: Heads


def assess_layer(name: str, layer: nn.Module, decisions: Mapping[str, Decision]) -> tuple[str | None, frozenset[str]]:
    """Why `layer`, called `name` in its model, stays unfused, None if it does not; and which of its linears are in low
    precision, by name in the model.

    `decisions`: what each linear is to compute in, empty where nothing is quantized. Where they differ among the linears of one
    stacked product, the layer stays unfused.
    """
    inner = [f"{name}.{part}" for part, module in layer.named_modules() if isinstance(module, LINEARS)]
    low = frozenset(linear for linear in inner if decisions and decisions[linear].reason is None)
    return _unsupported(layer) or _torn_apart(name, layer, low), low


def _torn_apart(name: str, layer: nn.Module, low: frozenset[str]) -> str | None:
    """Which linears are one product when `layer` is fused and would compute in different precisions; None where none would."""
    parts = parts_of(layer)
    for stack in (parts.qkv, parts.output, parts.gate_up, parts.down):
        if len({f"{name}.{member}" in low for member in stack}) > 1:
            members = ", ".join(member.rpartition(".")[2] for member in stack)
            return f"{members} are one product when fused, and would compute in different precisions"
    return None


def _unsupported(layer: nn.Module) -> str | None:
    """Why `layer` cannot be fused; None if it can."""
    if any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules()):
        return "has hooks, which no module of a fused layer would run"
    if f"{type(layer).__module__}.{type(layer).__qualname__}" not in _FUSED:
        return f"no fused form of {type(layer).__name__}"
    return None if layer.self_attn.config.hidden_act in ("silu", "swish") else "has an activation that is not fused"


def parts_of(layer: nn.Module) -> Parts:
    """The parts of a layer that can be fused."""
    attention, mlp, config = layer.self_attn, layer.mlp, layer.self_attn.config
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    normed = hasattr(attention, "q_norm")
    return Parts(
        attention=attention,
        attention_norm=Norm(first, first.variance_epsilon),
        qkv={f"self_attn.{name}": getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")},
        head_norms=(attention.q_norm, attention.k_norm) if normed else (),
        output={"self_attn.o_proj": attention.o_proj},
        mlp_norm=Norm(second, second.variance_epsilon),
        gate_up={f"mlp.{name}": getattr(mlp, name) for name in ("gate_proj", "up_proj")},
        down={"mlp.down_proj": mlp.down_proj},
        heads=Heads(config.num_attention_heads, config.num_key_value_heads, attention.head_dim),
    )


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

    @property
    def stacks(self) -> list[list[nn.Parameter]]:
        """Parameters that are the rows of one matrix, whose gradients must be those of another."""
        return [product.weights.weights for product in self.products]

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
        self.parts = parts = parts_of(layer)
        self._arithmetic = arithmetic
        self.unfused = layer.forward

        def make(linears: Mapping[str, nn.Module], joined: str) -> StackedProduct:
            weights = StackedWeight(list(linears.values()))
            weights.lay_together()
            members = tuple(f"{name}.{member}" for member in linears)
            stacked = members[0] if len(members) == 1 else f"{name}.{joined}"
            backends = [backend for backend, low in low_precision.items() if members[0] in low]  # of one stack all are, or none
            return StackedProduct(stacked, members, weights, arithmetic, backends)

        self.qkv = make(parts.qkv, "self_attn.qkv_proj")
        self.output = make(parts.output, "")
        self.gate_up = make(parts.gate_up, "mlp.gate_up_proj")
        self.down = make(parts.down, "")

    @property
    def products(self) -> tuple[StackedProduct, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, tokens, hidden] -> the same; with `cu_seqlens` of packed documents, else as transformers does it."""
        if kwargs.get("cu_seqlens") is None:
            return self.unfused(hidden_states, *args, **kwargs)
        # Viewed and not indexed: the gradient of an index is a tensor of zeros, into which the layer's gradient would be copied.
        x, parts, arithmetic = hidden_states.squeeze(0), self.parts, self._arithmetic
        arithmetic.differentiable = torch.is_grad_enabled()  # inside of an autograd.Function nobody could tell
        attended, x = self._attend(x, **kwargs)
        attended, added = OutputProduct.apply(arithmetic, self.output, attended, x, *self.output.weights.parameters)
        pieces = (arithmetic, parts.mlp_norm, self.gate_up, self.down)
        parameters = (parts.mlp_norm.weight, *self.gate_up.weights.parameters, *self.down.weights.parameters)
        return NormMLPAdd.apply(*pieces, attended, None if added else x, *parameters)[None]

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
        parts, arithmetic = self.parts, self._arithmetic
        attention, heads, head_norms = parts.attention, parts.heads, [norm.weight for norm in parts.head_norms]
        name, eps = attention.config._attn_implementation, (parts.head_norms[0].variance_epsilon if head_norms else 0.0)
        angles = [table.flatten(0, -2) for table in position_embeddings]
        before = (arithmetic, parts.attention_norm, self.qkv)
        of_norm, of_product = parts.attention_norm.weight, self.qkv.weights.parameters
        window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))  # of this layer, or all
        if name in ROTATED_ATTENTION and (window is None or window >= max_seqlen):
            attending = Attending(name, heads, eps, cu_seqlens, max_seqlen, attention.scaling)
            return NormAttention.apply(*before, attending, x, *angles, of_norm, *head_norms, *of_product)
        qkv, x = NormProduct.apply(*before, x, of_norm, *of_product)
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
        ctx: FunctionCtx, arithmetic: Arithmetic, norm: Norm, product: StackedProduct, x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        y, normed, statistics = _norm_product(ctx, arithmetic, norm, product, x)
        arithmetic.save(ctx, x, normed, *statistics)
        return y, x

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor, residual: Tensor | None) -> Gradients:
        x, normed, *statistics = ctx.pieces[0].saved(ctx)
        return None, None, None, *_norm_product_backward(ctx, dy, residual, x, normed, statistics)


def _norm_product(
    ctx: FunctionCtx, arithmetic: Arithmetic, norm: Norm, product: StackedProduct, x: Tensor
) -> tuple[Tensor, Operand, tuple[Tensor, ...]]:
    """norm(x) w^T + b, norm(x) as the product's operand, and the norm's statistics."""
    product.begin(x)
    ctx.is_first_in_forward, ctx.pieces = arithmetic.is_first_in_forward(), (arithmetic, norm, product)
    ctx.set_materialize_grads(False)
    normed, statistics = arithmetic.norm(x, norm, product)
    return product.forward(normed), normed, statistics


def _norm_product_backward(
    ctx: FunctionCtx, dy: Tensor, residual: Tensor | None, x: Tensor, normed: Operand, statistics: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of x, of the norm's weight, and of the product's parameters."""
    arithmetic, norm, product = ctx.pieces
    bias_gradients = product.weights.bias_gradients(dy)
    dy = product.gradient_operand(dy)
    d_normed = product.input_gradient(dy)
    weight_gradients = product.weight_gradients(dy, normed)
    dx, of_norm = arithmetic.norm_backward(d_normed, x, statistics, norm, residual)
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
        norm: Norm,
        product: StackedProduct,
        attending: Attending,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        qkv, normed, statistics = _norm_product(ctx, arithmetic, norm, product, x)
        norms = parameters[1 : len(parameters) - len(product.weights.parameters)]
        q, k, v = rotate(qkv, cos, sin, attending.heads, _head_norms(norms, attending.eps, qkv.dtype))
        attend, _ = ROTATED_ATTENTION[attending.name]
        output, *kept = attend(q, k, v, attending.ends, attending.longest, attending.scale)
        rotated = [q, k, v] if arithmetic.keeps_rotated or not norms else [None] * 3
        ctx.attending, ctx.counts = attending, (len(norms), len(kept))
        arithmetic.save(ctx, x, normed, qkv if norms else None, *rotated, output, cos, sin, *norms, *kept, *statistics)
        return output.view(len(qkv), -1), x

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_output: Tensor, residual: Tensor | None) -> Gradients:
        attending, (normed_heads, of_attention) = ctx.attending, ctx.counts
        x, normed, qkv, q, k, v, output, cos, sin, *rest = ctx.pieces[0].saved(ctx)
        norms, kept, statistics = rest[:normed_heads], rest[normed_heads:][:of_attention], rest[normed_heads + of_attention :]
        head_norms = _head_norms(norms, attending.eps, output.dtype)
        if q is None:
            q, k, v = rotate(qkv, cos, sin, attending.heads, head_norms)
        _, differentiate = ROTATED_ATTENTION[attending.name]
        d_output = d_output.view(output.shape)
        gradients = differentiate(d_output, q, k, v, output, *kept, attending.ends, attending.longest, attending.scale)
        del q, k, v, output, kept, rest, d_output
        head_gradients = list(rotate_backward(*gradients, qkv, cos, sin, attending.heads, head_norms))
        del gradients, qkv
        # Taken out of the list, so that the gradient in BF16 is free as soon as it has been quantized.
        dx, of_norm, *of_product = _norm_product_backward(ctx, head_gradients.pop(0), residual, x, normed, statistics)
        return *(None,) * 4, dx, None, None, of_norm, *head_gradients[:normed_heads], *of_product


class OutputProduct(torch.autograd.Function):
    """x [tokens, in], residual [tokens, out] -> x w^T + b + residual, and True; or, where the product does not add by itself,
    x w^T + b and False: then the norm that comes next adds the residual."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, arithmetic: Arithmetic, product: StackedProduct, x: Tensor, residual: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, bool]:
        product.begin(x)
        operand = product.operand(x)
        ctx.adds = product.adds(operand)
        y = product.forward(operand, residual if ctx.adds else None)
        ctx.pieces = (arithmetic, product)
        arithmetic.save(ctx, operand)
        return y, ctx.adds

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor, _: None) -> Gradients:
        arithmetic, product = ctx.pieces
        (operand,) = arithmetic.saved(ctx)
        residual = dy if ctx.adds else None
        bias_gradients = product.weights.bias_gradients(dy)
        dy = product.gradient_operand(dy)
        dx = product.input_gradient(dy)
        return None, None, dx, residual, *product.weight_gradients(dy, operand), *bias_gradients


class NormMLPAdd(torch.autograd.Function):
    """x, residual [tokens, hidden] -> s + swiglu(norm(s) gate_up^T + b) down^T + c, with s = x + residual; without a residual
    s is x.

    The sum is written over x: `OutputProduct` saves what it multiplies and not what it gives, which nobody else reads."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        arithmetic: Arithmetic,
        norm: Norm,
        gate_up: StackedProduct,
        down: StackedProduct,
        x: Tensor,
        residual: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        gate_up.begin(x)
        normed, statistics = arithmetic.norm(x, norm, gate_up, residual)
        hidden = gate_up.forward(normed)
        down.begin(hidden)
        activated, kept = arithmetic.activate(hidden, gate_up, down)
        y = down.forward(activated, x)
        ctx.pieces = (arithmetic, norm, gate_up, down)
        ctx.adds = residual is not None
        arithmetic.save(ctx, x, normed, hidden, kept, *statistics)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> Gradients:
        arithmetic, norm, gate_up, down = ctx.pieces
        x, normed, hidden, kept, *statistics = arithmetic.saved(ctx)
        down_bias = down.weights.bias_gradients(dy)
        quantized = down.gradient_operand(dy)
        d_activated = down.input_gradient(quantized)
        d_hidden, activated, gate_up_bias = arithmetic.activate_backward(d_activated, hidden, kept, gate_up, down)
        del d_activated, hidden, kept
        down_weights = down.weight_gradients(quantized, activated)
        del quantized, activated
        d_normed = gate_up.input_gradient(d_hidden)
        gate_up_weights = gate_up.weight_gradients(d_hidden, normed)
        dx, of_norm = arithmetic.norm_backward(d_normed, x, statistics, norm, residual=dy)
        of_parameters = (of_norm, *gate_up_weights, *gate_up_bias, *down_weights, *down_bias)
        return *(None,) * 4, dx, dx if ctx.adds else None, *of_parameters


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
        return dqkv, None, None, None, None, *(norm_gradients[: len(norms)])


def _head_norms(norms: Sequence[Tensor], eps: float, dtype: torch.dtype) -> HeadNorms | None:
    """Returns the norms in the dtype of activations, as the unfused layer's working copies are. They are cast in here and not
    before: autograd would round the gradients to that dtype on their way back."""
    return HeadNorms(*(norm.to(dtype) for norm in norms), eps) if norms else None
