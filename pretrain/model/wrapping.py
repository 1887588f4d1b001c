"""Everything that replaces or wraps the forward of a module, or where its gradient goes.

The model stays a transformers model with its own parameter names. pretrain.run.assembly calls `fuse`, `convert`, `wrap_layers`,
then (once the model is wrapped for its topology) `attach_main_gradients`; docs/architecture.md says why in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.utils.stateless import _reparametrize_module
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.fused.layers import FusedLayer, FusedLayers, assess_layer
from pretrain.model.huggingface import decoder_layers
from pretrain.model.loss.head import LossHead, LowPrecisionHead
from pretrain.model.packed import PackedLanguageModel
from pretrain.precision.linear import LowPrecisionLinear, LowPrecisionNorm, PrecisionContext, norm_kind, summing_where
from pretrain.precision.scope import LINEARS, Decision, eps_of, features_of
from pretrain.settings.recipe import ModelSettings

Forward = Callable[..., Any]
_ALIGNMENT = 128  # values; a sum begins at a multiple of 256 bytes at least, where every kernel may write at its widest
_EMPTY = -0.0


def fuse(layers: Mapping[str, nn.Module], decisions: Mapping[str, Decision], arithmetic: Arithmetic) -> FusedLayers:
    """Give each of `layers` that can be fused its fused forward, in place; arguments and reasons as of `assess_layer`."""
    fused, left_out = {}, {}
    for name, layer in layers.items():
        reason, low_precision = assess_layer(name, layer, decisions)
        if reason:
            left_out[name] = reason
        else:
            layer.forward = fused[name] = FusedLayer(layer, name, arithmetic, low_precision=low_precision)
    return FusedLayers(fused, left_out, arithmetic)


def convert(
    hf: PreTrainedModel, decisions: Mapping[str, Decision], context: PrecisionContext, fused: FusedLayers | None = None
) -> None:
    """Let every module that was decided for multiply in low precision; in place, and on the same Parameters. Those inside of
    `fused` layers stay: the layers multiply by themselves."""
    inside = tuple(f"{name}." for name in fused.layers) if fused else ()
    for name, module in list(hf.named_modules()):
        if name not in decisions or decisions[name].reason is not None or name.startswith(inside):
            continue
        if isinstance(module, LINEARS):
            product = context.backend.product(name, *features_of(module), bias=module.bias is not None)
            if isinstance(module, LossHead):
                module.low_precision = LowPrecisionHead(name, product, context)
            else:
                hf.set_submodule(name, LowPrecisionLinear(module, name, product, context))
        else:
            function = context.backend.norm(norm_kind(module), module.weight.shape[0], eps_of(module))
            hf.set_submodule(name, LowPrecisionNorm(module, eps_of(module), function, context))


def low_precision_weights(packed: PackedLanguageModel) -> int:
    """Weights that are multiplied in low precision, each with 6 FLOPs a token in forward and backward."""
    fused = packed.fused.low_precision_weights if packed.fused else 0
    low = (m for m in packed.hf.modules() if isinstance(m, LowPrecisionLinear) or (isinstance(m, LossHead) and m.low_precision))
    return fused + sum(module.weight.numel() for module in low)


# ── Working copies, compilation, recomputation ──────────────────────────────────────────────────────────────────────────────────
#
# torch.autocast would cast product by product, and leave norms, residual stream and rotary tables in FP32 wherever an FP32 weight
# touches them. Here all parameters of a layer are cast as the layer begins, as FSDP2's `param_dtype=bfloat16` does, so one device
# and many compute the same thing. The casts cost under 1 % of a step of 32,768 tokens.


def wrap_layers(
    packed: PackedLanguageModel, settings: ModelSettings, *, cast_to: torch.dtype | None, compile_layers: bool
) -> None:
    """Put working copies, compilation and gradient checkpointing around the forward of the model's units, innermost first: so a
    recomputed layer sees the working copies that its forward saw, whatever transformers' own checkpointing does.

    `cast_to`: the dtype of the working copies, None where the parameters are in the compute dtype already. A unit is an
    embedding, a decoder layer, or a module of its own such as the final norm; the LM head casts for itself.
    """
    recompute = settings.gradient_checkpointing
    every = {"none": None, "full": 1}[recompute] if isinstance(recompute, str) else recompute.every
    for unit in _units(packed.hf.base_model):
        if isinstance(unit, nn.Embedding):
            if cast_to is not None:
                unit.forward = casting_output(unit.forward, cast_to)
            continue
        if isinstance(unit.forward, FusedLayer):  # it casts for itself, and what it calls is not for the compiler
            if cast_to is not None:
                unit.forward.unfused = casting_parameters(unit, unit.forward.unfused, cast_to)
            continue
        # A graph ends at each low-precision product and another begins after it. The casts stay outside of these pieces: a graph
        # cannot end inside of the context that swaps the parameters. Outside of a lone norm too, whose graph would leave the
        # rounding of its weight out. The norm's graph serves any number of tokens: beside fused layers nothing else is compiled.
        in_pieces = any(isinstance(module, LowPrecisionLinear | LowPrecisionNorm) for module in unit.modules())
        alone = not isinstance(unit, GradientCheckpointingLayer)
        casts_outside = in_pieces or alone
        if compile_layers and casts_outside:
            unit.forward = torch.compile(unit.forward, dynamic=alone, fullgraph=not in_pieces)
        if cast_to is not None:
            unit.forward = casting_parameters(unit, unit.forward, cast_to)
        if compile_layers and not casts_outside:
            # Static shapes, except the number of documents, which the batch marks as dynamic: one graph serves all steps and
            # layers.
            unit.forward = torch.compile(unit.forward, fullgraph=True, dynamic=False)
    for index, layer in enumerate(decoder_layers(packed.hf).values()):
        if every is not None and index % every == 0:
            layer.forward = _recomputed_in_backward(layer, packed.context)


def _units(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, GradientCheckpointingLayer | nn.Embedding) or module._parameters:
        yield module
    else:
        for child in module.children():
            yield from _units(child)


def _recomputed_in_backward(layer: nn.Module, context: PrecisionContext) -> Forward:
    forward = layer.forward

    def forward_recomputed_in_backward(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return context.checkpoint(partial(forward, **kwargs), *args)

    return forward_recomputed_in_backward


def casting_parameters(module: nn.Module, forward: Forward, dtype: torch.dtype) -> Forward:
    """`forward` of `module`, run with every parameter of `module` cast to `dtype`; the casts are differentiated through.

    The weight of a low-precision linear keeps its `main_grad`: its product adds to that from FP32, and none goes through a cast.
    """
    low = {f"{name}.weight".removeprefix(".") for name, part in module.named_modules() if isinstance(part, LowPrecisionLinear)}

    def forward_with_working_copies(*args: Any, **kwargs: Any) -> Any:
        copies = {name: parameter.to(dtype) for name, parameter in module.named_parameters()}
        for name in low:
            summing_where(module.get_parameter(name), copies[name])
        with _reparametrize_module(module, copies):
            return forward(*args, **kwargs)

    return forward_with_working_copies


def casting_output(forward: Forward, dtype: torch.dtype) -> Forward:
    """`forward` with its output cast to `dtype`: an embedding needs no cast copy of its table, and gradients add up in FP32."""
    return lambda *args, **kwargs: forward(*args, **kwargs).to(dtype)


# ── Main gradients: the buffers in which the gradients of a step add up ─────────────────────────────────────────────────────────
#
# Autograd sums into `parameter.grad`, in the parameter's dtype: BF16 rounds the sum with every microbatch after the first. Here
# the sum is `parameter.main_grad`. A hook adds what autograd delivers in `.grad`, and frees it at once. A product may add to
# `main_grad` itself; it then returns no gradient for that weight.
#
# All sums lie in one allocation: what does not fit fails at the start, and clearing is one write. Cleared, it holds negative
# zeros. x + -0.0 is x for every x, sign of zero included, and a sum that is still all negative zeros is one that nothing was
# added to: products and sums begin at +0.0, and +0.0 + -0.0 is +0.0.
#
# One process alone: DistributedDataParallel and FSDP2 exchange what is in `.grad`, and keep it as torch does.


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The parameter's gradient, wherever it adds up; None where it has none and no buffer for one."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def attach_main_gradients(model: nn.Module, dtype: torch.dtype, stacks: Sequence[Sequence[nn.Parameter]] = ()) -> None:
    """Give every trained parameter of `model` a `main_grad` of its shape in `dtype` (FP32 or BF16), cleared; a tied one once.

    `stacks`: parameters that are the rows of one matrix, in order (queries, keys and values, say), each trained and in one stack.
    Their sums are the rows of one contiguous matrix too, so that one product can add to all of them.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stacked = {id(parameter) for stack in stacks for parameter in stack}
    runs = [*stacks, *([parameter] for parameter in trained if id(parameter) not in stacked)]
    sizes = [-(-sum(map(torch.numel, run)) // _ALIGNMENT) * _ALIGNMENT for run in runs]
    memory = torch.full((sum(sizes),), _EMPTY, dtype=dtype, device=trained[0].device)
    begin = 0
    for run, size in zip(runs, sizes, strict=True):
        at = begin
        for parameter in run:
            parameter.main_grad = memory[at : at + parameter.numel()].view(parameter.shape)
            parameter.grad_dtype = None  # any
            parameter.register_post_accumulate_grad_hook(_add_to_main)
            at += parameter.numel()
        begin += size
    if dtype == torch.float32:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                _sum_rows_in_fp32(module)


def clear_main_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Empty all sums, in place; what a backward that failed has left in `.grad` of these parameters goes too."""
    attached = [parameter for parameter in parameters if getattr(parameter, "main_grad", None) is not None]
    for memory in {id(each.main_grad._base): each.main_grad._base for each in attached}.values():
        memory.fill_(_EMPTY)
    for parameter in attached:
        parameter.grad = None


def was_reached(parameter: nn.Parameter) -> bool:
    """Whether a backward has given this parameter a gradient since they were cleared, even one of zeros. Waits for the device."""
    gradient = gradient_of(parameter)
    if gradient is None or gradient is parameter.grad:
        return gradient is not None
    return bool((gradient != 0).any()) or not bool(gradient.signbit().all())


def _add_to_main(parameter: nn.Parameter) -> None:
    """As soon as autograd has a gradient whole. BF16 is added to FP32 without a copy; FP32 to BF16 is rounded once, the sum."""
    if parameter.grad is not None:  # the hook runs also where all that use the parameter have returned none
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


def _sum_rows_in_fp32(embedding: nn.Embedding) -> None:
    """Let the gradients of a BF16 table's repeated tokens add up in FP32: autograd sums them before the hook sees them, and a
    common token comes a thousand times in a microbatch. A tied head's gradient is made FP32 before autograd adds the two."""
    changed = type(embedding).forward is not nn.Embedding.forward or "forward" in vars(embedding)  # as by `casting_output`
    special = embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse
    if embedding.weight.dtype == torch.float32 or not embedding.weight.requires_grad or special or changed:
        return
    embedding.weight.grad_dtype = torch.float32
    embedding.forward = lambda ids: _Lookup.apply(ids, embedding.weight, embedding.padding_idx)


class _Lookup(torch.autograd.Function):
    """Rows of a table [vocabulary, hidden] by `ids`; the table's gradient is FP32 whatever the rows are."""

    @staticmethod
    def forward(ctx: FunctionCtx, ids: Tensor, table: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding = len(table), -1 if padding is None else padding
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(gradient.float(), ids, ctx.rows, ctx.padding, False), None
