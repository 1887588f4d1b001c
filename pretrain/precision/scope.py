"""Decide which linear layers of a model are quantized.

A layer stays unquantized if `fp8_config.scope` excludes it, if a setting keeps it in BF16, or if
its shape does not suit the precision. The decision is made for each linear layer separately. If all
linear layers of a decoder layer were decided together, a single linear layer with an unsuitable
shape would keep all of them unquantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foundation.errors import InputError
from pretrain.precision.grouped import STACKS, stacked_experts
from pretrain.precision.settings import UNQUANTIZED, ActivePrecision, LowPrecisionSettings

LINEARS = (nn.Linear, Conv1D)
# Under FSDP2, a shard group keeps codes instead of weights if at least this share of its values is
# quantized (pretrain.model.sharding). Its other values, such as those of norms, stay gathered until
# the end of a step.
QUANTIZED_SHARE = 0.9
# Patterns of the names that transformers gives the routers of a mixture of experts.
ROUTERS = ("gate", "gate.*", "router*")


@dataclass(frozen=True)
class Decision:
    """The precision of a linear layer."""

    # The name of the layer's precision: bf16 or fp32 if the layer stays unquantized.
    requested: str
    # The reason why the layer stays unquantized. None if the layer is quantized.
    reason: str | None = None


def decide(
    hf: PreTrainedModel,
    layers: Sequence[nn.Module],
    active: ActivePrecision,
    capability: tuple[int, int] | None = None,
) -> dict[str, Decision]:
    """Map the name of each linear layer and expert stack in `hf` to its decision.

    The name of a stack is the name of its parameter: `model.layers.0.mlp.experts.down_proj`. `hf`
    may be on the meta device, because only shapes are read. `layers` are the decoder layers of
    `hf`, in order. `capability` is the CUDA compute capability of the device that computes. The
    default is the capability of this machine's GPU, or Hopper's if the machine has no GPU. The
    result is empty if the precision does not quantize.
    """
    precision = active.precision
    settings = active.settings
    if not precision.quantized:
        return {}
    excluded = hf.get_output_embeddings() if settings.scope == "linear" else None
    first, last = active.kept_layers(len(layers))
    kept_layers = [*layers[:first], *layers[max(0, len(layers) - last) :]]
    modules_in_kept_layers = {module for layer in kept_layers for module in layer.modules()}
    features_by_name: dict[str, tuple[nn.Module, Sequence[int]]] = {
        name: (module, features_of(module))
        for name, module in hf.named_modules()
        if isinstance(module, LINEARS)
    }
    stacks = {f"{name}.{key}": module for name, module in stacked_experts(hf) for key in STACKS}
    for name, module in stacks.items():
        features_by_name[name] = (module, hf.get_parameter(name).shape[1:])
    no_groups = None
    if stacks and active.engine == "transformer_engine":
        if capability is None and torch.cuda.is_available():
            capability = torch.cuda.get_device_capability()
        no_groups = active.quantized_precision.no_groups_on(capability)
    unquantized = UNQUANTIZED[precision.compute_dtype].name
    decisions = {}
    for name, (module, features) in features_by_name.items():
        # If there are several reasons, the first one is reported.
        reason: str | None
        if module is excluded:
            reason = "scope linear excludes the LM head"
        elif by_name := _reason_by_name(name, settings):
            reason = by_name
        elif module in modules_in_kept_layers:
            reason = "keep_bf16_layers"
        elif unfit := _unfit(features, precision.multiple_of):
            reason = unfit
        else:
            reason = no_groups if name in stacks else None
        decisions[name] = Decision(unquantized if reason else precision.name, reason)
    return decisions


def is_router(name: str) -> bool:
    """Return True if the layer `name` is a router of a mixture of experts."""
    return any(is_called(name, pattern) for pattern in ROUTERS)


def _reason_by_name(name: str, settings: LowPrecisionSettings) -> str | None:
    """Return the reason why the layer `name` stays unquantized, whatever its position and shape."""
    if is_router(name):
        return "routers are not quantized"
    for pattern in settings.keep_bf16:
        if is_called(name, pattern):
            return f"keep_bf16: {pattern}"
    return None


def _unfit(features: Sequence[int], multiple: int) -> str | None:
    """Return the reason why a layer with these numbers of features cannot be quantized, or None.

    Emulation has the same limits as the hardware, because it must compute the same numbers.
    """
    for size in features:
        if size % multiple:
            return f"{size} is not a multiple of {multiple}"
    return None


def check_scope(hf: PreTrainedModel, layers: Sequence[nn.Module], active: ActivePrecision) -> None:
    """Raise InputError if the settings of `active` do not suit the linear layers of `hf`.

    Three kinds of settings are refused. The first is a pattern of `fp8_config.keep_bf16` that
    matches no linear layer. The second is any combination of settings that leaves no linear layer
    to quantize, because the model would train in BF16, although the recipe sets another precision.
    The third is the scope `linear+head`, if the LM head would stay unquantized. The arguments are
    as in `decide`.
    """
    decisions = decide(hf, layers, active)
    model_class = type(hf).__name__
    for pattern in active.settings.keep_bf16:
        if not any(is_called(name, pattern) for name in decisions):
            raise InputError(
                f"`fp8_config.keep_bf16`: {pattern!r} matches no linear layer of {model_class}; "
                f"one of its layers is {next(iter(decisions))}. A pattern must match the whole "
                "name of a layer, or the part of the name after any of its dots"
            )
    if not quantized_names(decisions):
        reasons = dict.fromkeys(str(decision.reason) for decision in decisions.values())
        raise InputError(
            f"`precision: {active.precision.name}`: no linear layer of {model_class} can compute "
            f"in this precision ({'; '.join(reasons)}). Either keep fewer layers in "
            "BF16 (`fp8_config`), or change sizes in `model.config`, or set `precision: bf16`"
        )
    names = {module: name for name, module in hf.named_modules()}
    head = decisions.get(names.get(hf.get_output_embeddings(), ""))
    if active.settings.scope == "linear+head" and head and head.reason:
        raise InputError(
            f"`fp8_config.scope: linear+head`: the LM head of {model_class} would stay in BF16 in "
            f"{active.precision.name} ({head.reason}); either set `fp8_config.scope: linear`, or "
            "remove the reason. For a model from scratch, `model.config.vocab_size: null` takes "
            "the size of the tokenizer's vocabulary, rounded up to a multiple of 128"
        )


def quantized_names(decisions: Mapping[str, Decision]) -> set[str]:
    """Return the names of the quantized layers in the result of `decide`."""
    return {name for name, decision in decisions.items() if decision.reason is None}


def is_called(name: str, pattern: str) -> bool:
    """Return True if `pattern` matches a layer's name, or the part after any dot of the name.

    `down_proj`, `mlp.*`, `layers.0.*` and `*.down_proj` match `model.layers.0.mlp.down_proj`.
    """
    return fnmatchcase(f".{name}", f"*.{pattern}")


def features_of(linear: Any) -> tuple[int, ...]:
    """Return (in_features, out_features) of an nn.Linear, a Conv1D or a LowPrecisionLinear."""
    return tuple(linear.weight.shape if is_transposed(linear) else reversed(linear.weight.shape))


def is_transposed(linear: Any) -> bool:
    """Return True if the weight is [in, out], as in a Conv1D."""
    # A LowPrecisionLinear that replaces a Conv1D has `transposed` set.
    return isinstance(linear, Conv1D) or getattr(linear, "transposed", False)
