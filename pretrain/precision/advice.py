"""What users are told about their precision: when its operands lose too much, and what to change. docs/precision.md ("Statistics
and health") has the measurements behind the limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pretrain.precision.formats.definition import Role
from pretrain.precision.settings import ActivePrecision

# Where small values become zero.
AGAINST_UNDERFLOW = (
    "`precision=mxfp8`, and in one scale a tensor `precision=block` too, loses fewer small values; `fp8_config.keep_bf16_layers` "
    "takes the first or last layers out of low precision"
)
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
    precision, forward, backward = active.precision, ("input", "weight"), ("grad_output",)
    narrow = active.settings.fp8_format == "E4M3" and precision.takes("fp8_format", "HYBRID")
    lost = precision.underflow_limit, f"becomes zero in {precision.format_name}"
    result = [
        Condition("underflow", forward, *lost, AGAINST_UNDERFLOW),
        Condition("underflow", backward, *lost, WIDER_GRADIENTS if narrow else AGAINST_UNDERFLOW),
    ]
    if precision.keeps_history:
        result.append(Condition("saturation", forward + backward, 1e-3, "is cut to the format's maximum", AGAINST_LATE_SCALES))
    return result


def against_overflow(active: ActivePrecision) -> str | None:
    """What to change in the precision where the loss or a gradient is not a number, or jumps; None where nothing is quantized."""
    if not active.precision.quantized:
        return None
    compared = "`precision=bf16` from the same checkpoint, with --accept-changes, tells whether the precision is the cause"
    return f"{AGAINST_LATE_SCALES}; {compared}" if active.precision.keeps_history else compared
