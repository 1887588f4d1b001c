"""Which modules of a model compute in low precision: the scope, the layers kept out, the shapes a precision cannot take.

Every linear is decided on by itself: a rule for a whole container would leave out the siblings of one odd shape.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foundation.errors import InputError
from pretrain.precision.settings import UNQUANTIZED, ActivePrecision

LINEARS = (nn.Linear, Conv1D)


@dataclass(frozen=True)
class Decision:
    """What one module is to compute in: `requested`, a precision's name; `reason`, why that is not the low precision."""

    name: str
    requested: str
    reason: str | None = None


def check_shapes(hf: PreTrainedModel, active: ActivePrecision) -> None:
    """InputError where `active` could take no linear of `hf`, which would train in BF16 under another name. Shapes are enough:
    `hf` may be on the meta device."""
    outside = hf.get_output_embeddings() if active.settings.scope == "linear" else None
    linears = [module for module in hf.modules() if isinstance(module, LINEARS) and module is not outside]
    if active.precision.quantized and all(_misfit(module, active) for module in linears):
        name, multiple = active.precision.name, active.precision.multiple_of
        raise InputError(
            f"`precision: {name}` takes linears whose features are multiples of {multiple}, and {type(hf).__name__} has none; "
            "change its sizes in `model.config`, or set `precision: bf16`"
        )


def check_kept(hf: PreTrainedModel, layers: Sequence[nn.Module], active: ActivePrecision) -> None:
    """InputError for a pattern of `fp8_config.keep_bf16` that no linear of `hf` is called by, and where the patterns leave no
    linear to low precision. Shapes are enough, as for `check_shapes`."""
    if not active.precision.quantized:
        return
    names = [name for name, module in hf.named_modules() if isinstance(module, LINEARS)]
    patterns = active.settings.keep_bf16
    for pattern in patterns:
        if not any(is_called(name, pattern) for name in names):
            ends = dict.fromkeys(end for name in names for end in ends_of(name))
            near = difflib.get_close_matches(pattern, ends, n=3, cutoff=0.4) or names[:3]
            raise InputError(
                f"`fp8_config.keep_bf16`: {pattern!r} matches no linear of {type(hf).__name__}; near it are {', '.join(near)}. A "
                "pattern is held against a linear's whole name, and against each end of it that begins after a dot"
            )
    if patterns and not low_precision_linears(hf, layers, active):
        raise InputError(
            f"`fp8_config.keep_bf16: {list(patterns)}` leaves no linear of {type(hf).__name__} to "
            f"`precision: {active.precision.name}`; keep fewer, or set `precision: bf16`"
        )


def low_precision_linears(hf: PreTrainedModel, layers: Sequence[nn.Module], active: ActivePrecision) -> list[str]:
    """Names of the linears that compute in `active`, which is quantized. Shapes are enough."""
    return [name for name, decision in decide(hf, layers, active).items() if decision.reason is None]


def is_called(name: str, pattern: str) -> bool:
    """Whether the linear `name` is one that `pattern` means: `model.layers.0.mlp.down_proj` is, by `down_proj`, `mlp.*`,
    `layers.0.*` and `*.down_proj`."""
    return any(fnmatchcase(end, pattern) for end in ends_of(name))


def ends_of(name: str) -> Iterator[str]:
    """A dotted name, and what is left of it after each of its dots."""
    while name:
        yield name
        name = name.partition(".")[2]


def decide(hf: PreTrainedModel, layers: Sequence[nn.Module], active: ActivePrecision) -> dict[str, Decision]:
    """A decision for each linear of `hf`, by name. `layers`: in order."""
    settings, head = active.settings, hf.get_output_embeddings()
    scope, keep = settings.scope, settings.keep_bf16_layers
    outer_layers = [layer for index, layer in enumerate(layers) if index < keep.first or index >= len(layers) - keep.last]
    inside = {id(module) for layer in outer_layers for module in layer.modules()}
    decisions, left_out = {}, UNQUANTIZED[active.precision.compute_dtype].name
    for name, module in hf.named_modules():
        if module is head and scope == "linear":
            reason = "scope linear leaves the LM head out"
        elif isinstance(module, LINEARS):
            by_name = next((f"keep_bf16: {pattern}" for pattern in settings.keep_bf16 if is_called(name, pattern)), None)
            reason = "keep_bf16_layers" if id(module) in inside else by_name or _misfit(module, active)
        else:
            continue
        decisions[name] = Decision(name, active.precision.name if reason is None else left_out, reason)
    return decisions


def features_of(linear: nn.Module) -> tuple[int, int]:
    """(in_features, out_features)."""
    transposed = isinstance(linear, Conv1D) or getattr(linear, "transposed", False)  # as Conv1D's stand-in says
    return tuple(linear.weight.shape if transposed else reversed(linear.weight.shape))


def _misfit(linear: nn.Module, active: ActivePrecision) -> str | None:
    """Why the precision cannot take a linear of this shape; in emulation too, which is to show what the hardware does."""
    multiple = active.precision.multiple_of
    odd = [size for size in features_of(linear) if size % multiple]
    return f"{odd[0]} is not a multiple of {multiple}" if odd else None
