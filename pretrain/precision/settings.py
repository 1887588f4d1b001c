"""Settings of a recipe's precision: precisions by name, schedules, and `fp8_config`.

`fp8_config` configures a quantized precision. Some keys apply to every quantized precision. The
others are options, and each precision accepts some of them (`Precision.options`). `resolved` fills
in the defaults of a precision.

`precision` may be a schedule: `[{until: 0.8, use: nvfp4}, {use: bf16}]` trains in one precision
after the other. A phase with `forward: bf16` has its own precision name, "nvfp4_bf16_forward". The
step of a switch follows from the settings and the horizon, so checkpoints do not store it.

This file does not import torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from foundation.errors import InputError
from foundation.settings import Count, PositiveCount, Settings
from pretrain.precision.formats import block, current, delayed, mxfp4, mxfp8, nvfp4
from pretrain.precision.formats.definition import PLAIN_FORWARD, Precision, QuantizedPrecision
from pretrain.precision.formats.unquantized import BF16, FP32

# ── Precisions ────────────────────────────────────────────────────────────────────────────────────

# Values of `weights` in a recipe.
Weights = Literal["fp32", "bf16", "bf16_exact"]
# Torch dtype of the parameters by `weights`.
WEIGHT_DTYPES: dict[Weights, str] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "bf16_exact": "bfloat16",
}

_QUANTIZED = (
    delayed.PRECISION,
    current.PRECISION,
    block.PRECISION,
    mxfp8.PRECISION,
    nvfp4.PRECISION,
    mxfp4.PRECISION,
)
# All precisions by name, in the order of tables and messages.
PRECISIONS: dict[str, Precision] = {
    precision.name: precision for precision in (FP32, BF16, *_QUANTIZED)
}
# Precision of a linear that is not quantized, by the dtype of its activations.
UNQUANTIZED = {precision.compute_dtype: precision for precision in (FP32, BF16)}
# Precisions by accelerate's `mixed_precision`.
BY_ACCELERATE: dict[str, Precision] = {"no": FP32, "bf16": BF16, "fp8": delayed.PRECISION}
# The precision that a key of accelerate's `fp8_config` switches on.
ACCELERATE_SWITCHES = {"use_mxfp8_block_scaling": mxfp8.PRECISION.name}

# mypy cannot read the names.
PrecisionName: TypeAlias = Literal[tuple(PRECISIONS)]  # type: ignore[valid-type]


@functools.cache
def precision_called(name: str) -> Precision:
    """Return the precision called `name`, which may have the suffix of `forward: bf16`."""
    precision = PRECISIONS[name.removesuffix(PLAIN_FORWARD)]
    if not name.endswith(PLAIN_FORWARD):
        return precision
    return replace(
        precision,
        name=name,
        plain_forward=True,
        description=f"{precision.description}; forward products in BF16",
    )


# ── `precision`: a name or a schedule ─────────────────────────────────────────────────────────────


def _share_or_step(number: float) -> float | int:
    """Validate the end of a phase: a share of all steps as float, or a step as int."""
    if 0 < number < 1:
        return number
    if number < 2 or number != number // 1:
        raise ValueError(
            f"{number:g} is neither a share of the steps, above 0 and below 1, nor a step number, "
            "2 or more"
        )
    return int(number)


class PrecisionPhase(Settings):
    """One phase of a precision schedule."""

    # End of the phase: a share of all steps, or a step number. The last phase has no end.
    until: Annotated[float, AfterValidator(_share_or_step)] | None = None
    # Precision of the matrix products in this phase.
    use: PrecisionName
    # Compute the forward products of a quantized precision in BF16, and only the gradients'
    # products in that precision.
    forward: Literal["bf16"] | None = None

    @model_validator(mode="after")
    def _quantizes_gradients(self) -> Self:
        if self.forward and not PRECISIONS[self.use].quantized:
            raise ValueError(
                f"`forward: bf16` needs a precision that quantizes gradients, and {self.use} does "
                "not; remove it"
            )
        return self


def _check_schedule(phases: tuple[PrecisionPhase, ...]) -> tuple[PrecisionPhase, ...]:
    """Return `phases`. Raises ValueError if they cannot follow each other in one run."""
    if len(phases) < 2 and not any(phase.forward for phase in phases):
        raise ValueError("a schedule has two phases or more; for one precision write its name")
    *earlier, last = phases
    if last.until is not None or any(phase.until is None for phase in earlier):
        raise ValueError("every phase but the last needs an `until`; the last one must have none")
    if len({PRECISIONS[phase.use].compute_dtype for phase in phases}) > 1:
        names = " and ".join(phase.use for phase in phases)
        raise ValueError(
            f"{names} cannot be phases of one run, because the dtype of activations and working "
            "copies cannot change; train a second run from the first one's `final/`"
        )
    return phases


PhaseList = Annotated[tuple[PrecisionPhase, ...], AfterValidator(_check_schedule)]
# The name of a precision, or a schedule. The discriminator chooses by the type of the value, so
# that a mistake in a schedule is not reported as a wrong name.
PrecisionSetting = Annotated[
    Annotated[PrecisionName, Tag("Name")] | Annotated[PhaseList, Tag("Schedule")],
    Discriminator(lambda value: "Schedule" if isinstance(value, list | tuple) else "Name"),
]


def phases_of(setting: Any) -> list[tuple[Any, str]]:
    """Return (`until`, precision name) for each phase of a `precision` setting.

    `until` is a share of the steps as float, a step as int, or None for the last phase.

    `setting` comes from a recipe or from a run's config.yaml. A name is one phase. None, and a
    value that is not a schedule, have no phases.
    """
    if isinstance(setting, str):
        return [(None, setting)]
    if not isinstance(setting, list | tuple):
        return []
    phases = [item.model_dump() if isinstance(item, PrecisionPhase) else item for item in setting]
    return [
        (phase.get("until"), f"{phase['use']}{PLAIN_FORWARD if phase.get('forward') else ''}")
        for phase in phases
        if isinstance(phase, Mapping) and "use" in phase
    ]


def label(setting: Any, *, in_a_path: bool = False) -> str | None:
    """Return a short text for a `precision` setting: "nvfp4" or "nvfp4 to 80 %, then bf16".

    With `in_a_path` the text suits a folder name: "nvfp4-to-0.8-then-bf16". Return None if the
    setting names no precision.
    """
    phases = phases_of(setting)
    if not phases:
        return None
    *earlier, (_, last_name) = phases
    if in_a_path:
        return "-then-".join([*(f"{name}-to-{until}" for until, name in earlier), last_name])
    # config.yaml holds a step number as a float, for example 3.0.
    parts = [
        f"{name} to " + (f"{100 * until:g} %" if until < 1 else f"step {int(until)}")
        for until, name in earlier
    ]
    return ", then ".join([*parts, last_name])


def is_quantized(setting: Any) -> bool:
    """Return True if any phase computes in a quantized precision."""
    return any(precision_called(name).quantized for _, name in phases_of(setting))


def last_steps(untils: Sequence[float | int | None], steps: int) -> list[int]:
    """Return the last step of each phase in a run of `steps`.

    Shares are rounded to whole steps, like the decay of the learning rate. Raises InputError if a
    phase would have no step.
    """
    phases = [1.0 if until is None else until for until in untils]
    ends = [round(end * steps) if isinstance(end, float) else end for end in phases]
    for number, (previous_end, end) in enumerate(pairwise([0, *ends]), 1):
        if end <= previous_end or (end >= steps and number < len(ends)):
            raise InputError(
                f"`precision`: of {steps:,} steps, phase {number} of {len(ends)} would end with "
                f"step {end:,} and the phase before it with step {previous_end:,}; every phase "
                "needs a step: change `until`, or train longer (`train`)"
            )
    return ends


# ── `fp8_config` ──────────────────────────────────────────────────────────────────────────────────


class KeepBf16Layers(Settings):
    """Decoder layers that are not quantized."""

    # Number of decoder layers at the start of the model that stay in BF16.
    first: Count = 0
    # Number of decoder layers at the end of the model that stay in BF16. null: 15 % of the layers,
    # rounded up, with nvfp4, and none with other precisions.
    last: Count | None = None


class LowPrecisionSettings(Settings):
    """The `fp8_config` of a recipe or of an accelerate configuration."""

    # Engine of the quantized products. TE: Transformer Engine. emulation: in software, also on
    # hardware that supports the precision.
    backend: Literal["TE", "emulation"] = "TE"
    # Linears to quantize. linear: all except the LM head. linear+head: the LM head too.
    scope: Literal["linear", "linear+head"] = "linear"
    # Reaction if the hardware lacks the precision. error: stop. emulate: compute it in software.
    # fallback: train in delayed if the hardware has it, else in bf16.
    on_unsupported: Literal["error", "emulate", "fallback"] = "error"
    keep_bf16_layers: KeepBf16Layers = KeepBf16Layers()
    # Linears that stay in BF16, as patterns of names: ["layers.0.*", "down_proj"].
    keep_bf16: tuple[str, ...] = ()
    # Evaluate in the low precision instead of BF16. The name is accelerate's.
    use_autocast_during_eval: bool = False

    # Options. Only those that the precision accepts may be set:
    # Number format. HYBRID: gradients in E5M2, inputs and weights in E4M3.
    fp8_format: Literal["HYBRID", "E4M3"] | None = None
    # Number of times that the scale is halved, to leave room above the largest value seen. At most
    # 18, because E4M3 has a range of 2**17.8 and 19 would turn the largest value into zero.
    margin: Annotated[Count, Field(le=18)] | None = None
    # Number of microbatches whose amax is kept in the history.
    amax_history_len: Annotated[PositiveCount, Field(le=2**20)] | None = None
    # Amax that determines the scale: the largest or the most recent one of the history.
    amax_compute_algo: Literal["max", "most_recent"] | None = None
    # Skip the random Hadamard transform of the operands of the weight gradient.
    disable_rht: bool | None = None
    # Round gradients to nearest.
    disable_stochastic_rounding: bool | None = None

    @property
    def options_set(self) -> dict[str, Any]:
        """Return the options that are set, by key."""
        return {key: getattr(self, key) for key in OPTIONS if getattr(self, key) is not None}

    def contradictions(self, precision: Precision) -> dict[str, Any]:
        """Return the options that are set but not accepted by `precision`, by key."""
        return {
            key: value for key, value in self.options_set.items() if key not in precision.options
        }

    def resolved(self, precision_name: str) -> Self:
        """Return the settings with the precision's defaults for options that are not set.

        Options that the precision does not accept become None.
        """
        defaults = precision_called(precision_name).options
        accepted = {key: value for key, value in self.options_set.items() if key in defaults}
        options = {**dict.fromkeys(OPTIONS), **defaults, **accepted}
        return type(self).model_validate(self.model_dump() | options)

    def without_options(self) -> Self:
        """Return the settings with only the keys that apply to every quantized precision."""
        return type(self).model_validate(self.model_dump(exclude_unset=True, exclude=set(OPTIONS)))


# Keys that only some precisions accept.
OPTIONS = tuple(
    key
    for key in LowPrecisionSettings.model_fields
    if any(key in precision.options for precision in PRECISIONS.values())
)

# ── The resolved precision ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ActivePrecision:
    """The precision of a run or phase, with its settings and the engine that computes it."""

    requested: str
    # Differs from `requested` only with `on_unsupported: fallback`.
    precision: Precision
    # "torch" if nothing is quantized.
    backend: Literal["torch", "transformer_engine", "emulation"]
    # Resolved for `precision`.
    settings: LowPrecisionSettings
    # Why the device cannot compute the requested precision. None if it can.
    reason: str | None = None

    @property
    def quantized_precision(self) -> QuantizedPrecision:
        """Return `precision`, which the caller knows to be quantized."""
        return cast(QuantizedPrecision, self.precision)

    def kept_layers(self, layers: int) -> tuple[int, int]:
        """Return how many decoder layers stay unquantized, at the start and at the end.

        `layers` is the number of decoder layers of the model. The precision's default share at
        the end leaves at least one layer quantized.
        """
        keep = self.settings.keep_bf16_layers
        if keep.last is not None or not self.precision.quantized:
            return keep.first, keep.last or 0
        last = math.ceil(self.quantized_precision.keeps_last * layers)
        return keep.first, min(last, max(0, layers - keep.first - 1))

    @property
    def notice(self) -> str | None:
        """Return a message if the device cannot compute the requested precision, else None.

        The message gives the reason and the replacement.
        """
        if self.reason is None:
            return None
        if self.precision.name == self.requested:
            return f"{self.reason}: it is emulated"
        return f"{self.reason}: training in {self.precision.name} instead"
