"""SwiGLU and its gradient, quantized on the way, as Transformer Engine's tensors.

Transformer Engine writes the gradient in BF16, reads it again to quantize and transpose it, and transposes the activated values
in a kernel of its own. Here backward is one kernel, two for current scaling (pretrain.model.fused.activation_kernel).

What is quantized has been rounded to BF16 first, as in the unfused model and in the emulation. So it is in Transformer Engine's
own fused layers, but for the activated values under delayed scaling, which it quantizes from FP32: one code in some hundreds
differs. Current scaling's amax is from before that rounding, there and here. Imported only where Transformer Engine is.
"""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch.constants import TE_DType_To_Torch
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

from pretrain.model.fused import activation_kernel as kernel
from pretrain.precision.fp8_tile import BlockScaled, TensorScaled

Activated = Any  # a Tensor, or what a quantizer of Transformer Engine makes
Scaled = type[TensorScaled] | type[BlockScaled]


def swiglu(hidden: Tensor, quantizer: Any | None, *, made_again: bool = True) -> tuple[Activated, Activated | None]:
    """hidden [T, 2 F] BF16, gate then up, each F wide -> silu(gate) * up [T, F], and what `swiglu_backward` is to be given of it.

    With a quantizer for FP8, and whole tiles, the result has rowwise data alone, and what is kept is its scale, FP32 [1], or
    None: its usages are not asked. Every other quantizer makes what its usages say, and the result is kept: NVFP4's transpose is
    not one of the same numbers. Without a quantizer the result is BF16; where tiles are whole, nothing is kept of it either.

    `made_again`: whether backward quantizes the gradient of `hidden` where this quantizes; else what is quantized here is kept,
    since no kernel writes a gradient in BF16 and quantized values together.
    """
    if quantizer is not None and not made_again:
        activated = quantizer(tex.swiglu(hidden, None))
        return activated, activated
    scaled = scaling_of(quantizer)
    if not _takes(hidden, quantizer):
        activated = tex.swiglu(hidden, quantizer)
        return activated, activated
    if quantizer is None:
        return tex.swiglu(hidden, None), None
    shape = len(hidden), hidden.shape[1] // 2
    if scaled is BlockScaled:
        activated, written = _block_scaled(quantizer, shape, hidden.device, rows=True, columns=False)
        kernel.forward_blocks(hidden, written)
        return activated, None
    activated, written = _tensor_scaled(quantizer, shape, hidden.device, rows=True, columns=False)
    kernel.forward(hidden, written)
    return activated, written.used


def swiglu_backward(
    d_activated: Tensor, hidden: Tensor, gradient_quantizer: Any | None, kept: Activated | None, activated_quantizer: Any | None
) -> tuple[Activated, Activated]:
    """The gradient of `hidden` [T, 2 F] as its product's backward takes it (what the usages of `gradient_quantizer` say), and the
    activated values [T, F] as the next product's weight gradient takes them: columnwise, quantized with forward's scale.

    `d_activated` [T, F] and `hidden` are BF16; `kept` is what forward returned. Either of the two products may be in BF16, and
    have no quantizer. TypeError for two quantizers of different kinds.
    """
    if activated_quantizer is not None and gradient_quantizer is None:  # forward was told, and has kept the activated values
        return tex.dswiglu(d_activated.contiguous(), hidden, None), kept
    if activated_quantizer is None and gradient_quantizer is not None:
        if kept is not None:
            return gradient_quantizer(tex.dswiglu(d_activated.contiguous(), hidden, None)), kept
        d_hidden, activated = kernel.backward_bf16(d_activated.contiguous(), hidden)
        return gradient_quantizer(d_hidden), activated
    scaled = scaling_of(activated_quantizer)
    if type(gradient_quantizer) is not type(activated_quantizer) or scaled is not scaling_of(gradient_quantizer):
        raise TypeError(f"{activated_quantizer} quantized the activated values, which does not go with {gradient_quantizer}")
    d_activated = d_activated.contiguous()
    if not _takes(hidden, gradient_quantizer):
        return tex.dswiglu(d_activated, hidden, gradient_quantizer), kept
    if gradient_quantizer is None:
        return kernel.backward_bf16(d_activated, hidden)
    device = hidden.device
    usages = {"rows": gradient_quantizer.rowwise_usage, "columns": gradient_quantizer.columnwise_usage}
    if scaled is BlockScaled:
        d_hidden, gradient = _block_scaled(gradient_quantizer, hidden.shape, device, **usages)
        activated, again = _block_scaled(activated_quantizer, d_activated.shape, device, rows=False, columns=True)
        kernel.backward_blocks(d_activated, hidden, gradient, again)
        return d_hidden, activated
    d_hidden, gradient = _tensor_scaled(gradient_quantizer, hidden.shape, device, **usages)
    activated, again = _tensor_scaled(activated_quantizer, d_activated.shape, device, rows=False, columns=True, scale=kept)
    kernel.backward(d_activated, hidden, gradient, again)
    return d_hidden, activated


def _takes(hidden: Tensor, quantizer: Any | None) -> bool:
    """Whether our kernels serve: for no quantizer or one for FP8, and whole tiles."""
    scaled = scaling_of(quantizer)
    return (quantizer is None or scaled is not None) and kernel.divides(hidden, scaled)


def scaling_of(quantizer: Any | None) -> Scaled | None:
    """How our kernels write what `quantizer` would; None where they do not."""
    if isinstance(quantizer, Float8Quantizer):
        return TensorScaled
    if isinstance(quantizer, Float8CurrentScalingQuantizer) and not quantizer.with_amax_reduction:
        return TensorScaled
    if isinstance(quantizer, Float8BlockQuantizer) and quantizer.block_scaling_dim == 1:
        return BlockScaled
    return None


def allocate(quantizer: Any, shape: tuple[int, ...], device: torch.device) -> tuple[Activated, TensorScaled | BlockScaled]:
    """What a `quantizer` that `scaling_of` knows would make of a tensor [M, K], and its parts, for a kernel to write."""
    make = _block_scaled if scaling_of(quantizer) is BlockScaled else _tensor_scaled
    return make(quantizer, shape, device, rows=quantizer.rowwise_usage, columns=quantizer.columnwise_usage)


def _tensor_scaled(
    quantizer: Any, shape: tuple[int, ...], device: torch.device, *, rows: bool, columns: bool, scale: Tensor | None = None
) -> tuple[Float8TensorStorage, TensorScaled]:
    """An FP8 tensor [M, K] and where its parts lie. With `scale` it is quantized by that, and no amax is recorded."""
    if is_non_tn_fp8_gemm_supported():  # from Blackwell on, products read both ways, and there are no transposes
        rows, columns = True, False
    tokens, width = shape
    dtype = TE_DType_To_Torch[quantizer.dtype]
    numbers: dict[str, Any] = {"scale_inv": torch.empty(1, device=device)}
    if scale is not None:
        numbers |= {"scale": scale}
    elif isinstance(quantizer, Float8Quantizer):
        numbers |= {"scale": quantizer.scale, "amax": quantizer.amax, "used": torch.empty(1, device=device)}
    else:
        numbers |= {"amax": torch.zeros(1, device=device), "used": torch.empty(1, device=device)}
        numbers |= {"epsilon": quantizer.amax_epsilon, "power_of_two": quantizer.force_pow_2_scales}
    written = TensorScaled(dtype, _bytes(rows, tokens, width, device), _bytes(columns, width, tokens, device), **numbers)
    tensor = Float8TensorStorage(
        data=written.rows,
        data_transpose=written.columns,
        fp8_scale_inv=written.scale_inv,
        fp8_dtype=quantizer.dtype,
        fake_dtype=torch.bfloat16,
        quantizer=quantizer,
    )
    return tensor, written


def _block_scaled(
    quantizer: Any, shape: tuple[int, ...], device: torch.device, *, rows: bool, columns: bool
) -> tuple[Float8BlockwiseQTensorStorage, BlockScaled]:
    """A block-scaled FP8 tensor [M, K] and where its parts lie."""
    tokens, width = shape
    block = kernel.BLOCK.value
    written = BlockScaled(
        TE_DType_To_Torch[quantizer.dtype],
        _bytes(rows, tokens, width, device),
        torch.empty(width // block, tokens, device=device) if rows else None,
        _bytes(columns, width, tokens, device),
        torch.empty(tokens // block, width, device=device) if columns else None,
        quantizer.amax_epsilon,
        quantizer.force_pow_2_scales,
    )
    tensor = Float8BlockwiseQTensorStorage(
        written.rows,
        written.rows_scale_inv,
        written.columns,
        written.columns_scale_inv,
        quantizer.dtype,
        quantizer,
        False,
        fake_dtype=torch.bfloat16,
    )
    return tensor, written


def _bytes(wanted: bool, height: int, width: int, device: torch.device) -> Tensor | None:
    return torch.empty(height, width, dtype=torch.uint8, device=device) if wanted else None
