"""What a recipe may say of precision: the precisions by name, a schedule of them, and `fp8_config`. Nothing here imports torch.

`fp8_config` says how a quantized precision is to run. Some keys are for every quantized precision; the others are options, of
which each precision takes a few (`Precision.options`); `resolved` fills in its defaults.

`precision` may be a schedule: `[{until: 0.8, use: nvfp4}, {use: bf16}]`, one precision after the other in one run. A phase with
`forward: bf16` has a name of its own, "nvfp4_bf16_forward", by which it is told from one without. When a run switches follows
from the settings and the horizon alone, so a checkpoint holds nothing of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from foundation.errors import InputError
from foundation.settings import Count, PositiveCount, Settings
from pretrain.precision.formats import block, current, delayed, mxfp4, mxfp8, nvfp4
from pretrain.precision.formats.definition import PLAIN_FORWARD, Precision
from pretrain.precision.formats.unquantized import BF16, FP32

# ── The precisions ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

Weights = Literal["fp32", "bf16", "bf16_exact"]  # `weights:` of a recipe
# The torch dtype that parameters are kept in.
WEIGHT_DTYPES: dict[Weights, str] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "bf16_exact": "bfloat16",
}

# in the order of tables and messages
_LOW = (each.PRECISION for each in (delayed, current, block, mxfp8, nvfp4, mxfp4))
PRECISIONS: dict[str, Precision] = {precision.name: precision for precision in (FP32, BF16, *_LOW)}
# What computes a linear that low precision leaves out, by the dtype of its activations.
UNQUANTIZED = {precision.compute_dtype: precision for precision in (FP32, BF16)}
# by its `mixed_precision`
BY_ACCELERATE: dict[str, Precision] = {"no": FP32, "bf16": BF16, "fp8": delayed.PRECISION}
# The precision that a key of accelerate's `fp8_config` switches on.
ACCELERATE_SWITCHES = {"use_mxfp8_block_scaling": mxfp8.PRECISION.name}

PrecisionName = Literal[tuple(PRECISIONS)]


@functools.cache
def precision_called(name: str) -> Precision:
    """A precision by its name in a run, which is that of a phase with `forward: bf16` too."""
    precision = PRECISIONS[name.removesuffix(PLAIN_FORWARD)]
    if not name.endswith(PLAIN_FORWARD):
        return precision
    return replace(
        precision,
        name=name,
        plain_forward=True,
        description=f"{precision.description}; forward products in BF16",
    )


# ── `precision`: a name, or a schedule ──────────────────────────────────────────────────────────────────────────────────────────


def _share_or_step(number: float) -> float | int:
    if 0 < number < 1:
        return number
    if number < 2 or number != number // 1:
        raise ValueError(
            f"{number:g} is neither a share of the steps, above 0 and below 1, nor the number of a step, 2 or more"
        )
    return int(number)


class PrecisionPhase(Settings):
    """A part of a run in one precision."""

    # where the phase ends: a share of all steps, or a step's number; the last phase has none
    until: Annotated[float, AfterValidator(_share_or_step)] | None = None
    use: PrecisionName  # what its products compute in
    # of a quantized precision: forward products in BF16, gradients in that precision
    forward: Literal["bf16"] | None = None

    @model_validator(mode="after")
    def _quantizes_gradients(self) -> Self:
        if self.forward and not PRECISIONS[self.use].quantized:
            raise ValueError(
                f"`forward: bf16` is for what quantizes its gradients, and {self.use} does not; leave it out"
            )
        return self


def _in_order(phases: tuple[PrecisionPhase, ...]) -> tuple[PrecisionPhase, ...]:
    if len(phases) < 2 and not any(phase.forward for phase in phases):
        raise ValueError("a schedule has two phases or more; of one precision write the name")
    *before, last = phases
    if last.until is not None or any(phase.until is None for phase in before):
        raise ValueError("every phase but the last needs an `until`; leave the last one's out")
    if len({PRECISIONS[phase.use].compute_dtype for phase in phases}) > 1:
        raise ValueError(
            f"{' and '.join(phase.use for phase in phases)} cannot be phases of one run: activations and copies of weights keep "
            "one dtype, and theirs differ; train a second run from the first one's `final/`"
        )
    return phases


PhaseList = Annotated[tuple[PrecisionPhase, ...], AfterValidator(_in_order)]
# A precision's name, or a schedule. Told apart by their form, so that a mistake in one is not explained as if it were the other.
PrecisionSetting = Annotated[
    Annotated[PrecisionName, Tag("Name")] | Annotated[PhaseList, Tag("Schedule")],
    Discriminator(lambda value: "Schedule" if isinstance(value, list | tuple) else "Name"),
]


def phases_of(setting: Any) -> list[tuple[float | int | None, str]]:
    """(`until`, precision) of each phase of a `precision`, from a recipe or as a run's config.yaml has it: one phase for a name,
    none for None or what is no schedule."""
    if isinstance(setting, str):
        return [(None, setting)]
    listed = setting if isinstance(setting, list | tuple) else ()
    phases = [each.model_dump() if isinstance(each, PrecisionPhase) else each for each in listed]
    return [
        (each.get("until"), f"{each['use']}{PLAIN_FORWARD if each.get('forward') else ''}")
        for each in phases
        if isinstance(each, Mapping) and "use" in each
    ]


def label(setting: Any, *, in_a_path: bool = False) -> str | None:
    """What a `precision` is called: its name, or "nvfp4 to 80 %, then bf16", in a folder's name "nvfp4-to-0.8-then-bf16"; None
    where none is named."""
    phases = phases_of(setting)
    if not phases:
        return None
    *before, (_, last) = phases
    if in_a_path:
        return "-then-".join([*(f"{name}-to-{until}" for until, name in before), last])
    # a step is 3.0 in config.yaml
    ends = (f"{100 * until:g} %" if until < 1 else f"step {int(until)}" for until, _ in before)
    return ", then ".join(
        [*(f"{name} to {end}" for (_, name), end in zip(before, ends, strict=True)), last]
    )


def is_quantized(setting: Any) -> bool:
    """Whether any phase computes in low precision."""
    return any(precision_called(name).quantized for _, name in phases_of(setting))


def last_steps(untils: Sequence[float | int | None], steps: int) -> list[int]:
    """The last step of each phase in a run of `steps`; shares are rounded to whole steps, as the learning rate's decay is.
    InputError where a phase would have no step."""
    ends = [
        steps if until is None else round(until * steps) if isinstance(until, float) else until
        for until in untils
    ]
    for number, (before, end) in enumerate(pairwise([0, *ends]), 1):
        if not before < end or (number < len(ends) and end >= steps):
            raise InputError(
                f"`precision`: of {steps:,} steps, phase {number} of {len(ends)} would end with step {end:,} and the one before "
                f"it with step {before:,}; every phase needs a step: change `until`, or train longer (`train`)"
            )
    return ends


# ── `fp8_config` ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class KeepBf16Layers(Settings):
    first: Count = 0  # decoder layers at the start of the model that stay in BF16
    # decoder layers at its end that stay in BF16; null: 15 % of them under nvfp4, rounded up, and none in other precisions
    last: Count | None = None


class LowPrecisionSettings(Settings):
    # TE: Transformer Engine; emulation: in software, also where the hardware could
    backend: Literal["TE", "emulation"] = "TE"
    # linear: all but the LM head; linear+head: the head too
    scope: Literal["linear", "linear+head"] = "linear"
    # without hardware for it; fallback: delayed, else bf16
    on_unsupported: Literal["error", "emulate", "fallback"] = "error"
    keep_bf16_layers: KeepBf16Layers = KeepBf16Layers()
    # linears that stay in BF16, by patterns of names: ["layers.0.*", "down_proj"]
    keep_bf16: tuple[str, ...] = ()
    # evaluate in the low precision too, not in BF16; accelerate's name for it
    use_autocast_during_eval: bool = False

    # Options, of which only those that the precision takes may be set:
    # HYBRID: gradients in E5M2, the rest in E4M3
    fp8_format: Literal["HYBRID", "E4M3"] | None = None
    # halvings of the scale, for room above the largest value seen; 19 would make the largest value
    # itself zero, as E4M3 has a range of 2**17.8
    margin: Annotated[Count, Field(le=18)] | None = None
    # microbatches whose largest values are remembered
    amax_history_len: Annotated[PositiveCount, Field(le=2**20)] | None = None
    amax_compute_algo: Literal["max", "most_recent"] | None = None  # which of them makes the scale
    # no random Hadamard transform of what the weight gradient multiplies
    disable_rht: bool | None = None
    disable_stochastic_rounding: bool | None = None  # gradients are rounded to nearest

    @property
    def options_set(self) -> dict[str, Any]:
        """The options that are set, by key."""
        return {key: getattr(self, key) for key in OPTIONS if getattr(self, key) is not None}

    def contradictions(self, precision: Precision) -> dict[str, Any]:
        """The options that are set and that `precision` does not take, by key."""
        return {
            key: value for key, value in self.options_set.items() if key not in precision.options
        }

    def resolved(self, precision_name: str) -> Self:
        """The settings with every option that the precision takes, by its default where it is None, and all others None."""
        defaults = precision_called(precision_name).options
        options = {
            key: self.options_set.get(key, defaults[key]) if key in defaults else None
            for key in OPTIONS
        }
        return type(self).model_validate(self.model_dump() | options)

    def without_options(self) -> Self:
        """The keys that mean the same for every quantized precision, as they are; no option set."""
        return type(self).model_validate(self.model_dump(exclude_unset=True, exclude=set(OPTIONS)))


# Keys that only some precisions take.
OPTIONS = tuple(
    key
    for key in LowPrecisionSettings.model_fields
    if any(key in each.options for each in PRECISIONS.values())
)

# ── What a run computes in ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ActivePrecision:
    """What a run computes in: `precision`, with `settings` resolved for it. It is not the `requested` one only under
    `on_unsupported: fallback`. `reason` says why the device does not compute what was requested, None where it does."""

    requested: str
    precision: Precision
    backend: Literal["torch", "transformer_engine", "emulation"]  # torch: nothing is quantized
    settings: LowPrecisionSettings
    reason: str | None = None

    def kept_layers(self, layers: int) -> tuple[int, int]:
        """How many of a model's decoder `layers` stay unquantized, at its start and at its end. A precision's own share of them
        leaves it one at least."""
        keep = self.settings.keep_bf16_layers
        if keep.last is not None or not self.precision.quantized:
            return keep.first, keep.last or 0
        return keep.first, max(
            0, min(math.ceil(self.precision.keeps_last * layers), layers - keep.first - 1)
        )

    @property
    def notice(self) -> str | None:
        """What is done in place of what was requested, for the user to read; None where nothing is."""
        instead = (
            f"{self.precision.name} is trained in its place"
            if self.precision.name != self.requested
            else "it is emulated"
        )
        return self.reason and f"{self.reason}: {instead}"
