"""What fused layers compute with on a device, or why nothing is fused there."""

from __future__ import annotations

from typing import Literal

import torch

from pretrain.fused.arithmetic import Arithmetic
from pretrain.fused.plain import PlainArithmetic
from pretrain.precision import transformer_engine
from pretrain.precision.context import PrecisionContext
from pretrain.precision.engage import Engaged


def choose_arithmetic(
    setting: Literal["auto", "off"],
    engaged: Engaged,
    device_type: str,
    dtype: torch.dtype,
    context: PrecisionContext | None,
) -> tuple[Arithmetic | None, str]:
    """The arithmetic for activations of `dtype`, or None and the reason, worded for the audit.

    `context`: of the low precision that is `engaged`, None without one.
    """
    if reason := not_fused_because(setting, engaged, device_type, dtype):
        return None, reason
    if device_type == "cpu":
        return PlainArithmetic(dtype), ""
    from pretrain.fused.te_arithmetic import TransformerEngineArithmetic

    return TransformerEngineArithmetic(context.backend if context else None, context), ""


def not_fused_because(setting: Literal["auto", "off"], engaged: Engaged, device_type: str, dtype: torch.dtype) -> str | None:
    """Why no layer is fused, whatever its architecture; None: those that can be are."""
    if setting == "off":
        return "nothing: model.fused is off"
    if engaged.backend == "emulation":
        return "nothing: emulated products are computed one by one"
    if device_type == "cpu" or engaged.backend == "transformer_engine":
        return None
    if dtype != torch.bfloat16:
        return "nothing: on a GPU, layers are fused in BF16 and below"
    lacking = transformer_engine.lacking()
    return f"nothing: that needs {lacking}" if lacking else None
