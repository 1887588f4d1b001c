"""Settings of a recipe's precision: precisions by name, schedules, and `fp8_config`.

`fp8_config` configures a quantized precision. Some of its keys apply to every quantized precision.
The remaining keys are called options. `Precision.options` lists the options that a precision
accepts, with their defaults. `LowPrecisionSettings.resolved` fills in these defaults.

`precision` may be a schedule: `[{until: 0.8, use: nvfp4}, {use: bf16}]` computes the first 80 % of
the steps in NVFP4 and the remaining steps in BF16. The last step of each phase is computed from the
settings and the number of steps, so checkpoints do not store it.

This file does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, cast

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from foundation.settings import Count, PhaseEnd, PositiveCount, Settings
from pretrain.precision.formats import block, current, delayed, mxfp4, mxfp8, nvfp4
from pretrain.precision.formats.definition import Precision, QuantizedPrecision
from pretrain.precision.formats.unquantized import BF16, FP32

# ── Precisions ────────────────────────────────────────────────────────────────────────────────────

# The values of the recipe's key `weights`. `with_weights` replaces auto before a model is built.
Weights = Literal["auto", "fp32", "bf16", "bf16_exact"]
# Map each value of `weights` except auto to the torch dtype of the parameters.
WEIGHT_DTYPES: dict[Weights, str] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "bf16_exact": "bfloat16",
}

# Map each quantized precision's name to the precision.
QUANTIZED: dict[str, QuantizedPrecision] = {
    module.PRECISION.name: module.PRECISION
    for module in (delayed, current, block, mxfp8, nvfp4, mxfp4)
}
# Map each precision's name to the precision. Tables and messages list precisions in this order.
PRECISIONS: dict[str, Precision] = {FP32.name: FP32, BF16.name: BF16, **QUANTIZED}
# Map the dtype of activations to the precision of a linear layer that is not quantized.
UNQUANTIZED = {precision.compute_dtype: precision for precision in (FP32, BF16)}
# Map each value of Accelerate's `mixed_precision` to a precision.
BY_ACCELERATE: dict[str, Precision] = {"no": FP32, "bf16": BF16, "fp8": delayed.PRECISION}
# Map a switch in Accelerate's `fp8_config` to the name of the precision that the switch selects.
ACCELERATE_SWITCHES = {"use_mxfp8_block_scaling": mxfp8.PRECISION.name}


# Message about the name fp8, which could mean any of three precisions.
AMBIGUOUS_FP8 = "fp8 is delayed, current or block; set one of these precisions"


def _refuse_fp8(name: Any) -> Any:
    """Return `name`. Raise ValueError if it is fp8, which could mean any of three precisions."""
    if name == "fp8":
        raise ValueError(AMBIGUOUS_FP8)
    return name


# mypy cannot evaluate a Literal whose values are computed.
PrecisionName: TypeAlias = Annotated[Literal[tuple(PRECISIONS)], BeforeValidator(_refuse_fp8)]  # type: ignore[valid-type]


# ── `precision`: a name or a schedule ─────────────────────────────────────────────────────────────


class PrecisionPhase(Settings):
    """One phase of a precision schedule."""

    until: PhaseEnd | None = None
    """End of the phase: a share of all steps, or the number of the phase's last step.

    The last phase of a schedule has no `until`.
    """

    use: PrecisionName
    """Precision of the matrix products in this phase."""


def _check_schedule(phases: tuple[PrecisionPhase, ...]) -> tuple[PrecisionPhase, ...]:
    """Return `phases`. Raise ValueError if they are not a valid schedule of one run."""
    if len(phases) < 2:
        raise ValueError(
            "a schedule needs two phases or more; to train in one precision, set `precision` to "
            "its name"
        )
    ends = [phase.until for phase in phases]
    if ends[-1] is not None or None in ends[:-1]:
        raise ValueError(
            "every phase except the last needs `until`, and the last phase must not have it; add "
            "the missing `until`, or remove it from the last phase"
        )
    if len({PRECISIONS[phase.use].compute_dtype for phase in phases}) > 1:
        names = " and ".join(phase.use for phase in phases)
        raise ValueError(
            f"{names} cannot be phases of one run, because a run cannot change the dtype of its "
            "activations and weight copies; either train two runs, and set `model.source` of the "
            "second run to the `final` folder of the first run, or, in `evaluate --precisions`, "
            "name one of them in each command"
        )
    return phases


PhaseList = Annotated[tuple[PrecisionPhase, ...], AfterValidator(_check_schedule)]
# The value of `precision`: the name of a precision, or a schedule. A list is validated as a
# schedule, any other value as a name, so a mistake in a schedule is not reported as a wrong name.
_Name = Annotated[PrecisionName, Tag("Name")]
_Schedule = Annotated[PhaseList, Tag("Schedule")]
PrecisionSetting = Annotated[
    _Name | _Schedule,
    Discriminator(lambda value: "Schedule" if isinstance(value, list | tuple) else "Name"),
]


def phases_of(setting: Any) -> list[tuple[Any, str]]:
    """Return (`until`, precision name) for each phase of a `precision` setting.

    `until` is a share of the steps as float, a step as int, or None for the last phase. `setting`
    is the value in a recipe or in the config.yaml of a run. If it is the name of a precision,
    return a single phase. If it is neither a name nor a schedule, return an empty list.
    """
    if isinstance(setting, str):
        return [(None, setting)]
    if not isinstance(setting, list | tuple):
        return []
    phases = [item.model_dump() if isinstance(item, PrecisionPhase) else item for item in setting]
    return [
        (phase.get("until"), phase["use"])
        for phase in phases
        if isinstance(phase, Mapping) and "use" in phase
    ]


def shortest_phases(names: Sequence[str]) -> Any:
    """Return a `precision` setting with one phase for each of the precisions `names`.

    Use it for an evaluation or a short trial, which needs all precisions in a few steps. The first
    phase has two steps, the last phase has the rest of the steps, and all others have one step.
    """
    *earlier, last = names
    phases = [{"use": name, "until": step} for step, name in enumerate(earlier, start=2)]
    return [*phases, {"use": last}] if phases else last


def label(setting: Any, *, in_a_path: bool = False) -> str | None:
    """Return a short text for a `precision` setting: "nvfp4" or "nvfp4 to 80 %, then bf16".

    With `in_a_path`, return a text that can be part of a folder name: "nvfp4-to-0.8-then-bf16".
    Return None if the setting contains no precision.
    """
    phases = phases_of(setting)
    if not phases:
        return None
    *earlier, (_, last_name) = phases
    if in_a_path:
        return "-then-".join([*(f"{name}-to-{until}" for until, name in earlier), last_name])
    parts = []
    for until, name in earlier:
        # config.yaml stores a step number as a float, for example 3.0.
        end = f"{100 * until:g} %" if until < 1 else f"step {int(until)}"
        parts.append(f"{name} to {end}")
    return ", then ".join([*parts, last_name])


def is_quantized(setting: Any) -> bool:
    """Return True if any phase of a `precision` setting computes in a quantized precision."""
    return any(PRECISIONS[name].quantized for _, name in phases_of(setting))


# ── `fp8_config` ──────────────────────────────────────────────────────────────────────────────────


class KeepBf16Layers(Settings):
    """Decoder layers that are not quantized."""

    first: Count = 0
    """Number of decoder layers at the start of the model that stay in BF16."""

    last: Count | None = None
    """Number of decoder layers at the end of the model that stay in BF16.

    null: with nvfp4, 15 % of the layers, rounded up; with any other precision, 0.
    """


class LowPrecisionSettings(Settings):
    """The `fp8_config` of a recipe or of an Accelerate configuration."""

    REMOVED: ClassVar[Mapping[str, Any]] = {"use_f32_scales": None}

    backend: Literal["TE", "emulation"] = "TE"
    """Engine that computes the quantized products.

    TE: Transformer Engine, on hardware that supports the precision.
    emulation: software, even if the hardware supports the precision.
    """

    scope: Literal["linear", "linear+head"] = "linear"
    """Linear layers to quantize.

    linear: all except the LM head.
    linear+head: all, including the LM head.
    """

    on_unsupported: Literal["error", "emulate", "fallback"] = "error"
    """Reaction if the hardware does not support the precision.

    error: stop with an error.
    emulate: emulate the precision in software.
    fallback: train in delayed if the hardware supports delayed, else in bf16.
    """

    keep_bf16_layers: KeepBf16Layers = KeepBf16Layers()

    keep_bf16: tuple[str, ...] = ()
    """Linear layers that stay in BF16, as patterns of their names: ["layers.0.*", "down_proj"]."""

    use_autocast_during_eval: bool = False
    """Evaluate in the low precision instead of BF16. Accelerate has a key with the same name."""

    # Options. An option may be set only if the precision accepts it.

    fp8_format: Literal["HYBRID", "E4M3"] | None = None
    """Number format of FP8 values.

    HYBRID: E5M2 for gradients, E4M3 for inputs and weights. MXFP8 diverged with it in reports.
    E4M3: E4M3 for gradients too.
    """

    margin: Annotated[Count, Field(le=18)] | None = None
    """Number of times that the scale is halved.

    Then values above the recorded maximum do not saturate. At most 18: 448 / 2**19 is zero in E4M3.
    """

    amax_history_len: Annotated[PositiveCount, Field(le=2**20)] | None = None
    """Number of microbatches whose amax (largest absolute value of a tensor) the history stores."""

    amax_compute_algo: Literal["max", "most_recent"] | None = None
    """Amax that determines the scale.

    max: the largest amax of the history.
    most_recent: the amax of the latest microbatch.
    """

    disable_rht: bool | None = None
    """Do not apply the random Hadamard transform.

    By default, it is applied to the operands of the weight gradient's product.
    """

    disable_stochastic_rounding: bool | None = None
    """Round gradients to the nearest value instead of stochastically."""

    @property
    def options_set(self) -> dict[str, Any]:
        """Return the options that are set, as a dict of keys and values."""
        return self.model_dump(include=set(OPTIONS), exclude_none=True)

    def resolved(self, precision_name: str) -> Self:
        """Return a copy of the settings with the used value of each option.

        An option that is not set gets the default of the precision. An option that the precision
        does not accept becomes None.
        """
        defaults = PRECISIONS[precision_name].options
        accepted = self.model_dump(include=set(defaults), exclude_none=True)
        options = {**dict.fromkeys(OPTIONS), **defaults, **accepted}
        return type(self).model_validate(self.model_dump() | options)

    def without_options(self) -> Self:
        """Return a copy of the settings without the options, which depend on the precision."""
        return type(self).model_validate(self.model_dump(exclude_unset=True, exclude=set(OPTIONS)))


# The keys of `fp8_config` that only some precisions accept.
OPTIONS = tuple(
    key
    for key in LowPrecisionSettings.model_fields
    if any(key in precision.options for precision in PRECISIONS.values())
)


def configured(name: str, fp8_config: LowPrecisionSettings) -> Precision:
    """Return the precision called `name` with the options that `fp8_config` sets."""
    return PRECISIONS[name].with_options(fp8_config.resolved(name))


# ── The resolved precision ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ActivePrecision:
    """The precision of a run or phase, with its settings and the engine that runs its GEMMs."""

    # The name of the precision in the recipe.
    requested: str
    # The precision that is used, as `configured` returns it. Its name differs from `requested` only
    # with `on_unsupported: fallback`.
    precision: Precision
    # The engine. It is "torch" if `precision` is not quantized.
    engine: Literal["torch", "transformer_engine", "emulation"]
    # The reason why the device cannot compute the requested precision. None if the device can.
    reason: str | None = None

    @property
    def name(self) -> str:
        """Return the name of the used precision."""
        return self.precision.name

    @property
    def settings(self) -> LowPrecisionSettings:
        """Return `fp8_config` as `LowPrecisionSettings.resolved` returns it for `precision`."""
        return self.precision.settings

    @property
    def quantized_precision(self) -> QuantizedPrecision:
        """Return `precision`. The caller must have checked that it is quantized."""
        return cast(QuantizedPrecision, self.precision)

    def kept_layers(self, layers: int) -> tuple[int, int]:
        """Return the numbers of decoder layers at the start and at the end that stay unquantized.

        `layers` is the number of decoder layers of the model. If the number at the end is not set,
        the precision's default is used. The default leaves at least one layer quantized.
        """
        keep = self.settings.keep_bf16_layers
        if keep.last is not None or not self.precision.quantized:
            return keep.first, keep.last or 0
        last = math.ceil(self.quantized_precision.keeps_last * layers)
        return keep.first, min(last, max(0, layers - keep.first - 1))

    @property
    def notice(self) -> str | None:
        """Return a message if the device cannot compute the requested precision, else None.

        The message contains the reason, and says whether the precision is emulated or which other
        precision is used.
        """
        if self.reason is None:
            return None
        if self.precision.name == self.requested:
            return f"{self.reason}, so the precision is emulated"
        return f"{self.reason}, so the run trains in {self.precision.name} instead"
