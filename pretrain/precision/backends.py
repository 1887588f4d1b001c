"""The backend that an engaged precision computes on, imported when it is wanted: Transformer Engine takes seconds to load."""

from __future__ import annotations

import torch

from pretrain.precision.engage import Engaged
from pretrain.precision.product import Backend


def make_backend(engaged: Engaged, device: torch.device) -> Backend:
    """A backend for one model, whose products are on `device`."""
    if engaged.backend == "transformer_engine":
        from pretrain.precision.transformer_engine import TransformerEngineBackend

        return TransformerEngineBackend(engaged, device)
    if engaged.backend == "emulation":
        from pretrain.precision.emulation import EmulationBackend

        return EmulationBackend(engaged, device)
    raise ValueError(f"{engaged.recipe.name} on {engaged.backend} has no low-precision products")
