"""The backend that an engaged precision computes on, imported when it is wanted: Transformer Engine takes seconds to load."""

from __future__ import annotations

import torch

from pretrain.precision.linear import Backend
from pretrain.precision.selection import ActivePrecision


def make_backend(active: ActivePrecision, device: torch.device) -> Backend:
    """A backend for one model, whose products are on `device`."""
    if active.backend == "transformer_engine":
        from pretrain.precision.transformer_engine import TransformerEngineBackend

        return TransformerEngineBackend(active, device)
    if active.backend == "emulation":
        from pretrain.precision.emulation import EmulationBackend

        return EmulationBackend(active, device)
    raise ValueError(f"{active.precision.name} on {active.backend} has no low-precision products")
