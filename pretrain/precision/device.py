"""Which of the quantized recipes this process's device can run, and what it lacks for the others."""

from __future__ import annotations

import torch

from pretrain.precision import transformer_engine
from pretrain.precision.registry import Precision
from pretrain.precision.selection import Missing


def missing_on(device_type: str) -> Missing:
    """What the current device of `device_type` ("cpu", "cuda") lacks for a quantized recipe; None: nothing.

    The compute capability is asked first: it tells most of it, and Transformer Engine takes seconds to import.
    """
    capability, cuda, device = None, None, f"this run is on {device_type}"
    if device_type == "cuda":
        capability = torch.cuda.get_device_capability()
        cuda = _version(torch.version.cuda)
        device = f"this is an {torch.cuda.get_device_name()} ({capability[0]}.{capability[1]})"

    def missing(recipe: Precision) -> str | None:
        lacking = recipe.hardware.lacking(capability, cuda) or transformer_engine.unavailable_because(recipe)
        return f"needs {lacking}; {device}" if lacking else None

    return missing


def _version(text: str | None) -> tuple[int, int] | None:
    """ "12.9" -> (12, 9); None for a torch that is built without CUDA."""
    if text is None:
        return None
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
