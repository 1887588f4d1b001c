"""What users are told about their precision: when its operands lose too much, and what to change. docs/precision.md ("Statistics
and health") has the measurements behind the limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pretrain.precision.formats.definition import Role
from pretrain.precision.settings import ActivePrecision

KEEP_LAYERS = "`fp8_config.keep_bf16_layers` takes the first or last layers out of low precision"

# Where small values become zero. A precision that is not named here gets the last remedy alone.
AGAINST_UNDERFLOW = {
    "delayed": "a smaller `fp8_config.margin` or a shorter `fp8_config.amax_history_len` loses fewer small values; "
    "`precision=block` and `precision=mxfp8`, with a scale for each block, lose fewest",
    "current": "`precision=block` or `precision=mxfp8`, with a scale for each block, keeps small values apart from large ones",
    "block": f"`precision=mxfp8` has a scale for every 32 values; {KEEP_LAYERS}",
    "mxfp4": f"`precision=nvfp4` or `precision=mxfp8` holds more; {KEEP_LAYERS}",
    "nvfp4": f"`precision=mxfp8` holds a wider range; {KEEP_LAYERS}",
}
# Where values are cut to the format's maximum, because scales from earlier steps lag behind values that grow.
AGAINST_LATE_SCALES = (
    "`fp8_config.amax_compute_algo: max` or a larger `fp8_config.margin` leaves more room above the largest value seen; "
    "`precision=current` scales by the values themselves"
)
WIDER_GRADIENTS = "`fp8_config.fp8_format: HYBRID` keeps gradients in E5M2, whose range is 2**13 times as wide"


@dataclass(frozen=True)
class Condition:
    """Something that may be wrong with some operands: it begins where their records' `share` is above `limit`."""

    share: Literal["underflow", "saturation"]
    roles: tuple[Role, ...]
    limit: float
    what: str  # happens to the values
    remedy: str


def conditions(active: ActivePrecision) -> list[Condition]:
    """What can go wrong with the operands of a quantized precision, each with its remedy.

    Only scales from earlier steps can cut a tensor's values, and one value in a thousand says that it has outgrown them.
    """
    precision, settings = active.precision, active.settings
    forward, backward, zero = ("input", "weight"), ("grad_output",), f"becomes zero in {precision.format_name}"
    finer = wider = AGAINST_UNDERFLOW.get(precision.name, KEEP_LAYERS)
    if settings.fp8_format == "E4M3" and precision.takes("fp8_format", "HYBRID"):
        wider = WIDER_GRADIENTS
    result = [
        Condition("underflow", forward, precision.underflow_limit, zero, finer),
        Condition("underflow", backward, precision.underflow_limit, zero, wider),
    ]
    if precision.keeps_history:
        cut = "is cut to the format's maximum"
        result.append(Condition("saturation", forward + backward, 1e-3, cut, AGAINST_LATE_SCALES))
    return result


def against_overflow(active: ActivePrecision) -> str | None:
    """What to change in the precision where the loss or a gradient is not a number, or jumps; None where nothing is quantized."""
    if not active.precision.quantized:
        return None
    late = [AGAINST_LATE_SCALES] if active.precision.keeps_history else []
    compared = "`precision=bf16` from the same checkpoint, with --accept-changes, tells whether it is the cause"
    return "; ".join([*late, KEEP_LAYERS, compared])


def cautions(active: ActivePrecision) -> list[str]:
    """What is known to go wrong with these settings, and what to set instead."""
    if active.precision.quantized and active.precision.block_scaled and active.settings.fp8_format == "HYBRID":
        seen = "with gradients in E5M2, training in MXFP8 was seen to diverge (Megatron-Bridge#638); E4M3 is the default"
        return [f"`fp8_config.fp8_format: HYBRID`: {seen}"]
    return []
