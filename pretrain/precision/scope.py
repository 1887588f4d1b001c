"""Which linears of a model compute in low precision: the scope, the layers kept out, the shapes a precision cannot take.

Every linear is decided on by itself: a rule for a whole container would leave out the siblings of one odd shape.
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
# as transformers calls a mixture's, and what they consist of
_ROUTERS = ("gate", "gate.*", "router*")


@dataclass(frozen=True)
class Decision:
    """What one linear is to compute in: `requested`, a precision's name; `reason`, why that is not the low precision."""

    requested: str
    reason: str | None = None


def decide(
    hf: PreTrainedModel,
    layers: Sequence[nn.Module],
    active: ActivePrecision,
    capability: tuple[int, int] | None = None,
) -> dict[str, Decision]:
    """A decision for each linear of `hf`, by name, and for each stack of a mixture's experts, such as
    `model.layers.0.mlp.experts.down_proj`. `layers`: its decoder layers in order. Shapes are enough: `hf` may be on the meta
    device. `capability`: CUDA's, of the device that computes; None: this machine's, without a GPU Hopper's."""
    settings, head = active.settings, hf.get_output_embeddings()
    (first, last), left_out = (
        active.kept_layers(len(layers)),
        UNQUANTIZED[active.precision.compute_dtype].name,
    )
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
            # in emulation too, which is to show what the hardware does
            multiple = active.precision.multiple_of
            misfits = (
                f"{size} is not a multiple of {multiple}" for size in features if size % multiple
            )
            reason = next(chain(by_name, misfits, [no_groups] if name in groups else []), None)
        decisions[name] = Decision(active.precision.name if reason is None else left_out, reason)
    return decisions


def check_scope(hf: PreTrainedModel, layers: Sequence[nn.Module], active: ActivePrecision) -> None:
    """InputError for a pattern of `fp8_config.keep_bf16` that no linear of `hf` is called by, and where no linear is left to low
    precision: the model would train in BF16 under another name. See `decide`."""
    decisions, kind = decide(hf, layers, active), type(hf).__name__
    for pattern in active.settings.keep_bf16:
        if not any(is_called(name, pattern) for name in decisions):
            ends = dict.fromkeys(
                name.split(".", dots)[-1]
                for name in decisions
                for dots in range(name.count(".") + 1)
            )
            (nearest,) = difflib.get_close_matches(pattern, [*ends], n=1, cutoff=0)
            raise InputError(
                f"`fp8_config.keep_bf16`: {pattern!r} matches no linear of {kind}; the nearest is {nearest}. A pattern is "
                "compared with a linear's whole name, and with every part of it from a dot to the end"
            )
    if all(decision.reason for decision in decisions.values()):
        reasons = "; ".join(dict.fromkeys(decision.reason for decision in decisions.values()))
        raise InputError(
            f"`precision: {active.precision.name}` is left no linear of {kind} ({reasons}); keep fewer by `fp8_config`, change "
            "sizes in `model.config`, or set `precision: bf16`"
        )


def is_called(name: str, pattern: str) -> bool:
    """Whether the linear `name` is one that `pattern` means: `model.layers.0.mlp.down_proj` is, by `down_proj`, `mlp.*`,
    `layers.0.*` and `*.down_proj`."""
    return fnmatchcase(f".{name}", f"*.{pattern}")


def features_of(linear: nn.Module) -> tuple[int, int]:
    """(in_features, out_features)."""
    # as Conv1D's stand-in says
    transposed = isinstance(linear, Conv1D) or getattr(linear, "transposed", False)
    return tuple(linear.weight.shape if transposed else reversed(linear.weight.shape))
