"""Which precision a run gets on this machine, on what it computes it, and why that is not what was asked for.

A precision runs on Transformer Engine where the device has it. Elsewhere `fp8_config.on_unsupported` decides: stop and say which
device has it, compute the same numbers slowly, or train in the nearest precision that the device does have. The result is an
`ActivePrecision`, which everything after asks; nothing later changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from foundation.errors import InputError
from pretrain.precision.formats.definition import Precision
from pretrain.precision.registry import PRECISIONS
from pretrain.precision.settings import LowPrecisionSettings

# Why a device cannot run a quantized precision, as in "needs a GPU of ...; this is ..."; None where it can.
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
    """What a run in `precision` gets on a device where `missing` is missing (`backends.missing_on`).

    Raises InputError where the device does not have the precision and `on_unsupported` is `error`.
    """
    wanted = PRECISIONS[precision]
    settings = fp8_config.resolved(wanted.name)
    if not wanted.quantized:
        return ActivePrecision(wanted.name, wanted, "torch", settings)
    if settings.backend == "emulation":
        return ActivePrecision(wanted.name, wanted, "emulation", settings)
    need = missing(wanted)
    if need is None and (emulation := wanted.needs_emulation(settings)):
        need = f"needs {emulation}"
    if need is None:
        return ActivePrecision(wanted.name, wanted, "transformer_engine", settings)

    reason = f"`precision: {wanted.name}` {need}"
    if settings.on_unsupported == "emulate":
        return ActivePrecision(wanted.name, wanted, "emulation", settings, reason)
    available = [each for each in PRECISIONS.values() if not each.quantized or missing(each) is None]
    ranked = [each for each in available if each.fallback_rank is not None and each is not wanted]
    nearest = min(ranked, key=lambda each: each.fallback_rank)
    if settings.on_unsupported == "fallback":
        settings = fp8_config.without_options().resolved(nearest.name)
        backend = "transformer_engine" if nearest.quantized else "torch"
        return ActivePrecision(wanted.name, nearest, backend, settings, reason)
    raise InputError(
        f"{reason}. Set `fp8_config.on_unsupported: emulate` to compute the same numbers slowly, "
        f"`fp8_config.on_unsupported: fallback` to train in {nearest.name}, or a `precision` that runs here: "
        f"{', '.join(each.name for each in available)}"
    )
