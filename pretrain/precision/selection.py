"""Choose the precision that a run uses on this machine, and create the engines that run its GEMMs.

If the device supports a quantized precision, Transformer Engine runs the quantized GEMMs. Otherwise
`fp8_config.on_unsupported` determines whether another precision or emulation is used, or whether
the run ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from foundation.errors import InputError
from pretrain.precision import transformer_engine
from pretrain.precision.emulation import EmulationEngine
from pretrain.precision.formats import delayed, unquantized
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.gemm import GemmEngine
from pretrain.precision.settings import ActivePrecision, LowPrecisionSettings, configured

# A function that returns the reason why the device does not support a quantized precision, such as
# "needs a GPU of ...; this is ...". It returns None if the device supports the precision.
SupportCheck = Callable[[QuantizedPrecision], str | None]


def support_check_on(device_type: str) -> SupportCheck:
    """Return a function that checks a quantized precision against the current device.

    `device_type` is "cpu" or "cuda". The returned function compares the compute capability before
    it imports Transformer Engine, because the import takes seconds.
    """
    capability = None
    device = f"this run is on {device_type}"
    if device_type == "cuda":
        capability = torch.cuda.get_device_capability()
        major, minor = capability
        name = torch.cuda.get_device_name()
        device = f"this is an {name} of compute capability {major}.{minor}"

    def unsupported_because(precision: QuantizedPrecision) -> str | None:
        need = precision.hardware.unmet_need(capability) or transformer_engine.unmet_need_of(
            precision
        )
        return f"needs {need}; {device}" if need else None

    return unsupported_because


def select_precision(
    precision: str, fp8_config: LowPrecisionSettings, unsupported_because: SupportCheck
) -> ActivePrecision:
    """Return the precision and the engine of a run that requests `precision`.

    Raise InputError if the device does not support the precision and `on_unsupported` is `error`.

    unsupported_because: check of a precision against the device, see `support_check_on`.
    """
    requested = configured(precision, fp8_config)
    if not isinstance(requested, QuantizedPrecision):
        return ActivePrecision(precision, requested, "torch")
    if fp8_config.backend == "emulation":
        return ActivePrecision(precision, requested, "emulation")
    obstacle = unsupported_because(requested)
    if obstacle is None:
        return ActivePrecision(precision, requested, "transformer_engine")
    reason = f"`precision: {requested.name}` {obstacle}"
    if fp8_config.on_unsupported == "emulate":
        return ActivePrecision(precision, requested, "emulation", reason)
    # The error message names the stand-in too. The options of the recipe were chosen for the
    # requested precision, so the stand-in has default options.
    options = fp8_config.without_options()
    stand_in = configured(delayed.PRECISION.name, options)
    if unsupported_because(cast(QuantizedPrecision, stand_in)):
        stand_in = configured(unquantized.BF16.name, options)
    if fp8_config.on_unsupported == "error":
        raise InputError(
            f"{reason}. Either set `fp8_config.on_unsupported: emulate` to compute the same "
            "numbers slowly in software, or set `fp8_config.on_unsupported: fallback`, or "
            f"`precision: {stand_in.name}`, to train in {stand_in.name}"
        )
    return ActivePrecision(
        precision, stand_in, "transformer_engine" if stand_in.quantized else "torch", reason
    )


def make_engines(actives: Sequence[ActivePrecision], device: torch.device) -> dict[str, GemmEngine]:
    """Create the engines of one model, and return them by the names of their precisions.

    A precision that is not quantized has no engine.
    """
    kinds: dict[str, Callable[[ActivePrecision, torch.device], GemmEngine]] = {
        "emulation": EmulationEngine,
        "transformer_engine": transformer_engine.TransformerEngine,
    }
    quantized = [active for active in actives if active.precision.quantized]
    return {active.name: kinds[active.engine](active, device) for active in quantized}
