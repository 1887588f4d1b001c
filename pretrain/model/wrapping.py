"""Functions that replace or wrap the forward of a module.

The model stays a transformers model with its own parameter names. `pretrain.run.assembly` calls
`choose_arithmetic`, `fuse`, `convert` and `wrap_layers`. docs/architecture.md explains this order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from foundation.errors import InputError
from pretrain.model.experts import GroupedExperts, group_experts
from pretrain.model.fused.arithmetic import Arithmetic, Implementation
from pretrain.model.fused.layers import FusedLayer, FusedLayers, assess_layer
from pretrain.model.huggingface import decoder_layers, is_mixture
from pretrain.model.loss.head import LossHead
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.routing import forget_logits
from pretrain.precision.gemm import GemmEngine
from pretrain.precision.product import LowPrecisionLinear, PrecisionContext, summing_where
from pretrain.precision.scope import Decision, features_of
from pretrain.precision.settings import ActivePrecision
from pretrain.settings.recipe import ModelSettings, Switch

Forward = Callable[..., Any]


def choose_arithmetic(
    setting: Switch, active: ActivePrecision, device_type: str, context: PrecisionContext
) -> tuple[Arithmetic | None, str]:
    """Return the arithmetic of the model's fused layers, or None and the reason, for the audit.

    Raise InputError as `not_fused_because` does.
    """
    if reason := not_fused_because(setting, active, device_type, context.compute_dtype):
        return None, reason
    if active.backend != "torch":
        return Arithmetic(context, Implementation.TRANSFORMER_ENGINE), ""
    if _gains(device_type, context.compute_dtype):
        return Arithmetic(context, Implementation.KERNELS), ""
    return Arithmetic(context, Implementation.FORMULAS), ""


def not_fused_because(
    setting: Switch, active: ActivePrecision, device_type: str, dtype: torch.dtype
) -> str | None:
    """Return why no layer of any architecture is fused, or None.

    Raise InputError if `model.fused: on` is impossible.
    """
    if setting == "off":
        return "nothing: model.fused is off"
    if active.backend == "emulation":
        if setting == "on":
            raise InputError(
                "`model.fused: on`: emulated products are computed one by one; set "
                "`model.fused: auto`"
            )
        return "nothing: emulated products are computed one by one"
    if setting == "on" or active.backend == "transformer_engine" or _gains(device_type, dtype):
        return None
    return "nothing, as only a GPU gains by it, in BF16 and below; model.fused=on fuses anyway"


def _gains(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether fused layers are faster if nothing is quantized.

    On a CPU, the demo's model was 5 to 6 % slower (benchmarks/results/cpu/cpu_fused.json).
    """
    return device_type == "cuda" and dtype == torch.bfloat16


def fuse(
    layers: Mapping[str, nn.Module],
    decisions: Mapping[GemmEngine | None, Mapping[str, Decision]],
    arithmetic: Arithmetic,
) -> FusedLayers:
    """Replace the forward of each layer that can be fused, in place.

    `decisions`: by engine, the precision of each linear layer. Empty if nothing is quantized.
    """
    fused = {}
    reasons: dict[str, str] = {}  # of layers that stay unfused, see `assess_layer`
    for name, layer in layers.items():
        low_precision = {}
        for engine, engine_decisions in (decisions or {None: {}}).items():
            reason, low_precision[engine] = assess_layer(name, layer, engine_decisions)
            if reason:
                reasons.setdefault(name, reason)
        if name not in reasons:
            fused[name] = FusedLayer(layer, name, arithmetic, low_precision=low_precision)
            layer.forward = fused[name]
    return FusedLayers(fused, reasons, arithmetic)


def convert(
    hf: PreTrainedModel,
    decisions: Mapping[str, Decision],
    context: PrecisionContext,
    fused: FusedLayers | None = None,
) -> None:
    """Convert the model to the context's current engine, in place. Call it for each engine.

    The linear layers that `decisions` quantizes get a Gemm of the engine and, at the first call, a
    module in their place with the same Parameters. Stacked experts become `GroupedExperts`. Linear
    layers inside of `fused` layers stay, because fused layers have their own Gemms.
    """
    engine: Any = context.backend
    if is_mixture(hf):
        group_experts(hf, context)
    fused_prefixes = tuple(f"{name}." for name in fused.layers) if fused else ()
    quantized = {name for name, decision in decisions.items() if decision.reason is None}
    for name, module in list(hf.named_modules()):
        if isinstance(module, GroupedExperts):
            for key, stack in module.stacks.items():
                if stack.name in quantized:
                    _, out_features, in_features = module.get_parameter(key).shape
                    stack.add(engine, in_features, out_features)
        if name in quantized and not name.startswith(fused_prefixes):
            if not isinstance(module, LossHead | LowPrecisionLinear):
                module = LowPrecisionLinear(module, name, context)
                hf.set_submodule(name, module)
            module.state.add(engine, *features_of(module), bias=module.bias is not None)


# ── Working copies, compilation, recomputation ──────────────────────────────────────────────────
#
# All parameters of a layer are cast when the layer begins, as FSDP2's `param_dtype=bfloat16` does
# it, so one device and several compute the same. torch.autocast would leave norms, residual stream
# and rotary tables in FP32.


def wrap_layers(
    packed: PackedLanguageModel,
    settings: ModelSettings,
    *,
    cast_to: torch.dtype | None,
    compile_layers: bool,
) -> None:
    """Wrap the forward of the model's units: working copies, compilation, gradient checkpointing.

    Gradient checkpointing is outermost, so a recomputed layer sees the working copies of its
    forward, whatever transformers' own checkpointing does. A unit is an embedding, a decoder layer,
    or a module such as the final norm. The LM head casts for itself. `cast_to`: dtype of the
    working copies, None if the parameters are in the compute dtype.
    """
    for norm in packed.hf.modules():
        if isinstance(norm, nn.LayerNorm):
            norm.forward = partial(_layer_norm, norm)  # type: ignore[method-assign]
    for unit in _units(packed.hf.base_model):
        if isinstance(unit, nn.Embedding):
            if cast_to is not None:
                unit.forward = casting_output(unit.forward, cast_to)  # type: ignore[method-assign]
        elif isinstance(unit.forward, FusedLayer):
            # A fused layer casts for itself, and calls kernels that torch.compile cannot compile.
            if cast_to is not None:
                unit.forward.unfused = casting_parameters(unit, unit.forward.unfused, cast_to)
        else:
            _wrap_unit(unit, cast_to, compile_layers=compile_layers)
    for index, layer in enumerate(decoder_layers(packed.hf).values()):
        if settings.recomputes(index):
            layer.forward = _recomputed_in_backward(layer, packed.context)


def _wrap_unit(unit: nn.Module, cast_to: torch.dtype | None, *, compile_layers: bool) -> None:
    """Wrap the forward of a layer that is not fused: compile it, and cast its parameters."""
    # One graph ends at each low-precision product, and another begins after it. The casts stay
    # outside of these graphs: a graph cannot end inside of the context that swaps the parameters.
    has_breaks = any(
        isinstance(module, LowPrecisionLinear | GroupedExperts) for module in unit.modules()
    )
    # The casts stay outside of a lone norm's graph too, which would skip the rounding of its
    # weight.
    is_lone = not isinstance(unit, GradientCheckpointingLayer)
    casts_outside = has_breaks or is_lone
    if compile_layers and casts_outside:
        # One graph of a norm serves any number of tokens, but it splits its sums by the number that
        # it saw first, which differs in a resumed run. If bits must repeat, compile for each
        # number.
        dynamic = is_lone and not torch.are_deterministic_algorithms_enabled()
        unit.forward = torch.compile(unit.forward, dynamic=dynamic, fullgraph=not has_breaks)
    if cast_to is not None:
        unit.forward = casting_parameters(unit, unit.forward, cast_to)
    if compile_layers and not casts_outside:
        # Shapes are static, except for the number of documents, which the batch marks as dynamic.
        # So one graph serves all steps and layers.
        unit.forward = torch.compile(unit.forward, fullgraph=True, dynamic=False)


def _units(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, GradientCheckpointingLayer | nn.Embedding) or module._parameters:
        yield module
    else:
        for child in module.children():
            yield from _units(child)


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Return the forward of `norm`, on a CPU in FP32 at least.

    torch's CPU kernel sums the gradients of a BF16 weight and bias in BF16, which is off by 5 %
    after 2,048 rows.
    """
    wide = torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else x.dtype
    weight, bias = (None if each is None else each.to(wide) for each in (norm.weight, norm.bias))
    return F.layer_norm(x.to(wide), norm.normalized_shape, weight, bias, norm.eps).to(x.dtype)


def _recomputed_in_backward(layer: nn.Module, context: PrecisionContext) -> Forward:
    """Return the layer's forward, computed again in backward."""
    forward = layer.forward

    def forward_recomputed_in_backward(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        count = itertools.count()

        def compute(*args: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            finally:
                if next(count):  # in backward, after the model's forward has ended
                    forget_logits(layer)

        return context.checkpoint(compute, *args)

    return forward_recomputed_in_backward


def casting_parameters(module: nn.Module, forward: Forward, dtype: torch.dtype) -> Forward:
    """Return `forward` of `module`, run with all parameters cast to `dtype`, differentiably.

    The weights of low-precision linear layers and of experts keep their `main_grad`: their products
    add to it from FP32, and no gradient goes through the cast.
    """
    summed_apart = []
    for name, part in module.named_modules():
        if isinstance(part, LowPrecisionLinear):
            summed_apart.append(f"{name}.weight".removeprefix("."))
        elif isinstance(part, GroupedExperts):
            summed_apart += [f"{name}.{key}" for key in part.stacks]

    def forward_with_working_copies(*args: Any, **kwargs: Any) -> Any:
        copies = {name: parameter.to(dtype) for name, parameter in module.named_parameters()}
        for name in summed_apart:
            summing_where(module.get_parameter(name), copies[name])
        with _reparametrize_module(module, copies):
            return forward(*args, **kwargs)

    return forward_with_working_copies


def casting_output(forward: Forward, dtype: torch.dtype) -> Forward:
    """Return `forward` with its output cast to `dtype`.

    An embedding so needs no cast copy of its table, and its gradients add up in FP32.
    """
    return lambda *args, **kwargs: forward(*args, **kwargs).to(dtype)
