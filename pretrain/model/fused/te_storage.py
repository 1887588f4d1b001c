"""Transformer Engine's FP8 tensors, made so that kernels of ours write their parts. Imported only where Transformer Engine is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.constants import TE_DType_To_Torch
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

from pretrain.precision.fp8_tile import BLOCK, BlockScaled, TensorScaled

Scaled = type[TensorScaled] | type[BlockScaled]


def scaling_of(quantizer: Any | None) -> Scaled | None:
    """How our kernels write what `quantizer` would; None where they do not."""
    if isinstance(quantizer, Float8Quantizer):
        return TensorScaled
    if isinstance(quantizer, Float8CurrentScalingQuantizer) and not quantizer.with_amax_reduction:
        return TensorScaled
    if isinstance(quantizer, Float8BlockQuantizer) and quantizer.block_scaling_dim == 1:
        return BlockScaled
    return None


def allocate(quantizer: Any, shape: tuple[int, ...], device: torch.device) -> tuple[Any, TensorScaled | BlockScaled]:
    """What a `quantizer` that `scaling_of` knows would make of a tensor [M, K], and its parts, for a kernel to write."""
    make = block_scaled if scaling_of(quantizer) is BlockScaled else tensor_scaled
    return make(quantizer, shape, device, rows=quantizer.rowwise_usage, columns=quantizer.columnwise_usage)


def tensor_scaled(
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


def block_scaled(
    quantizer: Any, shape: tuple[int, ...], device: torch.device, *, rows: bool, columns: bool
) -> tuple[Float8BlockwiseQTensorStorage, BlockScaled]:
    """A block-scaled FP8 tensor [M, K] and where its parts lie."""
    tokens, width = shape
    block = BLOCK.value
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
