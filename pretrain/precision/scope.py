"""Decide which linear layers of a model compute in low precision.

A layer stays unquantized by the scope, by a setting that keeps it in BF16, or by its shape. Each
linear layer is decided by itself: a rule for a container of layers would exclude the siblings of
one odd shape.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foundation.errors import InputError
from pretrain.precision.grouped import STACKS, stacked_experts
from pretrain.precision.settings import UNQUANTIZED, ActivePrecision

LINEARS = (nn.Linear, Conv1D)
# Names of the routers of a mixture of experts in transformers, and of their parts.
_ROUTERS = ("gate", "gate.*", "router*")


@dataclass(frozen=True)
class Decision:
    """The name of a linear layer's precision, and the reason if it is not the low precision."""

    requested: str
    reason: str | None = None


def decide(
    hf: PreTrainedModel,
    layers: Sequence[nn.Module],
    active: ActivePrecision,
    capability: tuple[int, int] | None = None,
) -> dict[str, Decision]:
    """Return a decision for each linear layer of `hf` and each stack of experts, by name.

    A stack's name is like `model.layers.0.mlp.experts.down_proj`. Shapes are enough: `hf` may be on
    the meta device. `layers`: the decoder layers of `hf`, in order. `capability`: CUDA's, of the
    device that computes. By default that of this machine, or Hopper's if it has no GPU.
    """
    precision = active.precision
    settings = active.settings
    head = hf.get_output_embeddings()
    first, last = active.kept_layers(len(layers))
    is_default = settings.keep_bf16_layers.last is None and last > 0
    default = f", by default the last {last} of {len(layers)}" if is_default else ""
    kept_layers = [*layers[:first], *layers[max(0, len(layers) - last) :]]
    kept = {module for layer in kept_layers for module in layer.modules()}
    linears = {
        name: (module, features_of(module))
        for name, module in hf.named_modules()
        if isinstance(module, LINEARS)
    }
    stacks = {
        f"{name}.{key}": (module, tuple(module.get_parameter(key).shape[1:]))
        for name, module in stacked_experts(hf)
        for key in STACKS
    }
    no_groups = None
    if stacks and active.backend == "transformer_engine":
        if capability is None and torch.cuda.is_available():
            capability = torch.cuda.get_device_capability()
        no_groups = active.quantized_precision.no_groups_on(capability, settings)
    # Emulation has the same limits, because it shows what the hardware would do.
    multiple = precision.multiple_of
    unquantized = UNQUANTIZED[precision.compute_dtype].name
    decisions = {}
    for name, (module, features) in (linears | stacks).items():
        reasons: dict[str | None, Any] = {  # and whether they apply
            "scope linear excludes the LM head": module is head and settings.scope == "linear",
            "routers are not quantized": any(is_called(name, pattern) for pattern in _ROUTERS),
            f"keep_bf16_layers{default}": module in kept,
            **{f"keep_bf16: {pattern}": is_called(name, pattern) for pattern in settings.keep_bf16},
            **{f"{size} is not a multiple of {multiple}": size % multiple for size in features},
            no_groups: name in stacks,
        }
        reason = next((reason for reason, applies in reasons.items() if applies), None)
        decisions[name] = Decision(unquantized if reason else precision.name, reason)
    return decisions


def check_scope(hf: PreTrainedModel, layers: Sequence[nn.Module], active: ActivePrecision) -> None:
    """Raise InputError if a pattern of `fp8_config.keep_bf16` matches no linear layer of `hf`.

    Also raise it if no linear layer is left for low precision: the model would train in BF16 under
    another name. See `decide`.
    """
    decisions = decide(hf, layers, active)
    model_class = type(hf).__name__
    for pattern in active.settings.keep_bf16:
        if not any(is_called(name, pattern) for name in decisions):
            ends = dict.fromkeys(
                name.split(".", dots)[-1]
                for name in decisions
                for dots in range(name.count(".") + 1)
            )
            (nearest,) = difflib.get_close_matches(pattern, [*ends], n=1, cutoff=0)
            raise InputError(
                f"`fp8_config.keep_bf16`: {pattern!r} matches no linear of {model_class}; the "
                f"nearest is {nearest}. A pattern is compared with a linear's whole name, and with "
                "every part of it from a dot to the end"
            )
    reasons = [decision.reason for decision in decisions.values() if decision.reason]
    if len(reasons) == len(decisions):
        raise InputError(
            f"`precision: {active.precision.name}`: no linear of {model_class} can compute in it "
            f"({'; '.join(dict.fromkeys(reasons))}). Keep fewer in BF16 (`fp8_config`), change "
            "sizes in `model.config`, or set `precision: bf16`"
        )


def is_called(name: str, pattern: str) -> bool:
    """Return whether `pattern` matches the linear layer `name`.

    `down_proj`, `mlp.*`, `layers.0.*` and `*.down_proj` match `model.layers.0.mlp.down_proj`.
    """
    return fnmatchcase(f".{name}", f"*.{pattern}")


def features_of(linear: Any) -> tuple[int, ...]:
    """Return (in_features, out_features)."""
    # LowPrecisionLinear has `transposed` if it replaces a Conv1D.
    transposed = isinstance(linear, Conv1D) or getattr(linear, "transposed", False)
    return tuple(linear.weight.shape if transposed else reversed(linear.weight.shape))
