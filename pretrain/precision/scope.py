"""Decide which linear layers of a model compute in low precision.

The scope, the layers that stay in BF16 and the shapes that a precision cannot take decide. Each
linear layer is decided on by itself: a rule for a container of layers would exclude the siblings of
one odd shape.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foundation.errors import InputError
from pretrain.precision.grouped import STACKS, stacked_experts
from pretrain.precision.settings import UNQUANTIZED, ActivePrecision

LINEARS = (nn.Linear, Conv1D)
# Transformers' names of a mixture's routers, and of their parts.
_ROUTERS = ("gate", "gate.*", "router*")


@dataclass(frozen=True)
class Decision:
    """The precision of one linear layer, by name, and the reason if it is not the low precision."""

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
    settings = active.settings
    head = hf.get_output_embeddings()
    first, last = active.kept_layers(len(layers))
    unquantized = UNQUANTIZED[active.precision.compute_dtype].name
    outer_layers = [
        layer for index, layer in enumerate(layers) if index < first or index >= len(layers) - last
    ]
    by_default = settings.keep_bf16_layers.last is None and last
    why_kept = (
        f"keep_bf16_layers{f', by default the last {last} of {len(layers)}' if by_default else ''}"
    )
    inside = {module for layer in outer_layers for module in layer.modules()}
    decisions, groups, no_groups = {}, {}, None
    for name, module in stacked_experts(hf):
        groups |= {f"{name}.{key}": (module, module.get_parameter(key).shape[1:]) for key in STACKS}
    if groups and active.backend == "transformer_engine":
        here = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        no_groups = active.precision.no_groups_on(capability or here, settings)
    linears = {
        name: (module, features_of(module))
        for name, module in hf.named_modules()
        if isinstance(module, LINEARS)
    }
    for name, (module, features) in (linears | groups).items():
        if module is head and settings.scope == "linear":
            reason = "scope linear leaves the LM head out"
        elif any(is_called(name, pattern) for pattern in _ROUTERS):
            reason = "routers stay out"
        elif module in inside:
            reason = why_kept
        else:
            by_name = (
                f"keep_bf16: {pattern}"
                for pattern in settings.keep_bf16
                if is_called(name, pattern)
            )
            # Emulation has the same limits, because it shows what the hardware would do.
            multiple = active.precision.multiple_of
            misfits = (
                f"{size} is not a multiple of {multiple}" for size in features if size % multiple
            )
            reason = next(chain(by_name, misfits, [no_groups] if name in groups else []), None)
        decisions[name] = Decision(active.precision.name if reason is None else unquantized, reason)
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
    if all(decision.reason for decision in decisions.values()):
        reasons = "; ".join(dict.fromkeys(decision.reason for decision in decisions.values()))
        raise InputError(
            f"`precision: {active.precision.name}`: no linear of {model_class} can compute in it "
            f"({reasons}). Keep fewer in BF16 (`fp8_config`), change sizes in `model.config`, or "
            "set `precision: bf16`"
        )


def is_called(name: str, pattern: str) -> bool:
    """Return whether `pattern` means the linear layer `name`.

    `down_proj`, `mlp.*`, `layers.0.*` and `*.down_proj` all mean `model.layers.0.mlp.down_proj`.
    """
    return fnmatchcase(f".{name}", f"*.{pattern}")


def features_of(linear: nn.Module) -> tuple[int, int]:
    """Return (in_features, out_features)."""
    # LowPrecisionLinear has `transposed` if it replaces a Conv1D.
    transposed = isinstance(linear, Conv1D) or getattr(linear, "transposed", False)
    return tuple(linear.weight.shape if transposed else reversed(linear.weight.shape))
