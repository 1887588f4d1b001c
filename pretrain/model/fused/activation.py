"""SwiGLU and its gradient in FP8 with one scale a tensor, quantized on the way, as Transformer Engine's tensors.

Transformer Engine writes the gradient in BF16, reads it again to quantize and transpose it, and transposes the activated values
in a kernel of its own. Here backward is one kernel, two for current scaling (pretrain.model.fused.activation_kernel).

What is quantized has been rounded to BF16 first, as in the unfused model and in the emulation. Current scaling's amax is from
before that rounding, there and here. Imported only where Transformer Engine is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.constants import TE_DType_To_Torch
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

from pretrain.model.fused import activation_kernel as kernel
from pretrain.model.fused.fp8_tile import TensorScaled


def takes(hidden: Tensor, quantizer: Any) -> bool:
    """Whether the kernels write what `quantizer` would: FP8 with one scale a tensor, in whole tiles."""
    current = isinstance(quantizer, Float8CurrentScalingQuantizer) and not quantizer.with_amax_reduction
    return (current or isinstance(quantizer, Float8Quantizer)) and kernel.divides(hidden)


def swiglu(hidden: Tensor, quantizer: Any) -> tuple[Float8TensorStorage, Tensor]:
    """hidden [T, 2 F] BF16, gate then up, each F wide -> silu(gate) * up [T, F] in codes, by rows alone; and their scale, FP32
    [1]. Backward makes the values again, with that scale."""
    shape = len(hidden), hidden.shape[1] // 2
    activated, written = _allocate(quantizer, shape, hidden.device, rows=True, columns=False)
    kernel.write_swiglu(hidden, written)
    return activated, written.used


def swiglu_backward(
    d_activated: Tensor, hidden: Tensor, gradient_quantizer: Any, activated_quantizer: Any, scale: Tensor
) -> tuple[Float8TensorStorage, Float8TensorStorage]:
    """The gradient of `hidden` [T, 2 F] in what the usages of `gradient_quantizer` say, and the activated values [T, F] as the
    next product's weight gradient takes them: columnwise, with forward's `scale`. `d_activated` [T, F] and `hidden` are BF16."""
    usages = {"rows": gradient_quantizer.rowwise_usage, "columns": gradient_quantizer.columnwise_usage}
    d_hidden, gradient = _allocate(gradient_quantizer, hidden.shape, hidden.device, **usages)
    activated, again = _allocate(activated_quantizer, d_activated.shape, hidden.device, rows=False, columns=True, scale=scale)
    kernel.write_swiglu_backward(d_activated.contiguous(), hidden, gradient, again)
    return d_hidden, activated


def _allocate(
    quantizer: Any, shape: tuple[int, ...], device: torch.device, *, rows: bool, columns: bool, scale: Tensor | None = None
) -> tuple[Float8TensorStorage, TensorScaled]:
    """What `quantizer` would make of a tensor [M, K], and its parts, for a kernel to write. With `scale` it is quantized by that,
    and no amax is recorded."""
    if is_non_tn_fp8_gemm_supported():  # from Blackwell on, products read both ways, and there are no transposes
        rows, columns = True, False
    tokens, width = shape
    numbers: dict[str, Any] = {"scale_inv": torch.empty(1, device=device)}
    if scale is not None:
        numbers |= {"scale": scale}
    elif isinstance(quantizer, Float8Quantizer):
        numbers |= {"scale": quantizer.scale, "amax": quantizer.amax, "used": torch.empty(1, device=device)}
    else:
        numbers |= {"amax": torch.zeros(1, device=device), "used": torch.empty(1, device=device)}
    by_rows, by_columns = (
        torch.empty(size, dtype=torch.uint8, device=device) if wanted else None
        for wanted, size in ((rows, (tokens, width)), (columns, (width, tokens)))
    )
    written = TensorScaled(TE_DType_To_Torch[quantizer.dtype], by_rows, by_columns, **numbers)
    tensor = Float8TensorStorage(
        data=by_rows,
        data_transpose=by_columns,
        fp8_scale_inv=written.scale_inv,
        fp8_dtype=quantizer.dtype,
        fake_dtype=torch.bfloat16,
        quantizer=quantizer,
    )
    return tensor, written
