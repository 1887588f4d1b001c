"""RMSNorm with the residual's sum before it, quantized on the way, as Transformer Engine's tensors.

Otherwise these are three kernels: torch adds, Transformer Engine normalises and writes rows, and another transposes them. Here it
is one for delayed scaling and BF16, two for scales that follow from the values (pretrain.model.fused.norm_kernel). What is
quantized has Transformer Engine's bits wherever rstd has; that may be a unit or two off in its last place, as sums come in
another order. Imported only where Transformer Engine is.
"""

from __future__ import annotations

from typing import Any

import transformer_engine_torch as tex
from torch import Tensor

from pretrain.model.fused import norm_kernel as kernel
from pretrain.model.fused.te_storage import allocate, scaling_of

Normed = Any  # a Tensor, or what a quantizer of Transformer Engine makes


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, quantizer: Any | None) -> tuple[Normed, Tensor]:
    """Add `residual` to x [tokens, width] in place; return the norm of the sum as `quantizer` makes it, and its rstd [tokens].

    All BF16 but rstd, which is FP32; the norm is BF16 where there is no quantizer. Quantizers for other formats than FP8, shapes
    of no whole tiles, and a norm in BF16 with nothing to add go to Transformer Engine.
    """
    if not _takes(x, residual, quantizer):
        if residual is not None:
            x.add_(residual)
        normed, _, rstd = tex.rmsnorm_fwd(x, weight, eps, None, quantizer, tex.DType.kBFloat16, 0, False)
        return normed, rstd
    if quantizer is None:
        return kernel.rms_norm(x, residual, weight, eps)
    normed, written = allocate(quantizer, x.shape, x.device)
    write = kernel.rms_norm_blocks if isinstance(written, kernel.BlockScaled) else kernel.rms_norm_scaled
    return normed, write(x, residual, weight, eps, written)


def _takes(x: Tensor, residual: Tensor | None, quantizer: Any | None) -> bool:
    """Whether our kernels serve, and have something to gain."""
    scaled = scaling_of(quantizer)
    if scaled is None and (quantizer is not None or residual is None):
        return False
    return kernel.divides(x, scaled) and (residual is None or kernel.divides(residual, scaled))
