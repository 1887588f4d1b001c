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
    if setting == "off":
        return None, "nothing: model.fused is off"
    if engaged.backend == "emulation":
        return None, "nothing: emulated products are computed one by one"
    if device_type == "cpu":
        return PlainArithmetic(dtype), ""
    if engaged.backend == "torch":
        if dtype != torch.bfloat16:
            return None, "nothing: on a GPU, layers are fused in BF16 and below"
        if lacking := transformer_engine.lacking():
            return None, f"nothing: that needs {lacking}"
    from pretrain.fused.te_arithmetic import TransformerEngineArithmetic

    return TransformerEngineArithmetic(context.backend if context else None, context), ""
