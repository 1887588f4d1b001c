"""Functions that replace or wrap the forward of modules in a transformers model.

The model keeps its class and the names of its parameters. `pretrain.run.assembly` calls
`choose_arithmetic`, `fuse`, `convert` and `wrap_layers` in this order, and
docs/developers/architecture.md explains the order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from foundation.errors import InputError
from pretrain.model.experts import GroupedExperts, group_experts
from pretrain.model.fused.arithmetic import (
    Arithmetic,
    KernelArithmetic,
    TransformerEngineArithmetic,
)
from pretrain.model.fused.half_layers import HalfFusedLayer, can_fuse_mlp
from pretrain.model.fused.layers import (
    NO_FUSED_LAYERS,
    FusedLayer,
    FusedLayers,
    assess_layer,
)
from pretrain.model.huggingface import decoder_layers
from pretrain.model.loss.head import LossHead
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.routing import forget_logits
from pretrain.precision.product import LowPrecisionLinear, PrecisionContext, with_main_grad_of
from pretrain.precision.scope import Decision, features_of, quantized_names
from pretrain.precision.settings import ActivePrecision
from pretrain.settings.recipe import ModelSettings, Switch

Forward = Callable[..., Any]
# Maps a module and its forward to the forward that replaces it.
Wrapper = Callable[[nn.Module, Forward], Forward]


def choose_arithmetic(
    active: ActivePrecision,
    device_type: str,
    context: PrecisionContext,
    *,
    keeps_rotated: bool,
) -> Arithmetic:
    """Return the arithmetic of the model's fused layers, if `not_fused_because` returns None.

    Without quantization, Triton kernels compute in BF16 on a GPU, and torch computes elsewhere.
    `Arithmetic` describes `keeps_rotated`.
    """
    arithmetic_class = Arithmetic
    if active.engine != "torch":
        arithmetic_class = TransformerEngineArithmetic
    elif _is_faster(device_type, context.compute_dtype):
        arithmetic_class = KernelArithmetic
    return arithmetic_class(context, keeps_rotated=keeps_rotated)


def not_fused_because(
    setting: Switch, active: ActivePrecision, device_type: str, dtype: torch.dtype
) -> str | None:
    """Return the reason why no layer is fused, as a text for the audit.

    Example: "none, because model.fused is off". Return None if the arguments allow fused layers.
    `assess_layer` later checks the architecture of each layer. Raise InputError if
    `model.fused: on` is impossible.
    """
    if setting == "off":
        reason = "because model.fused is off"
    elif active.engine == "emulation":
        reason = "because the emulation computes each linear layer separately"
    elif setting == "auto" and active.engine == "torch" and not _is_faster(device_type, dtype):
        reason = "because they are faster only on a GPU in BF16 or below (model.fused=on uses them)"
    else:
        return None
    if setting == "on":
        raise InputError(
            f"`model.fused: on` is impossible in this run, {reason}; set `model.fused: auto`"
        )
    return f"none, {reason}"


def _is_faster(device_type: str, dtype: torch.dtype) -> bool:
    """Return True if fused layers are faster than unfused layers when nothing is quantized.

    On a CPU, fused layers made the demo's model 5 to 6 % slower
    (benchmarks/results/cpu/cpu_fused.json).
    """
    return device_type == "cuda" and dtype == torch.bfloat16


def fuse(
    layers: Mapping[str, nn.Module],
    decisions: Mapping[str, Mapping[str, Decision]],
    arithmetic: Arithmetic,
) -> FusedLayers:
    """Replace the forward of each layer that can be fused, in place, and return the fused layers.

    Args:
        layers: Map the name of each decoder layer in the model to the layer.
        decisions: Map the name of each precision of the run to a dict from the name of each linear
            layer to its decision. Empty if nothing is quantized.
        arithmetic: Arithmetic that the fused layers use.
    """
    quantized = [quantized_names(by_name) for by_name in decisions.values()]
    # Map the name of each fused layer to its new forward.
    fused = {}
    # Map the name of each layer that is not fused completely to the reason.
    reasons = {}
    for name, layer in layers.items():
        reason = assess_layer(name, layer, quantized)
        if reason is None:
            fused[name] = FusedLayer(layer, name, arithmetic)
        elif can_fuse_mlp(name, layer, quantized):
            fused[name] = HalfFusedLayer(layer, name, arithmetic)
            reasons[name] = f"only the MLP of {type(layer).__name__} has a fused implementation"
        else:
            reasons[name] = reason
    for name, forward in fused.items():
        layers[name].forward = forward
    return FusedLayers(fused, reasons)


def convert(
    hf: PreTrainedModel,
    decisions: Mapping[str, Decision],
    context: PrecisionContext,
    fused: FusedLayers = NO_FUSED_LAYERS,
) -> None:
    """Prepare the model for the context's current precision, in place. Call it for each precision.

    Each linear layer that `decisions` quantizes gets a Gemm of the current engine. Before that, a
    linear layer of transformers is replaced by a `LowPrecisionLinear` with the same Parameters. The
    LM head is not replaced, because `LossHead` can have Gemms itself. The experts of a layer are
    replaced by `GroupedExperts`. Linear layers in products of `fused` layers are not changed. Each
    product of a fused layer gets a Gemm for all its linear layers.
    """
    group_experts(hf, context)
    quantized = quantized_names(decisions)
    members = fused.members
    for product in fused.products:
        # `fuse` stacks only linear layers that are all quantized, or all unquantized.
        if product.members[0] in quantized:
            sizes = [features_of(linear) for linear in product.linears]
            # Stacked linear layers have the same input.
            in_features, _ = sizes[0]
            product.create_gemm(in_features, sum(out_features for _, out_features in sizes))
    for name, module in list(hf.named_modules()):
        if isinstance(module, GroupedExperts):
            for key, stack in module.stacks.items():
                if stack.name in quantized:
                    _, out_features, in_features = module.get_parameter(key).shape
                    stack.create_gemm(in_features, out_features)
        if name in quantized and name not in members:
            if not isinstance(module, LossHead | LowPrecisionLinear):
                module = LowPrecisionLinear(module, name, context)
                hf.set_submodule(name, module)
            module.state.create_gemm(*features_of(module), bias=module.bias is not None)


# ── Working copies, compilation, recomputation ──────────────────────────────────────────────────
#
# A working copy is a parameter that has been cast to the compute dtype. All parameters of a layer
# are cast at the start of the layer's forward. FSDP2 with `param_dtype=bfloat16` casts them before
# the layer's forward too, so runs on one device and on several devices compute the same values.
# torch.autocast is not used, because it would leave norms, the residual stream and rotary tables in
# FP32.


def wrap_layers(
    packed: PackedLanguageModel,
    settings: ModelSettings,
    *,
    cast_to: torch.dtype | None,
    compile_layers: bool,
) -> None:
    """Wrap the forwards of a model's modules in place. See `wrappers_of` for the arguments."""
    wrappers = wrappers_of(packed, settings, cast_to=cast_to, compile_layers=compile_layers)
    for module, module_wrappers in wrappers.items():
        for wrapper in module_wrappers:
            module.forward = wrapper(module, module.forward)


def wrappers_of(
    packed: PackedLanguageModel,
    settings: ModelSettings,
    *,
    cast_to: torch.dtype | None,
    compile_layers: bool,
) -> dict[nn.Module, list[Wrapper]]:
    """Map modules to the wrappers of their forward, from the innermost to the outermost.

    A unit is an embedding, a decoder layer, or another module with parameters, such as the final
    norm. Wrappers of a unit cast its parameters, compile it, and recompute it in backward. The LM
    head is not wrapped, because it casts its own parameters. The model is not changed.

    Gradient checkpointing is the outermost wrapper. A layer that is recomputed in backward
    therefore uses working copies as in forward. The gradient checkpointing of transformers is not
    used.

    Args:
        packed: The model.
        settings: Settings that determine which layers are recomputed in backward.
        cast_to: Dtype of the working copies. None if the parameters have the compute dtype already.
        compile_layers: True if torch.compile compiles the forwards that are not fused.
    """
    wrappers: dict[nn.Module, list[Wrapper]] = defaultdict(list)
    for module in packed.hf.modules():
        if isinstance(module, nn.LayerNorm):
            wrappers[module].append(partial(replaced, function=_layer_norm))
    # If all layers are fused, only the final norm could be compiled. torch has a fused kernel for
    # this norm, so nothing is compiled, and torch's compiler is not imported.
    replaces_norms = compile_layers and packed.fused.are_complete
    compiles = compile_layers and not replaces_norms
    for unit in _units(packed.hf.base_model):
        # Models whose layers are all fused have embeddings, layers, and a final norm.
        not_rms_norms = nn.Embedding | nn.LayerNorm | GradientCheckpointingLayer
        if replaces_norms and not isinstance(unit, not_rms_norms):
            wrappers[unit].append(partial(replaced, function=_rms_norm))
        wrappers[unit] += _wrappers_of_unit(unit, cast_to, compiles=compiles)
        if isinstance(unit.forward, HalfFusedLayer):
            # The fused forward calls the first half, which is cast and compiled as a layer is.
            first_half = unit.forward.first_half
            wrappers[first_half] += _wrappers_of_unit(first_half, cast_to, compiles=compiles)
    for index, layer in enumerate(decoder_layers(packed.hf).values()):
        if settings.recomputes(index):
            wrappers[layer].append(partial(recomputed_in_backward, context=packed.context))
    return wrappers


def _wrappers_of_unit(
    unit: nn.Module, cast_to: torch.dtype | None, *, compiles: bool
) -> list[Wrapper]:
    """Return the wrappers that cast the parameters of a unit, and that compile the unit.

    If the casts come first in the list, they are compiled together with the unit.
    """
    casting: Callable[..., Forward] = casting_parameters
    if isinstance(unit, nn.Embedding):
        casting = casting_output
    elif isinstance(unit.forward, FusedLayer):
        casting = casting_unfused
    casts: list[Wrapper] = [] if cast_to is None else [partial(casting, dtype=cast_to)]
    # An embedding is not compiled. A fused forward is not compiled either, because it calls kernels
    # that torch.compile cannot compile.
    if not compiles or casting is not casting_parameters:
        return casts
    # The casts of a unit with graph breaks are not compiled, because a graph cannot end inside of
    # the context manager that replaces the parameters by working copies. The casts of a norm
    # outside of the decoder layers are not compiled either, because the compiled graph would skip
    # the rounding of the norm's weight.
    has_breaks = _has_graph_breaks(unit)
    outside_layers = not isinstance(unit, GradientCheckpointingLayer)
    if has_breaks or outside_layers:
        # A dynamic graph of a norm works for any number of tokens. But the number of tokens of the
        # first call determines the order of the graph's sums, and this number may differ in a
        # resumed run. If runs must be reproducible bit for bit, compile a graph for each number of
        # tokens.
        dynamic = outside_layers and not torch.are_deterministic_algorithms_enabled()
        return [partial(compiled, dynamic=dynamic, fullgraph=not has_breaks), *casts]
    # All shapes are static, except for the number of documents, which `inputs_of` marks as dynamic.
    # Therefore one graph is used for all steps and layers. On a CPU, the graph ends at attention,
    # which is not compiled.
    fullgraph = torch.accelerator.is_available()
    return [*casts, partial(compiled, dynamic=False, fullgraph=fullgraph)]


def _has_graph_breaks(unit: nn.Module) -> bool:
    """Return True if torch.compile cannot compile the forward of `unit` to a single graph.

    A graph ends before each low-precision product, before experts, and before the functions that
    mix tokens in a hybrid model. The next graph begins after them. A layer with such functions has
    a convolution, and experts have the attribute `choice_log`.
    """
    breaking = LowPrecisionLinear | nn.Conv1d
    return any(
        isinstance(module, breaking) or hasattr(module, "choice_log") for module in unit.modules()
    )


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the units of `module`. See `wrappers_of` for the definition of a unit."""
    has_parameters = any(True for _ in module.parameters(recurse=False))
    if has_parameters or isinstance(module, GradientCheckpointingLayer):
        yield module
    else:
        for child in module.children():
            yield from _units(child)


def replaced(module: nn.Module, forward: Forward, *, function: Forward) -> Forward:
    """Return `function` as a method of `module`, in place of `forward`.

    A method is the same function in all layers, so torch.compile compiles it only once.
    """
    return MethodType(function, module)


def compiled(module: nn.Module, forward: Forward, *, dynamic: bool, fullgraph: bool) -> Forward:
    """Return `forward`, compiled by torch.compile."""
    return torch.compile(forward, dynamic=dynamic, fullgraph=fullgraph)


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Return the result of `norm` for x. On a CPU it is computed in FP32 or a wider dtype.

    With a BF16 weight and bias, torch's CPU kernel would sum their gradients in BF16. After 2,048
    rows, the error of these sums is 5 %.
    """
    wide = torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else x.dtype
    weight, bias = (
        None if parameter is None else parameter.to(wide) for parameter in (norm.weight, norm.bias)
    )
    return F.layer_norm(x.to(wide), norm.normalized_shape, weight, bias, norm.eps).to(x.dtype)


def _rms_norm(norm: Any, x: Tensor) -> Tensor:
    """Return the result of an RMSNorm of transformers for x, computed by torch's fused kernel."""
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def recomputed_in_backward(
    layer: nn.Module, forward: Forward, *, context: PrecisionContext
) -> Forward:
    """Return a function that computes the layer's forward, and computes it again in backward."""

    def forward_recomputed_in_backward(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        is_recomputation = False

        def compute(*args: Any) -> Any:
            nonlocal is_recomputation
            try:
                return forward(*args, **kwargs)
            finally:
                # torch ends a recomputation by an exception as soon as it has all saved tensors.
                if is_recomputation:
                    forget_logits(layer)
                # Each later call recomputes the layer in backward.
                is_recomputation = True

        return context.checkpoint(compute, *args)

    return forward_recomputed_in_backward


def casting_parameters(module: nn.Module, forward: Forward, dtype: torch.dtype) -> Forward:
    """Return a function that calls `forward` with all parameters of `module` cast to `dtype`.

    Autograd differentiates the casts, so the gradient of a parameter is first rounded to `dtype`.
    The weights of low-precision linear layers and of experts are exceptions: the cast weight gets
    the `main_grad` of the weight, and the matrix products add FP32 gradients to it directly.
    """
    # Names of the weights whose cast copies get the `main_grad` of the weight.
    directly_summed = []
    for name, part in module.named_modules():
        if isinstance(part, LowPrecisionLinear):
            directly_summed.append(f"{name}.weight".removeprefix("."))
        elif isinstance(part, GroupedExperts):
            directly_summed += [f"{name}.{key}" for key in part.stacks]

    def forward_with_working_copies(*args: Any, **kwargs: Any) -> Any:
        copies = {name: parameter.to(dtype) for name, parameter in module.named_parameters()}
        for name in directly_summed:
            with_main_grad_of(module.get_parameter(name), copies[name])
        with _reparametrize_module(module, copies):
            return forward(*args, **kwargs)

    return forward_with_working_copies


def casting_unfused(module: nn.Module, forward: FusedLayer, dtype: torch.dtype) -> FusedLayer:
    """Return the fused forward, which casts its parameters itself and needs no working copies.

    Without packed documents it calls the layer's original forward, which gets working copies.
    """
    forward.unfused = casting_parameters(module, forward.unfused, dtype)
    return forward


def casting_output(module: nn.Module, forward: Forward, dtype: torch.dtype) -> Forward:
    """Return a function that calls `forward` and casts the output to `dtype`.

    It is used for embeddings. An embedding then needs no cast copy of its table, and the gradients
    of the table are summed in FP32.
    """
    return lambda *args, **kwargs: forward(*args, **kwargs).to(dtype)
