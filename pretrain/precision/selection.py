"""Which precision a run gets on this machine, on what it computes it, and why that is not what was asked for.

A precision runs on Transformer Engine where the device has it. Elsewhere `fp8_config.on_unsupported` decides: stop and say which
device has it, compute the same numbers slowly, or train in the nearest precision that the device does have.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from foundation.errors import InputError
from pretrain.precision import transformer_engine
from pretrain.precision.emulation import EmulationBackend
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.product import Backend
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings

# Why a device cannot run a quantized precision, as in "needs a GPU of ...; this is ..."; None where it can.
Missing = Callable[[QuantizedPrecision], str | None]


def missing_on(device_type: str) -> Missing:
    """What the current device of `device_type` ("cpu", "cuda") would need for a quantized precision; None: nothing more. The
    compute capability is asked first: it tells most of it, and Transformer Engine takes seconds to import."""
    capability, cuda, device = None, None, f"this run is on {device_type}"
    if device_type == "cuda":
        capability = torch.cuda.get_device_capability()
        cuda = tuple(map(int, torch.version.cuda.split(".")[:2])) if torch.version.cuda else None
        device = f"this is an {torch.cuda.get_device_name()} ({capability[0]}.{capability[1]})"

    def missing(precision: QuantizedPrecision) -> str | None:
        need = precision.hardware.missing(capability, cuda) or transformer_engine.unavailable_because(precision)
        return f"needs {need}; {device}" if need else None

    return missing


def select_precision(precision: str, fp8_config: LowPrecisionSettings, missing: Missing) -> ActivePrecision:
    """What a run in `precision` gets on a device that lacks what `missing` says. Raises InputError where the device does not have
    the precision and `on_unsupported` is `error`."""
    wanted = PRECISIONS[precision]
    settings = fp8_config.resolved(wanted.name)
    if not wanted.quantized:
        return ActivePrecision(wanted.name, wanted, "torch", settings)
    if settings.backend == "emulation":
        return ActivePrecision(wanted.name, wanted, "emulation", settings)
    need = missing(wanted)
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


def make_backend(active: ActivePrecision, device: torch.device) -> Backend:
    """A backend for one model, whose products are on `device`."""
    if active.backend == "transformer_engine":
        return transformer_engine.TransformerEngineBackend(active, device)
    return EmulationBackend(active, device)
