"""Which modules of a model compute in low precision: the scope, the layers kept out, the shapes a recipe cannot take.

Every linear is decided on by itself, and the decision has a reason, which the audit shows. A rule for a whole container would
leave out the siblings of one odd shape, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foundation.errors import InputError
from pretrain.model.loss.head import LossHead
from pretrain.model.loss.low_precision import LowPrecisionHeadProduct
from pretrain.precision.context import PrecisionContext
from pretrain.precision.linear import LowPrecisionLinear, LowPrecisionNorm, norm_kind, plain_norm
from pretrain.precision.registry import UNQUANTIZED
from pretrain.precision.selection import ActivePrecision

LINEARS = (nn.Linear, Conv1D)
# How far a norm may be from the formula it is replaced by, in units of its largest output: BF16 weights and inputs, rounded
# twice.
_SAME_NORM = 0.02


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


@dataclass(frozen=True)
class Decision:
    """What one module is to compute in: `requested`, a recipe's name; `reason`, why that is not the low-precision recipe."""

    name: str
    requested: str
    reason: str | None = None


def decide(hf: PreTrainedModel, layers: Sequence[nn.Module], active: ActivePrecision) -> dict[str, Decision]:
    """A decision for each linear of `hf`, and for each norm if the scope has norms; by Hugging Face name.

    `layers`: the decoder layers in order, for `keep_bf16_layers`.
    """
    scope, keep, head = active.settings.scope, active.settings.keep_bf16_layers, hf.get_output_embeddings()
    kept = [layer for index, layer in enumerate(layers) if index < keep.first or index >= len(layers) - keep.last]
    inside = {id(module) for layer in kept for module in layer.modules()}
    decisions, left_out = {}, UNQUANTIZED[active.precision.compute_dtype].name
    for name, module in hf.named_modules():
        if module is head:
            reason = "scope linear leaves the LM head out" if scope == "linear" else _misfit(module, active)
        elif isinstance(module, LINEARS):
            reason = "keep_bf16_layers" if id(module) in inside else _misfit(module, active)
        elif scope == "linear+head+norm" and norm_kind(module):
            reason = "keep_bf16_layers" if id(module) in inside else _other_norm(module)
        else:
            continue
        decisions[name] = Decision(name, active.precision.name if reason is None else left_out, reason)
    return decisions


def convert(hf: PreTrainedModel, decisions: Mapping[str, Decision], context: PrecisionContext) -> None:
    """Let every module that was decided for multiply in low precision; in place, and on the same Parameters."""
    for name, module in list(hf.named_modules()):
        if name not in decisions or decisions[name].reason is not None:
            continue
        if isinstance(module, LINEARS):
            product = context.backend.product(name, *_shape(module), bias=module.bias is not None)
            if isinstance(module, LossHead):
                module.low_precision = LowPrecisionHeadProduct(name, product, context)
            else:
                hf.set_submodule(name, LowPrecisionLinear(module, name, product, context))
        else:
            function = context.backend.norm(norm_kind(module), module.weight.shape[0], _eps(module))
            hf.set_submodule(name, LowPrecisionNorm(module, _eps(module), function, context))


def low_precision_weights(hf: nn.Module) -> int:
    """Weights that are multiplied in low precision, each with 6 FLOPs a token in forward and backward."""
    linears = [m for m in hf.modules() if isinstance(m, LowPrecisionLinear)]
    heads = [m for m in hf.modules() if isinstance(m, LossHead) and m.low_precision is not None]
    return sum(module.weight.numel() for module in [*linears, *heads])


def _shape(linear: nn.Module) -> tuple[int, int]:
    """(in_features, out_features)."""
    return tuple(linear.weight.shape if isinstance(linear, Conv1D) else reversed(linear.weight.shape))


def _misfit(linear: nn.Module, active: ActivePrecision) -> str | None:
    """Why the recipe cannot take a linear of this shape. The emulation refuses what the hardware would, so as to show what it
    does.
    """
    multiple = active.precision.multiple_of
    odd = [size for size in _shape(linear) if size % multiple]
    return f"{odd[0]} is not a multiple of {multiple}" if odd else None


def _eps(norm: nn.Module) -> float | None:
    return next((getattr(norm, key) for key in ("variance_epsilon", "eps", "epsilon") if hasattr(norm, key)), None)


@torch.no_grad()
def _other_norm(norm: nn.Module) -> str | None:
    """Why `norm` is not what its class name says: tried, as some RMSNorms add one to their weight, or cast in another order."""
    weight, bias, eps = norm.weight, getattr(norm, "bias", None), _eps(norm)
    if eps is None or weight.dim() != 1:
        return f"{type(norm).__name__} is not a plain norm"
    probe: Tensor = torch.linspace(-2, 3, 4 * weight.shape[0], device=weight.device, dtype=weight.dtype).view(4, -1)
    expected = plain_norm(norm_kind(norm), probe, weight, bias, eps).float()
    if (norm(probe).float() - expected).abs().max() > _SAME_NORM * expected.abs().max().clamp(min=1e-3):
        return f"{type(norm).__name__} computes something else"
    return None
