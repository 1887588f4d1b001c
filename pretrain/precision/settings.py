"""The precisions by name, and `fp8_config`. Nothing here imports torch.

`fp8_config` says how a quantized precision is to run, by the same keys in a recipe and in an accelerate configuration. Some keys
are for every quantized precision; the others are options, of which each precision takes a few (`Precision.options`). An option
that is not set is None, and `resolved` fills in the default of the precision that is chosen.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field

from foundation.errors import InputError
from foundation.settings import Count, PositiveCount, Settings
from pretrain.precision import formats
from pretrain.precision.formats.definition import Precision

# ── The precisions ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

Weights = Literal["fp32", "bf16", "bf16_exact"]  # `weights:` of a recipe
# The torch dtype that parameters are kept in.
WEIGHT_DTYPES: dict[Weights, str] = {"fp32": "float32", "bf16": "bfloat16", "bf16_exact": "bfloat16"}


def discovered() -> dict[str, Precision]:
    """Every precision by name, in order: the objects of class Precision in the files of `formats/`."""
    modules = [importlib.import_module(f"{formats.__name__}.{each.name}") for each in pkgutil.iter_modules(formats.__path__)]
    precisions = [value for module in modules for value in vars(module).values() if isinstance(value, Precision)]
    return {precision.name: precision for precision in sorted(precisions, key=lambda precision: precision.order)}


PRECISIONS = discovered()
# What computes a linear that low precision leaves out, by the dtype of its activations.
UNQUANTIZED = {precision.compute_dtype: precision for precision in PRECISIONS.values() if not precision.quantized}


def find_by_accelerate_name(mixed_precision: str) -> Precision | None:
    """The precision that a value of accelerate's `mixed_precision` means by itself."""
    return next((precision for precision in PRECISIONS.values() if precision.accelerate_name == mixed_precision), None)


def known_precision(name: str) -> str:
    """`name`, where a precision has it. ValueError elsewhere."""
    if name not in PRECISIONS:
        near = difflib.get_close_matches(name, PRECISIONS, n=1)
        raise ValueError(
            f"unknown precision {name!r}; {f'did you mean {near[0]!r}? ' if near else ''}known: {', '.join(PRECISIONS)}"
        )
    return name


def find(name: str, origin: str) -> Precision:
    """The precision called `name`; InputError that names `origin` elsewhere."""
    try:
        return PRECISIONS[known_precision(name)]
    except ValueError as error:
        raise InputError(f"{origin}: {error}") from None


PrecisionName = Annotated[str, AfterValidator(known_precision)]

# ── `fp8_config` ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


# Halvings of a delayed scale. E4M3 has a range of 2**17.8: by one more, the largest value itself would become zero.
MOST_MARGIN = 18


class KeepBf16Layers(Settings):
    """Decoder layers that stay in BF16: so many at the start of the model, so many at its end."""

    first: Count = 0  # decoder layers at the start of the model that stay in BF16
    last: Count = 0  # decoder layers at its end that stay in BF16


class LowPrecisionSettings(Settings):
    backend: Literal["TE", "emulation"] = "TE"  # TE: Transformer Engine; emulation: in software, also where the hardware could
    scope: Literal["linear", "linear+head"] = "linear"  # all linears but the LM head; with it
    on_unsupported: Literal["error", "emulate", "fallback"] = "error"  # where the device lacks it; fallback: delayed, else bf16
    keep_bf16_layers: KeepBf16Layers = KeepBf16Layers()
    keep_bf16: tuple[str, ...] = ()  # linears that stay in BF16, by patterns of names: ["layers.0.*", "down_proj"]
    use_autocast_during_eval: bool = False  # evaluate in the low precision too, not in BF16; accelerate's name for it

    # Options, of which only those that the precision takes may be set:
    fp8_format: Literal["HYBRID", "E4M3"] | None = None  # HYBRID: gradients in E5M2, the rest in E4M3
    # Each one halves the scale, for room above the largest value seen.
    margin: Annotated[Count, Field(le=MOST_MARGIN)] | None = None
    amax_history_len: Annotated[PositiveCount, Field(le=2**20)] | None = None  # microbatches whose largest values are remembered
    amax_compute_algo: Literal["max", "most_recent"] | None = None  # which of them makes the scale
    disable_rht: bool | None = None  # no random Hadamard transform of what the weight gradient multiplies
    disable_stochastic_rounding: bool | None = None  # gradients are rounded to nearest

    @property
    def options_set(self) -> dict[str, Any]:
        """The options that are set, by key."""
        return {key: getattr(self, key) for key in OPTIONS if getattr(self, key) is not None}

    def contradictions(self, precision: Precision) -> list[str]:
        """What is set and `precision` does not take, as `key: value`."""
        return [f"{key}: {value}" for key, value in self.options_set.items() if not precision.takes(key, value)]

    def resolved(self, precision_name: str) -> Self:
        """The settings with every option that the precision takes, by its default where it is None, and all others None."""
        defaults = PRECISIONS[precision_name].options
        options = {key: self.options_set.get(key, defaults[key]) if key in defaults else None for key in OPTIONS}
        return type(self).model_validate(self.model_dump() | options)

    def without_options(self) -> Self:
        """The keys that mean the same for every quantized precision, as they are; no option set."""
        return type(self).model_validate(self.model_dump(exclude_unset=True, exclude=set(OPTIONS)))


# Keys that only some precisions take.
OPTIONS = tuple(key for key in LowPrecisionSettings.model_fields if any(key in each.options for each in PRECISIONS.values()))

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

    @property
    def notice(self) -> str | None:
        """What is done in place of what was requested, for the user to read; None where nothing is."""
        instead = f"{self.precision.name} is trained in its place" if self.precision.name != self.requested else "it is emulated"
        return self.reason and f"{self.reason}: {instead}"
