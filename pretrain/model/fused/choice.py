"""What fused layers compute with on a device, or why nothing is fused there."""

from __future__ import annotations

from typing import Literal

import torch

from foundation.errors import InputError
from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.fused.plain import TorchArithmetic
from pretrain.precision import transformer_engine
from pretrain.precision.context import PrecisionContext
from pretrain.precision.selection import ActivePrecision

Setting = Literal["auto", "on", "off"]


def choose_arithmetic(
    setting: Setting, active: ActivePrecision, device_type: str, dtype: torch.dtype, context: PrecisionContext | None
) -> tuple[Arithmetic | None, str]:
    """The arithmetic for activations of `dtype`, or None and the reason, worded for the audit.

    `context`: of a low precision, None without one. Raises InputError as `not_fused_because`.
    """
    if reason := not_fused_because(setting, active, device_type, dtype):
        return None, reason
    if active.backend == "torch" and _no_faster(device_type, dtype):
        return TorchArithmetic(dtype), ""
    from pretrain.model.fused.te_arithmetic import TransformerEngineArithmetic

    return TransformerEngineArithmetic(context.backend if context else None, context), ""


def not_fused_because(setting: Setting, active: ActivePrecision, device_type: str, dtype: torch.dtype) -> str | None:
    """Why no layer is fused, whatever its architecture; None: those that can be are. InputError for what cannot be `on`."""
    if setting == "off":
        return "nothing: model.fused is off"
    if active.backend == "emulation":
        if setting == "on":
            raise InputError("`model.fused: on`: emulated products are computed one by one; set `model.fused: auto`")
        return "nothing: emulated products are computed one by one"
    if setting == "on" or active.backend == "transformer_engine":
        return None
    slow = _no_faster(device_type, dtype)
    return f"nothing: {slow}; model.fused: on does it all the same" if slow else None


def _no_faster(device_type: str, dtype: torch.dtype) -> str | None:
    """Why fused layers gain nothing where nothing is quantized. On a CPU the demo's model trains 5 to 6 % slower so
    (benchmarks/results/cpu_fused.json)."""
    if device_type == "cpu":
        return "it gains nothing on a CPU"
    if dtype != torch.bfloat16:
        return "on a GPU it gains in BF16 and below"
    missing = transformer_engine.missing()
    return f"it needs {missing}" if missing else None
