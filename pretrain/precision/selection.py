"""Which precision a run gets on this machine, on what it computes it, and why that is not what was asked for.

A recipe runs on Transformer Engine where the device has it. Where it has not, `fp8_config.on_unsupported` decides: stop and say
which device has it, compute the same numbers slowly, or train in the nearest precision that the device does have. What comes of
it is an `Engaged`, which everything after asks; nothing later may change its mind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from foundation.errors import InputError
from pretrain.precision.registry import PRECISIONS, Precision
from pretrain.precision.settings import LowPrecisionSettings

_FALLBACK = "delayed"  # the low precision that most GPUs have; where not even that, BF16

# Why a device cannot run a quantized recipe, as in "needs a GPU of ...; this is ..."; None where it can.
Missing = Callable[[Precision], str | None]


@dataclass(frozen=True)
class ActivePrecision:
    """What a run computes in.

    `precision` is the effective one; it is not the `requested` one only under `on_unsupported: fallback`. `settings` are resolved
    for it. `reason` says why this is not what was asked for, None where it is.
    """

    requested: str
    precision: Precision
    backend: Literal["torch", "transformer_engine", "emulation"]  # torch: nothing is quantized
    settings: LowPrecisionSettings
    reason: str | None = None

    @property
    def notice(self) -> str | None:
        """What is done in place of what was asked for, for the user to read; None where nothing is."""
        if self.reason is None:
            return None
        instead = f"{self.precision.name} is trained in its place" if self.precision.name != self.requested else "it is emulated"
        return f"{self.reason}: {instead}"


def select_precision(precision: str, fp8_config: LowPrecisionSettings, missing: Missing) -> ActivePrecision:
    """What a run in `precision` gets on a device that lacks what `missing` says (`device.missing_on`).

    Raises InputError where the device lacks the precision and `on_unsupported` is `error`.
    """
    wanted = PRECISIONS[precision]
    settings = fp8_config.resolved(wanted.name)
    if not wanted.quantized:
        return ActivePrecision(wanted.name, wanted, "torch", settings)
    if settings.backend == "emulation":
        return ActivePrecision(wanted.name, wanted, "emulation", settings)
    lacking = missing(wanted)
    if lacking is None and settings.scale_rounding == "floor":
        lacking = "needs emulation for `fp8_config.scale_rounding: floor`; the hardware rounds scales up"
    if lacking is None:
        return ActivePrecision(wanted.name, wanted, "transformer_engine", settings)

    reason = f"`precision: {wanted.name}` {lacking}"
    if settings.on_unsupported == "emulate":
        return ActivePrecision(wanted.name, wanted, "emulation", settings, reason)
    if settings.on_unsupported == "fallback":
        low_precision = wanted.name != _FALLBACK and missing(PRECISIONS[_FALLBACK]) is None
        nearest = PRECISIONS[_FALLBACK if low_precision else "bf16"]
        settings = fp8_config.without_options().resolved(nearest.name)
        return ActivePrecision(wanted.name, nearest, "transformer_engine" if low_precision else "torch", settings, reason)
    raise InputError(f"{reason}. {_remedies(missing)}")


def _remedies(missing: Missing) -> str:
    available = [name for name, recipe in PRECISIONS.items() if not recipe.quantized or missing(recipe) is None]
    fallback = _FALLBACK if _FALLBACK in available else "bf16"
    return (
        "Set `fp8_config.on_unsupported: emulate` to compute the same numbers slowly, "
        f"`fp8_config.on_unsupported: fallback` to train in {fallback}, or a `precision` that runs here: {', '.join(available)}"
    )
