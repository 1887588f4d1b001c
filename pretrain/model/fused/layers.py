"""Choose the decoder layers that can be fused, and replace their forward by a fused one.

Only layers of the classes in `_FUSED` are fused. A subclass of such a class is not fused, because
it may compute something else. `pretrain.model.fused.half_layers` fuses the MLPs of other classes.
The modules and parameters of a fused layer stay where they are; only its `forward` is replaced. If
a call passes no packed documents, as in generation, the fused forward calls the original forward.

A fused layer has two autograd nodes instead of many. Each norm writes its output once, in the
format that the next matrix product reads. The kernel that computes the gradient of a norm also adds
the gradient of the residual branch. Gradients of parameters are added directly to the main
gradients of the step (`pretrain.model.gradients`), which each parameter of a fused layer must have.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from pretrain.model.attention import ATTENTION_KERNELS, AttentionKernels
from pretrain.model.fused.arithmetic import Arithmetic, StackedLinear, StackedPass
from pretrain.model.fused.formulas import ACTIVATIONS, HeadNorms, Heads
from pretrain.model.gradients import Summed

Gradients = tuple[Tensor | None, ...]


class Names(NamedTuple):
    """Names of modules in the decoder layers of one class.

    Attributes:
        attention: The attention module.
        norms: The norms before attention and before the MLP.
        stacks: Map the name of each matrix product of the fused layer to the names of the linear
            layers that the product computes together. The order of the four products is: queries,
            keys and values; the output of attention; the first linear layers of the MLP; the last
            linear layer of the MLP.
    """

    attention: str
    norms: tuple[str, str]
    stacks: Mapping[str, tuple[str, ...]]


_ATTENTION_STACKS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
}
_NORMS = ("input_layernorm", "post_attention_layernorm")
LLAMA_MLP = {
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
_GPT2_ATTENTION_STACKS = {name: (name,) for name in ("attn.c_attn", "attn.c_proj")}
_GPT2_MLP = {name: (name,) for name in ("mlp.c_fc", "mlp.c_proj")}
_LLAMA = Names("self_attn", _NORMS, _ATTENTION_STACKS | LLAMA_MLP)
_STARCODER2 = Names("self_attn", _NORMS, _ATTENTION_STACKS | _GPT2_MLP)
_GPT2 = Names("attn", ("ln_1", "ln_2"), _GPT2_ATTENTION_STACKS | _GPT2_MLP)
# Full names of the layer classes that can be fused. Classes are compared by name, because importing
# the classes would import six architectures at the start of every run.
_FUSED = {
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": _LLAMA,
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer": _LLAMA,
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer": _LLAMA,
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer": _LLAMA,
    "transformers.models.starcoder2.modeling_starcoder2.Starcoder2DecoderLayer": _STARCODER2,
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": _GPT2,
}


class Stack(NamedTuple):
    """Full names of a matrix product, and of the linear layers that it computes together."""

    product: str
    members: tuple[str, ...]


def stack_of(linear: str) -> Stack:
    """Return the product that computes `linear`, and its linear layers.

    `linear` is the full name of a linear layer, such as "model.layers.0.mlp.up_proj". In a fused
    decoder layer, the product computes several linear layers, and checkpoints store the histories
    of the product under the product's name. A linear layer that is in no stack has a product of its
    own, with its name.
    """
    for names in _FUSED.values():
        for product, members in names.stacks.items():
            for member in members:
                layer = linear.removesuffix(member)
                if layer != linear and layer.endswith("."):
                    return Stack(f"{layer}{product}", tuple(f"{layer}{name}" for name in members))
    return Stack(linear, (linear,))


# ── The choice of layers ──


@dataclass(frozen=True)
class Parts:
    """Linear layers, norms and head layout of a decoder layer that can be fused.

    Attributes:
        attention: The attention module.
        norms: The norms before attention and before the MLP.
        stacks: Map the name of each matrix product to a dict, which maps the name of each of its
            linear layers to the linear layer. See `Names.stacks` for the order.
        head_norms: The RMSNorms of query heads and of key heads. Empty if the layer has none.
        heads: Layout of the output of the query-key-value product.
        activation: Name of the activation function in transformers.
    """

    attention: Any
    norms: tuple[nn.Module, ...]
    stacks: Mapping[str, Mapping[str, nn.Linear]]
    head_norms: tuple[Any, ...]
    heads: Heads
    activation: str

    @classmethod
    def of(cls, layer: Any) -> Parts:
        """Return the parts of `layer`, whose class must be in `_FUSED`."""
        names = _FUSED[full_name(layer)]
        attention = layer.get_submodule(names.attention)
        config = attention.config
        stacks = {
            stack: {name: layer.get_submodule(name) for name in members}
            for stack, members in names.stacks.items()
        }
        head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
        query = config.num_attention_heads
        kv = getattr(config, "num_key_value_heads", query)
        return cls(
            attention=attention,
            norms=tuple(layer.get_submodule(name) for name in names.norms),
            stacks=stacks,
            head_norms=head_norms,
            heads=Heads(query, kv, attention.head_dim),
            activation=getattr(config, "activation_function", None) or config.hidden_act,
        )

    @property
    def gated(self) -> bool:
        """True if the MLP has a gate, so that two linear layers precede the activation."""
        _, _, first, _ = self.stacks.values()
        return len(first) > 1

    def head_norms_in(self, dtype: torch.dtype) -> HeadNorms | None:
        """Return the head norms with weights in `dtype`, or None if the layer has no head norms.

        `dtype` is the dtype of activations. The unfused layer casts these weights to `dtype` too.
        Call this method inside of an autograd node. If autograd recorded the cast, it would round
        the gradients of the weights to `dtype`.
        """
        if not self.head_norms:
            return None
        query, key = (norm.weight.detach().to(dtype) for norm in self.head_norms)
        return HeadNorms(query, key, self.head_norms[0].variance_epsilon)


def full_name(layer: nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def assess_layer(name: str, layer: Any, low_precision: Iterable[Collection[str]]) -> str | None:
    """Return the reason why a decoder layer cannot be fused, or None if it can.

    For example, a decoder layer cannot be fused if some linear layers of one stacked product are in
    low precision and others are not.

    Args:
        name: Name of the decoder layer in its model.
        layer: The decoder layer.
        low_precision: For each precision of the run, the names of all quantized linear layers of
            the model, such as "model.layers.0.mlp.up_proj".
    """
    if full_name(layer) not in _FUSED:
        return f"{type(layer).__name__} has no fused implementation"
    parts = Parts.of(layer)
    if parts.activation not in ACTIVATIONS[parts.gated]:
        return f"their activation {parts.activation} has no fused implementation"
    # The configuration keys of the dropout of the residual branches, in GPT-2 and in StarCoder2.
    if any(getattr(parts.attention.config, key, 0) for key in ("resid_pdrop", "residual_dropout")):
        return "they have dropout"
    if stack := mixed_stack(name, parts.stacks, low_precision):
        members = ", ".join(member.rpartition(".")[2] for member in stack)
        return f"their {members} would be one fused product, but have different precisions"
    return None


def mixed_stack(
    name: str, stacks: Mapping[str, Iterable[str]], low_precision: Iterable[Collection[str]]
) -> Iterable[str] | None:
    """Return a stack of which some linear layers are in low precision and others are not, or None.

    `stacks` maps the names of stacked products to the names of their linear layers in the decoder
    layer. See `assess_layer` for the other arguments.
    """
    for low, stack in itertools.product(low_precision, stacks.values()):
        if len({f"{name}.{member}" in low for member in stack}) > 1:
            return stack
    return None


# ── The forward of a layer ──


@dataclass(frozen=True)
class FusedLayers:
    """The fused layers of one model, which may have none.

    Attributes:
        layers: Map the name of each layer in the model to its fused forward, which may fuse only
            the MLP.
        left_out: Map the name of each layer that is not fused completely to the reason.
    """

    layers: Mapping[str, FusedLayer]
    left_out: Mapping[str, str]

    @property
    def are_complete(self) -> bool:
        """True if every decoder layer of the model is fused completely."""
        return bool(self.layers) and not self.left_out

    @property
    def products(self) -> list[StackedLinear]:
        """List of the stacked linears of all fused layers."""
        return [product for layer in self.layers.values() for product in layer.products]

    @property
    def members(self) -> dict[str, StackedLinear]:
        """Dict from the name of each linear in a fused layer to its stacked linear."""
        return {member: product for product in self.products for member in product.members}

    @property
    def stacks(self) -> list[list[Tensor]]:
        """One list of weights for each stacked linear.

        The weights of a list are the rows of one matrix. Their main gradients must be the rows of
        one matrix too.
        """
        return [product.weights for product in self.products]

    def describe(self) -> str:
        """Return a text for the audit.

        Example: "28 of 28 layers, queries and keys kept for backward".
        """
        fused = [layer for name, layer in self.layers.items() if name not in self.left_out]
        reasons = Counter(self.left_out.values())
        rest = "".join(f"; {count} not completely: {reason}" for reason, count in reasons.items())
        is_kept = any(layer.arithmetic.keeps_rotated for layer in fused)
        kept = ", queries and keys kept for backward" if is_kept else ""
        return f"{len(fused)} of {len(fused) + len(self.left_out)} layers{kept}{rest}"


NO_FUSED_LAYERS = FusedLayers({}, {})


def stacked_linears(
    layer: nn.Module, name: str, stacks: Mapping[str, Iterable[str]], arithmetic: Arithmetic
) -> tuple[StackedLinear, ...]:
    """Return the matrix products of `layer`. See `Names.stacks`. `name` is the layer's name."""
    products = []
    for stacked_name, members in stacks.items():
        linears: Any = {f"{name}.{member}": layer.get_submodule(member) for member in members}
        product = StackedLinear(f"{name}.{stacked_name}", linears, arithmetic.context)
        product.lay_together()
        products.append(product)
    return tuple(products)


class FusedLayer:
    """Fused forward of one decoder layer.

    A FusedLayer is not an nn.Module. It replaces the `forward` attribute of the decoder layer. The
    parameters belong to the decoder layer.

    Args:
        layer: The decoder layer.
        name: Name of the layer in its model.
        arithmetic: Computes the norms, the rotation and the activation between the products.
    """

    def __init__(self, layer: Any, name: str, arithmetic: Arithmetic) -> None:
        self.unfused = layer.forward
        self.arithmetic = arithmetic
        self.parts = Parts.of(layer)
        self.mlp_norm = self.parts.norms[1]
        self.gated = self.parts.gated
        self.products = stacked_linears(layer, name, self.parts.stacks, arithmetic)
        self.qkv, self.output, self.gate_up, self.down = self.products

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's output [1, tokens, hidden] for `hidden_states` of the same shape.

        If `kwargs` has no `cu_seqlens`, there are no packed documents, and the original forward is
        called.
        """
        if kwargs.get("cu_seqlens") is None:
            return self.unfused(hidden_states, *args, **kwargs)
        # Use a view and not an index. The backward of an index would create a tensor of zeros and
        # copy the layer's gradient into it.
        x = hidden_states.squeeze(0)
        # Read the gradient mode here, because gradients are always disabled inside of an
        # autograd.Function.
        differentiable = torch.is_grad_enabled()
        attended, x = self._attend(x, differentiable, **kwargs)
        weights = (weight for product in self.after_attention for weight in product.weights)
        inputs = (attended, x, *self.mlp_vectors, *weights)
        return OutputAndMLP.apply(self, differentiable, *inputs)[None]

    @property
    def attention_vectors(self) -> list[Summed]:
        """List of the parameters of norms, and of the biases, in `NormedAttention`.

        Its backward computes their gradients in the same order.
        """
        of_heads = (norm.weight for norm in self.parts.head_norms)
        return [*self.parts.norms[0].parameters(), *of_heads, *self.qkv.biases]

    @property
    def mlp_vectors(self) -> list[Summed]:
        """List of the parameters of the norm, and of the biases, in `OutputAndMLP`.

        Its backward computes their gradients in the same order.
        """
        biases = (bias for product in self.after_attention for bias in product.biases)
        return [*self.mlp_norm.parameters(), *biases]

    @property
    def after_attention(self) -> tuple[StackedLinear, ...]:
        """The products in `OutputAndMLP`: all except the query-key-value product.

        A `HalfFusedLayer` has only the two products of the MLP.
        """
        return self.products[-3:]

    def _attend(
        self,
        x: Tensor,
        differentiable: bool,
        *,
        cu_seqlens: Tensor,
        max_seqlen: int,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        documents: Tensor,
        **_: Any,
    ) -> tuple[Tensor | None, Tensor]:
        """Return the output of attention [tokens, query heads x dim], and x [tokens, hidden].

        The returned x has the same values as the argument, but it is an output of the autograd node
        `NormedAttention`. The residual branch must use the returned x, so that the backward of the
        node gets the gradient of the residual branch. `differentiable` is True if a backward can
        follow.
        """
        attention = self.parts.attention
        # GPT-2 adds learned positions to the embeddings and has no rotation.
        tables: Sequence[Tensor | None] = (None, None)
        if position_embeddings is not None:
            tables = [table.flatten(0, -2) for table in position_embeddings]
        inputs = (x, *tables, *self.attention_vectors, *self.qkv.weights)
        name = attention.config._attn_implementation
        # In some models, each layer has the attribute `sliding_window`. In other models, only the
        # configuration has it, for all layers.
        window = getattr(
            attention, "sliding_window", getattr(attention.config, "sliding_window", None)
        )
        if name in ATTENTION_KERNELS and (window is None or window >= max_seqlen):
            arguments = (documents, max_seqlen, attention.scaling)
            kernels = (ATTENTION_KERNELS[name], arguments)
            return NormedAttention.apply(self, differentiable, kernels, *inputs)
        *states, x = NormedAttention.apply(self, differentiable, None, *inputs)
        q, k, v = (state.transpose(0, 1)[None] for state in states)
        output = AttentionInterface()[name](
            attention,
            q,
            k,
            v,
            attention_mask=None,
            scaling=attention.scaling,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            documents=documents,
            sliding_window=window,
        )[0]
        return output.squeeze(0).flatten(1), x


# ── The autograd nodes of a layer ──
#
# Parameters are arguments of the nodes only to make them inputs of the autograd graph, as FSDP2 and
# `RankSums` require. Products and norms read the parameters from the layer. Backward adds the
# gradients of parameters to their main gradients, and returns None for the parameters. The small
# gradients of norms and biases are added by one kernel, because a layer has many of them.


class NormedAttention(torch.autograd.Function):
    """Norm, query-key-value product and rotation as one autograd node, optionally with attention.

    If `attention` is None, x [tokens, hidden] is mapped to queries [tokens, query, dim], keys and
    values [tokens, kv, dim], with queries and keys normalized and rotated. Otherwise the node also
    computes attention, and returns its output [tokens, query x dim] instead of queries, keys and
    values. `attention` is then a tuple of the functions that compute attention, and of their last
    three arguments: the result of `documents_for`, the pack length, and the factor of q k^T. In
    both cases the last output is x itself, for the residual branch.

    The backward of the node gets the gradient of x from the residual branch, and adds it in the
    kernel that computes the gradient of the norm. The backward of the rotation writes its result in
    the format that the products of the input gradient and the weight gradient read.

    If heads are normalized, forward saves the output of the query-key-value product, and backward
    recomputes queries, keys and values from this output. With `arithmetic.keeps_rotated`, forward
    also saves queries, keys and values, and backward does not recompute them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: FusedLayer,
        differentiable: bool,
        attention: tuple[AttentionKernels, tuple[Any, ...]] | None,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        arithmetic = layer.arithmetic
        product = StackedPass(layer.qkv, x, differentiable=differentiable)
        ctx.call = (layer, product, attention, arithmetic.gemm_class.claim_first_in_forward())
        normed, rstd, mean = arithmetic.norm(x, layer.parts.norms[0], product)
        qkv = product.project(normed)
        q, k, v = arithmetic.kernels.rotary.rotate(
            qkv, cos, sin, layer.parts.heads, layer.parts.head_norms_in(qkv.dtype)
        )
        saved = [normed, x, rstd, mean, qkv if layer.parts.head_norms else None, cos, sin]
        if attention is None:
            if differentiable:
                arithmetic.save(ctx, *saved)
            return q, k, v, x
        kernels, arguments = attention
        output, log_sums = kernels.forward(q, k, v, *arguments)
        # With head norms, `qkv` is saved, and backward can rotate it again.
        kept = [q, k, v] if arithmetic.keeps_rotated or not layer.parts.head_norms else [None] * 3
        if differentiable:
            arithmetic.save(ctx, *saved, *kept, output, log_sums)
        return output.view(len(x), -1), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_results: Tensor) -> Gradients:
        layer, product, attention, is_first_in_forward = ctx.call
        arithmetic = layer.arithmetic
        *gradients, residual = d_results
        del d_results
        normed, *saved = arithmetic.saved(ctx)
        x_and_statistics = saved[:3]
        # qkv, cos and sin, and the layout and norms of heads.
        rotation = (*saved[3:6], layer.parts.heads, layer.parts.head_norms_in(residual.dtype))
        if attention is not None:
            # The rest of `saved` are the inputs and results of attention.
            gradients = _attention_backward(layer, gradients.pop(), saved[6:], rotation, *attention)
        del saved
        dqkv, d_head_norms, d_biases = arithmetic.rotate_backward(gradients, *rotation, product)
        d_normed = product.input_gradient(dqkv)
        product.add_weight_gradient(dqkv, normed)
        dx, d_norm, _ = arithmetic.norm_backward(
            d_normed, *x_and_statistics, layer.parts.norms[0], residual=residual
        )
        if is_first_in_forward:
            arithmetic.gemm_class.finish_backward()
        d_vectors = [*d_norm, *d_head_norms[: len(layer.parts.head_norms)], *d_biases]
        _add_to_main_gradients(layer.attention_vectors, d_vectors)
        # The gradients of the parameters are in their main gradients.
        return None, None, None, dx, *[None] * (len(ctx.needs_input_grad) - 4)


def _add_to_main_gradients(parameters: Sequence[Summed], gradients: Any) -> None:
    torch._foreach_add_([parameter.main_grad for parameter in parameters], gradients)


def _attention_backward(
    layer: FusedLayer,
    d_output: Tensor,
    attended: Sequence[Any],
    rotation_inputs: tuple[Any, ...],
    kernels: AttentionKernels,
    arguments: tuple[Any, ...],
) -> list[Tensor]:
    """Return the gradients of queries, keys and values.

    `d_output` is the gradient of the attention output. `attended` has queries, keys and values, and
    the output and the log-sums of attention. If queries, keys and values are None, they are
    recomputed by a rotation with the arguments `rotation_inputs`. `kernels` and `arguments` are as
    in `NormedAttention`.
    """
    q, k, v, output, log_sums = attended
    if q is None:
        q, k, v = layer.arithmetic.kernels.rotary.rotate(*rotation_inputs)
    d_output = d_output.view(output.shape)
    return list(kernels.backward(d_output, q, k, v, output, log_sums, *arguments))


class OutputAndMLP(torch.autograd.Function):
    """Attention output projection and MLP as one autograd node, with both residual additions.

    `attended` [tokens, in] and `residual` [tokens, hidden] are mapped to y [tokens, hidden]:

        x = attended w^T + residual
        y = x + activation(norm(x) gate_up^T) down^T

    A product adds the biases of its linear layers, if they have any. In an MLP without a gate,
    `gate_up` is the first linear layer. If `attended` is None, the output projection is not fused,
    and x is `residual`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: FusedLayer,
        differentiable: bool,
        attended: Tensor | None,
        residual: Tensor,
        *_: Tensor,
    ) -> Tensor:
        arithmetic = layer.arithmetic
        x = residual
        output = None
        operand = None
        # The first product of a forward is in the other node if attention is fused.
        is_first_in_forward = False
        if attended is None:
            is_first_in_forward = arithmetic.gemm_class.claim_first_in_forward()
        else:
            output = StackedPass(layer.output, attended, differentiable=differentiable)
            operand = output.quantize("input", attended)
            x = output.project(operand, residual)
        gate_up = StackedPass(layer.gate_up, x, differentiable=differentiable)
        normed, rstd, mean = arithmetic.norm(x, layer.mlp_norm, gate_up)
        hidden = gate_up.project(normed)
        down = StackedPass(layer.down, hidden, differentiable=differentiable)
        activation = arithmetic.activation(hidden, layer.gated, gate_up, down)
        activated, kept = activation.forward(hidden)
        ctx.call = (layer, output, activation, is_first_in_forward)
        y = down.project(activated, x)
        # Save after the products, because saving splits quantized operands into tensors, and
        # products cannot use the split operands.
        if differentiable:
            arithmetic.save(ctx, operand, x, normed, hidden, kept, rstd, mean)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        layer, output, activation, is_first_in_forward = ctx.call
        gate_up = activation.gate_up
        down = activation.down
        arithmetic = layer.arithmetic
        operand, x, normed, hidden, kept, rstd, mean = arithmetic.saved(ctx)
        quantized = down.quantize("grad_output", dy)
        d_activated = down.input_gradient(quantized)
        d_hidden, activated, d_biases = activation.backward(d_activated, hidden, kept)
        del d_activated, hidden, kept
        down.add_weight_gradient(quantized, activated)
        del quantized, activated
        d_normed = gate_up.input_gradient(d_hidden)
        gate_up.add_weight_gradient(d_hidden, normed)
        del d_hidden, normed
        # dx and dy are the gradients of the outputs of `output` and `down`, so their sums over
        # tokens are the gradients of the biases.
        has_biases = down.sums_gradient or (output is not None and output.sums_gradient)
        dx, d_norm, (d_output_bias, d_down_bias) = arithmetic.norm_backward(
            d_normed, x, rstd, mean, layer.mlp_norm, residual=dy, summed=has_biases
        )
        del d_normed, x
        d_attended = None
        if output is not None:
            quantized = output.quantize("grad_output", dx)
            d_attended = output.input_gradient(quantized)
            output.add_weight_gradient(quantized, operand)
            d_biases = [*output.stack.bias_gradients(d_output_bias), *d_biases]
        d_biases += down.stack.bias_gradients(d_down_bias)
        if is_first_in_forward:
            arithmetic.gemm_class.finish_backward()
        _add_to_main_gradients(layer.mlp_vectors, [*d_norm, *d_biases])
        # The gradients of the parameters are in their main gradients.
        return None, None, d_attended, dx, *[None] * (len(ctx.needs_input_grad) - 4)
