"""Where a kernel that is tried writes a tensor in codes, and what reads it again. Imports Triton only when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CODES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}  # by the name of their grid
Read = Callable[[], tuple[Tensor, Tensor]]  # a written tensor again, by its rows and by its columns


def _bytes(*shape: int, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def in_tensors(dtype: torch.dtype, height: int, width: int, device: torch.device) -> tuple[Any, Read]:
    """Allocates the place of a tensor in codes under one scale; returns it and what reads the tensor from its rows and its
    columns."""
    from pretrain.precision.fp8_tile import TensorScaled

    amax, used, scale_inv = torch.zeros(1, device=device), torch.empty(1, device=device), torch.empty(1, device=device)
    rows, columns = _bytes(height, width, device=device), _bytes(width, height, device=device)
    written = TensorScaled(dtype, rows, columns, scale_inv, amax=amax, used=used)
    return written, lambda: (rows.view(dtype).float() * scale_inv, columns.view(dtype).float().t() * scale_inv)


def in_blocks(dtype: torch.dtype, height: int, width: int, device: torch.device) -> tuple[Any, Read]:
    """Does what `in_tensors` does with a scale for every 128 values."""
    from pretrain.precision.fp8_tile import BLOCK, BlockScaled

    block = BLOCK.value
    rows, columns = _bytes(height, width, device=device), _bytes(width, height, device=device)
    row_scales = torch.empty(width // block, height, device=device)
    column_scales = torch.empty(height // block, width, device=device)

    def read() -> tuple[Tensor, Tensor]:
        by_rows = rows.view(dtype).float() * row_scales.repeat_interleave(block, dim=0).t()
        return by_rows, columns.view(dtype).float().t() * column_scales.repeat_interleave(block, dim=0)

    return BlockScaled(dtype, rows, row_scales, columns, column_scales), read
