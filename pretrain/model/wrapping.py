"""Everything that replaces or wraps the forward of a module.

The model stays a transformers model with its own parameter names. pretrain.run.assembly calls `choose_arithmetic`, `fuse`,
`convert` and `wrap_layers`; docs/architecture.md says why in this order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from foundation.errors import InputError
from pretrain.model.experts import GroupedExperts, group_experts
from pretrain.model.fused.arithmetic import Arithmetic, By
from pretrain.model.fused.layers import FusedLayer, FusedLayers, assess_layer
from pretrain.model.huggingface import decoder_layers, is_mixture
from pretrain.model.loss.head import LossHead
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.routing import forget_logits
from pretrain.precision.product import Backend, LowPrecisionLinear, PrecisionContext, summing_where
from pretrain.precision.scope import LINEARS, Decision, features_of
from pretrain.precision.settings import ActivePrecision
from pretrain.settings.recipe import ModelSettings, Switch

Forward = Callable[..., Any]


def choose_arithmetic(
    setting: Switch, active: ActivePrecision, device_type: str, context: PrecisionContext
) -> tuple[Arithmetic | None, str]:
    """The arithmetic for the model of `context`, or None and the reason, worded for the audit; raises as `not_fused_because`."""
    if reason := not_fused_because(setting, active, device_type, context.compute_dtype):
        return None, reason
    if active.backend != "torch":
        return Arithmetic(context, By.TRANSFORMER_ENGINE), ""
    return Arithmetic(
        context, By.KERNELS if _gains(device_type, context.compute_dtype) else By.FORMULAS
    ), ""


def not_fused_because(
    setting: Switch, active: ActivePrecision, device_type: str, dtype: torch.dtype
) -> str | None:
    """Why no layer is fused, whatever its architecture; None: those that can be are. InputError for what cannot be `on`."""
    if setting == "off":
        return "nothing: model.fused is off"
    if active.backend == "emulation":
        if setting == "on":
            raise InputError(
                "`model.fused: on`: emulated products are computed one by one; set `model.fused: auto`"
            )
        return "nothing: emulated products are computed one by one"
    if setting == "on" or active.backend == "transformer_engine" or _gains(device_type, dtype):
        return None
    return "nothing, as only a GPU gains by it, in BF16 and below; model.fused=on fuses anyway"


def _gains(device_type: str, dtype: torch.dtype) -> bool:
    """Whether fused layers are faster where nothing is quantized: on a CPU, the demo's model was 5 to 6 % slower
    (benchmarks/results/cpu/cpu_fused.json)."""
    return device_type == "cuda" and dtype == torch.bfloat16


def fuse(
    layers: Mapping[str, nn.Module],
    decisions: Mapping[Backend | None, Mapping[str, Decision]],
    arithmetic: Arithmetic,
) -> FusedLayers:
    """Give each of `layers` that can be fused its fused forward, in place. `decisions`: of each backend, what each linear is to
    compute in; empty where nothing is quantized. Reasons are those of `assess_layer`."""
    fused, left_out = {}, {}
    for name, layer in layers.items():
        assessed = {
            backend: assess_layer(name, layer, each)
            for backend, each in (decisions or {None: {}}).items()
        }
        if reason := next((reason for reason, _ in assessed.values() if reason), None):
            left_out[name] = reason
        else:
            low_precision = {backend: low for backend, (_, low) in assessed.items()}
            layer.forward = fused[name] = FusedLayer(
                layer, name, arithmetic, low_precision=low_precision
            )
    return FusedLayers(fused, left_out, arithmetic)


def convert(
    hf: PreTrainedModel,
    decisions: Mapping[str, Decision],
    context: PrecisionContext,
    fused: FusedLayers | None = None,
) -> None:
    """Let every module that `decisions` names multiply in low precision where the context's present backend computes, and all
    stacked experts by grouped products; in place, on the same Parameters. Modules inside of `fused` layers stay: the layers
    multiply by themselves. Called for each backend."""
    backend = context.backend
    if is_mixture(hf):
        group_experts(hf, context)
    inside = tuple(f"{name}." for name in fused.layers) if fused else ()
    for name, module in list(hf.named_modules()):
        for key, stack in module.stacks.items() if isinstance(module, GroupedExperts) else ():
            if stack.name in decisions and decisions[stack.name].reason is None:
                _, *sizes = module.get_parameter(key).shape
                stack.products[backend] = backend.product(
                    stack.name, *reversed(sizes), bias=False, grouped=True
                )
        if name not in decisions or decisions[name].reason is not None or name.startswith(inside):
            continue
        if isinstance(module, (*LINEARS, LowPrecisionLinear)):
            product = backend.product(name, *features_of(module), bias=module.bias is not None)
            # which another backend may compute too, in its turn
            if isinstance(module, LossHead | LowPrecisionLinear):
                module.products[backend] = product
            else:
                hf.set_submodule(name, LowPrecisionLinear(module, name, product, context))


# ── Working copies, compilation, recomputation ──────────────────────────────────────────────────────────────────────────────────
#
# All parameters of a layer are cast as the layer begins, as FSDP2's `param_dtype=bfloat16` does, so one device and many compute
# the same thing; torch.autocast would leave norms, residual stream and rotary tables in FP32.


def wrap_layers(
    packed: PackedLanguageModel,
    settings: ModelSettings,
    *,
    cast_to: torch.dtype | None,
    compile_layers: bool,
) -> None:
    """Put working copies, compilation and gradient checkpointing around the forward of the model's units, innermost first: so a
    recomputed layer sees the working copies that its forward saw, whatever transformers' own checkpointing does.

    `cast_to`: the dtype of the working copies, None where the parameters are in the compute dtype already. A unit is an
    embedding, a decoder layer, or a module of its own such as the final norm; the LM head casts for itself.
    """
    for unit in _units(packed.hf.base_model):
        if isinstance(unit, nn.Embedding):
            if cast_to is not None:
                unit.forward = casting_output(unit.forward, cast_to)
            continue
        # it casts for itself, and what it calls is not for the compiler
        if isinstance(unit.forward, FusedLayer):
            if cast_to is not None:
                unit.forward.unfused = casting_parameters(unit, unit.forward.unfused, cast_to)
            continue
        # A graph ends at each low-precision product and another begins after it. The casts stay outside of these pieces, as a
        # graph cannot end inside of the context that swaps the parameters; and outside of a lone norm's graph, which would leave
        # out the rounding of its weight. A norm's graph serves any number of tokens, but cuts its sums by the number that it saw
        # first, which in a resumed run is another: where bits are to repeat, each number has a graph of its own.
        in_pieces = any(
            isinstance(module, LowPrecisionLinear | GroupedExperts) for module in unit.modules()
        )
        alone = not isinstance(unit, GradientCheckpointingLayer)
        casts_outside = in_pieces or alone
        if compile_layers and casts_outside:
            any_number = alone and not torch.are_deterministic_algorithms_enabled()
            unit.forward = torch.compile(unit.forward, dynamic=any_number, fullgraph=not in_pieces)
        if cast_to is not None:
            unit.forward = casting_parameters(unit, unit.forward, cast_to)
        if compile_layers and not casts_outside:
            # Static shapes but for the number of documents, which the batch marks as dynamic: one graph for all steps and layers.
            unit.forward = torch.compile(unit.forward, fullgraph=True, dynamic=False)
    for index, layer in enumerate(decoder_layers(packed.hf).values()):
        if settings.recomputes(index):
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
        times = itertools.count()

        def compute(*args: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            finally:
                if next(times):  # in backward, where the model's forward has ended
                    forget_logits(layer)

        return context.checkpoint(compute, *args)

    return forward_recomputed_in_backward


def casting_parameters(module: nn.Module, forward: Forward, dtype: torch.dtype) -> Forward:
    """`forward` of `module`, run with every parameter of `module` cast to `dtype`; the casts are differentiated through.

    The weight of a low-precision linear keeps its `main_grad`: its product adds to that from FP32, and none goes through a cast.
    So do the stacks of experts.
    """
    parts = dict(module.named_modules())
    low = {
        f"{name}.weight".removeprefix(".")
        for name, part in parts.items()
        if isinstance(part, LowPrecisionLinear)
    }
    low |= {
        f"{name}.{key}"
        for name, part in parts.items()
        if isinstance(part, GroupedExperts)
        for key in part.stacks
    }

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
