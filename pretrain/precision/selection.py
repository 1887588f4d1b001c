"""Which precision a run gets on this machine, and what computes it: Transformer Engine where the device has it, elsewhere as
`fp8_config.on_unsupported` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from foundation.errors import InputError
from pretrain.precision import transformer_engine
from pretrain.precision.emulation import EmulationBackend
from pretrain.precision.formats import delayed, unquantized
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.plain_forward import PlainForwardBackend
from pretrain.precision.product import Backend
from pretrain.precision.settings import (
    PLAIN_FORWARD,
    PRECISIONS,
    ActivePrecision,
    LowPrecisionSettings,
    precision_called,
)

# `on_unsupported: fallback` takes the first that the device has.
STAND_INS = (delayed.PRECISION, unquantized.BF16)
# Why a device cannot run a quantized precision, as in "needs a GPU of ...; this is ..."; None where it can.
Missing = Callable[[QuantizedPrecision], str | None]


def missing_on(device_type: str) -> Missing:
    """What the current device of `device_type` ("cpu", "cuda") would need for a quantized precision; None: nothing more. The
    compute capability comes first, as Transformer Engine takes seconds to import."""
    capability, device = None, f"this run is on {device_type}"
    if device_type == "cuda":
        capability = torch.cuda.get_device_capability()
        device = f"this is an {torch.cuda.get_device_name()} ({capability[0]}.{capability[1]})"

    def missing(precision: QuantizedPrecision) -> str | None:
        need = precision.hardware.missing(capability) or transformer_engine.unavailable_because(
            precision
        )
        return f"needs {need}; {device}" if need else None

    return missing


def select_precision(
    precision: str, fp8_config: LowPrecisionSettings, missing: Missing
) -> ActivePrecision:
    """What a run in `precision` gets on a device that lacks what `missing` says. Raises InputError where the device does not have
    the precision and `on_unsupported` is `error`."""
    wanted = precision_called(precision)
    settings = fp8_config.resolved(precision)
    wanted_on = partial(ActivePrecision, precision, wanted)
    if not wanted.quantized:
        return wanted_on("torch", settings)
    if settings.backend == "emulation":
        return wanted_on("emulation", settings)
    if (need := missing(wanted)) is None:
        return wanted_on("transformer_engine", settings)
    reason = f"`precision: {wanted.use}` {need}"
    if settings.on_unsupported == "emulate":
        return wanted_on("emulation", settings, reason)
    available = [
        each for each in PRECISIONS.values() if not each.quantized or missing(each) is None
    ]
    nearest = next(each for each in STAND_INS if each in available)
    if settings.on_unsupported == "fallback":
        backend = "transformer_engine" if nearest.quantized else "torch"
        if nearest.quantized and wanted.plain_forward:
            nearest = precision_called(f"{nearest.name}{PLAIN_FORWARD}")
        return ActivePrecision(
            precision, nearest, backend, fp8_config.without_options().resolved(nearest.name), reason
        )
    raise InputError(
        f"{reason}. Set `fp8_config.on_unsupported: emulate` to compute the same numbers slowly, "
        f"`fp8_config.on_unsupported: fallback` to train in {nearest.name}, or a `precision` that runs here: "
        f"{', '.join(each.name for each in available)}"
    )


def make_backends(
    actives: Sequence[ActivePrecision], device: torch.device
) -> dict[str, Backend | None]:
    """The backend of each precision of one model, by name, with products on `device`; None where nothing is quantized. One with
    its forward in BF16 shares the backend of the same precision without."""
    kinds = {
        "emulation": EmulationBackend,
        "transformer_engine": transformer_engine.TransformerEngineBackend,
    }
    made: dict[str, Backend | None] = {}
    for active in actives:
        name = active.precision.use
        if name not in made:
            kind = kinds.get(active.backend)
            made[name] = kind and kind(replace(active, precision=precision_called(name)), device)
        if active.precision.plain_forward:
            made[active.precision.name] = PlainForwardBackend(made[name])
    return {active.precision.name: made[active.precision.name] for active in actives}
