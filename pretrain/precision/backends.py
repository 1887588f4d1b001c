"""What a device needs to compute a precision, and the backend that computes it."""

from __future__ import annotations

import torch

from pretrain.precision import transformer_engine
from pretrain.precision.emulation import EmulationBackend
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.linear import Backend
from pretrain.precision.selection import ActivePrecision, Missing


def missing_on(device_type: str) -> Missing:
    """What the current device of `device_type` ("cpu", "cuda") would need for a quantized precision; None: nothing more.

    The compute capability is asked first: it tells most of it, and Transformer Engine takes seconds to import.
    """
    capability, cuda, device = None, None, f"this run is on {device_type}"
    if device_type == "cuda":
        capability = torch.cuda.get_device_capability()
        cuda = tuple(map(int, torch.version.cuda.split(".")[:2])) if torch.version.cuda else None
        device = f"this is an {torch.cuda.get_device_name()} ({capability[0]}.{capability[1]})"

    def missing(precision: QuantizedPrecision) -> str | None:
        need = precision.hardware.missing(capability, cuda) or transformer_engine.unavailable_because(precision)
        return f"needs {need}; {device}" if need else None

    return missing


def make_backend(active: ActivePrecision, device: torch.device) -> Backend:
    """A backend for one model, whose products are on `device`."""
    if active.backend == "transformer_engine":
        return transformer_engine.TransformerEngineBackend(active, device)
    if active.backend == "emulation":
        return EmulationBackend(active, device)
    raise ValueError(f"{active.precision.name} on {active.backend} has no low-precision products")
