"""SwiGLU and its gradient, quantized on the way, as Transformer Engine's tensors.

Transformer Engine writes the gradient in BF16, reads it again to quantize and transpose it, and transposes the activated values
in a kernel of its own. Here backward is one kernel, two for current scaling (pretrain.model.fused.activation_kernel).

What is quantized has been rounded to BF16 first, as in the unfused model and in the emulation. So it is in Transformer Engine's
own fused layers, but for the activated values under delayed scaling, which it quantizes from FP32: one code in some hundreds
differs. Current scaling's amax is from before that rounding, there and here. Imported only where Transformer Engine is.
"""

from __future__ import annotations

from typing import Any

import transformer_engine_torch as tex
from torch import Tensor

from pretrain.model.fused import activation_kernel as kernel
from pretrain.model.fused.te_storage import block_scaled, scaling_of, tensor_scaled
from pretrain.precision.fp8_tile import BlockScaled

Activated = Any  # a Tensor, or what a quantizer of Transformer Engine makes
Kept = Any  # the activated values; of those that backward makes again the one scale, FP32 [1], or None where there is none


def swiglu(hidden: Tensor, quantizer: Any | None, *, made_again: bool = True) -> tuple[Activated, Kept]:
    """hidden [T, 2 F] BF16, gate then up, each F wide -> silu(gate) * up [T, F], in BF16 without a quantizer; and what
    `swiglu_backward` is to be given as `kept`.

    Where tiles are whole, and the quantizer is none or one for FP8, backward makes the activated values again. Then those of a
    quantizer have rowwise data alone here, whatever its usages are. Elsewhere they have what the usages say, and are kept:
    NVFP4's transpose is not one of the same numbers.

    `made_again`: whether backward quantizes the gradient of `hidden` where this quantizes; else what is quantized here is kept,
    since no kernel writes a gradient in BF16 and quantized values together.
    """
    if quantizer is not None and not made_again:
        activated = quantizer(tex.swiglu(hidden, None))
        return activated, activated
    if not _takes(hidden, quantizer):
        activated = tex.swiglu(hidden, quantizer)
        return activated, activated
    if quantizer is None:
        return tex.swiglu(hidden, None), None
    shape = len(hidden), hidden.shape[1] // 2
    if scaling_of(quantizer) is BlockScaled:
        activated, written = block_scaled(quantizer, shape, hidden.device, rows=True, columns=False)
        kernel.forward_blocks(hidden, written)
        return activated, None
    activated, written = tensor_scaled(quantizer, shape, hidden.device, rows=True, columns=False)
    kernel.forward(hidden, written)
    return activated, written.used


def swiglu_backward(
    d_activated: Tensor, hidden: Tensor, gradient_quantizer: Any | None, kept: Kept, activated_quantizer: Any | None
) -> tuple[Activated, Activated]:
    """The gradient of `hidden` [T, 2 F] as its product's backward takes it (what the usages of `gradient_quantizer` say), and the
    activated values [T, F] as the next product's weight gradient takes them: columnwise, quantized with forward's scale.

    `d_activated` [T, F] and `hidden` are BF16; `kept` is what forward returned. Either of the two products may be in BF16, and
    have no quantizer. TypeError for two quantizers of different kinds.
    """
    d_activated = d_activated.contiguous()
    if activated_quantizer is not None and gradient_quantizer is None:  # forward was told, and has kept the activated values
        return tex.dswiglu(d_activated, hidden, None), kept
    if activated_quantizer is None and gradient_quantizer is not None:
        if kept is not None:
            return gradient_quantizer(tex.dswiglu(d_activated, hidden, None)), kept
        d_hidden, activated = kernel.backward_bf16(d_activated, hidden)
        return gradient_quantizer(d_hidden), activated
    scaled = scaling_of(activated_quantizer)
    if type(gradient_quantizer) is not type(activated_quantizer) or scaled is not scaling_of(gradient_quantizer):
        raise TypeError(f"{activated_quantizer} quantized the activated values, which does not go with {gradient_quantizer}")
    if not _takes(hidden, gradient_quantizer):  # nor did forward's: the activated values are kept
        return tex.dswiglu(d_activated, hidden, gradient_quantizer), kept
    if gradient_quantizer is None:
        return kernel.backward_bf16(d_activated, hidden)
    device = hidden.device
    usages = {"rows": gradient_quantizer.rowwise_usage, "columns": gradient_quantizer.columnwise_usage}
    if scaled is BlockScaled:
        d_hidden, gradient = block_scaled(gradient_quantizer, hidden.shape, device, **usages)
        activated, again = block_scaled(activated_quantizer, d_activated.shape, device, rows=False, columns=True)
        kernel.backward_blocks(d_activated, hidden, gradient, again)
        return d_hidden, activated
    d_hidden, gradient = tensor_scaled(gradient_quantizer, hidden.shape, device, **usages)
    activated, again = tensor_scaled(activated_quantizer, d_activated.shape, device, rows=False, columns=True, scale=kept)
    kernel.backward(d_activated, hidden, gradient, again)
    return d_hidden, activated


def _takes(hidden: Tensor, quantizer: Any | None) -> bool:
    """Whether backward makes the activated values again: for no quantizer or one for FP8, and whole tiles."""
    scaled = scaling_of(quantizer)
    return (quantizer is None or scaled is not None) and kernel.divides(hidden, scaled)
