"""Whether the operand that reached a product is what its format says: every value a code times its scale, every scale a fit one.

Blocks are sampled, so a check costs the same however large the operand is. Nothing here waits for the device: what is found is a
vector on it, which `describe` puts into words once somebody reads it.

Left alone are blocks that hold NaN or infinities, which are the health check's to judge, and blocks so small (a scale under
2^-100) that a code times its scale leaves the exponents that FP32 has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.precision.formats.definition import Scaling
from pretrain.precision.quantizers.grid import E4M3, Grid
from pretrain.precision.quantizers.rounding import FP32_MANTISSA_BITS, round_to_grid

SAMPLED_VALUES = 2**15  # of an operand, at most, in whole blocks
SLICE = 128  # values that are looked at together where the whole tensor has one scale
SMALLEST_SCALE = 2.0**-100
ROUNDING = 2.0**-20  # a code times an FP32 scale was rounded to FP32, and is divided by it again
LARGEST_CODE = 6  # the place of it in what `examine` returns
SMALLEST_NORMAL_E4M3 = 2.0**E4M3.min_exponent


class Sample(NamedTuple):
    """Some blocks of an operand: its values before the scale is divided out, [n, values]; `scale` FP32 [n] or []; the row and the
    column of the operand at which each begins, int64 [n]."""

    values: Tensor
    scale: Tensor
    row: Tensor
    column: Tensor


def sample(matrix: Tensor, scales: Tensor | None, scaling: Scaling, generator: torch.Generator) -> Sample:
    """Some blocks of `matrix` [rows, k], k the axis of the sum, of any dtype and strides.

    `scales` [rows or rows / block, k / block] FP32. Where the tensor has one scale, that of a block is 1; where blocks should
    have scales and there are none, or not as many, it is 0, which fits no value.
    """
    size = scaling.block or SLICE
    high = size if scaling.square else 1
    missing = (0, -matrix.shape[1] % size, 0, -matrix.shape[0] % high)
    matrix = F.pad(matrix, missing) if any(missing) else matrix
    blocks = matrix.unflatten(1, (-1, size)).unflatten(0, (-1, high)).transpose(1, 2)  # [down, across, high, size]
    down, across = blocks.shape[:2]
    most = max(SAMPLED_VALUES // (high * size), 1)
    if down * across > most:
        chosen = torch.randint(down * across, (most,), generator=generator, device=matrix.device)
    else:
        chosen = torch.arange(down * across, device=matrix.device)
    at, along = chosen // across, chosen % across
    values = blocks[at, along].flatten(1)
    if scaling.block is None:
        scale = torch.ones((), device=matrix.device)
    elif scales is None or scales.shape != (down, across):
        scale = torch.zeros(len(chosen), device=matrix.device)
    else:
        scale = scales[at, along]
    return Sample(values, scale, at * high, along * size)


def examine(blocks: Sample, grid: Grid, scaling: Scaling, largest: Tensor | None = None) -> Tensor:
    """What is wrong with `blocks`, an FP64 vector: how many there are, how many hold a value that is no code of `grid`, how many
    have a scale that is none of the format, how many one that is too large; of the first of them the row, the column, the largest
    code and the scale.

    `largest`: the largest code of the whole operand, where one scale serves all of it and the blocks are but a part.
    """
    values, scale = blocks.values.float(), blocks.scale
    each = scale.expand(len(values))
    codes = values / each[:, None] if scale.dim() else values
    rounded = round_to_grid(codes, grid)
    foreign = ((rounded - codes).abs() > ROUNDING * codes.abs()) & codes.isfinite()
    amax = codes.abs().amax(1)
    judged = each.isfinite() & (each.abs() >= SMALLEST_SCALE) & amax.isfinite()
    worthless = (each == 0) & (values != 0).any(1)  # a scale of zero, as NVFP4 has them, makes every value zero
    foreign = (foreign.any(1) & judged) | worthless

    unfit = ~_is_scale(each, scaling) & each.isfinite()
    if largest is not None:
        amax = largest.expand_as(amax)
        judged = judged & largest.isfinite()
    least = torch.full_like(amax, scaling.least * grid.maximum)
    if scaling.kind == "E4M3":  # a subnormal scale may be half of what was wanted, or a third too small
        least = torch.where(each < SMALLEST_NORMAL_E4M3, 0.75 * least, least)
    loose = judged & (amax > 0) & (amax < least)

    wrong = foreign | unfit | loose
    first = wrong.int().argmax()
    counts = [torch.full_like(amax[0], len(amax)), foreign.sum(), unfit.sum(), loose.sum()]
    where = [blocks.row[first], blocks.column[first], amax[first], each[first]]
    return torch.stack([figure.double() for figure in counts + where])


def _is_scale(scale: Tensor, scaling: Scaling) -> Tensor:
    if scaling.kind == "E4M3":
        return (scale >= 0) & (round_to_grid(scale, E4M3) == scale)
    if scaling.kind == "FP32":
        return scale > 0
    bits = scale.view(torch.int32)
    mantissa = bits & ((1 << FP32_MANTISSA_BITS) - 1)
    return (bits > 0) & ((mantissa == 0) | (bits == 1 << (FP32_MANTISSA_BITS - 1)))  # the last is 2^-127


def examine_tensor_scale(scales: Tensor) -> Tensor:
    """Examines, as `examine` does, the scale above NVFP4's: it brings the largest block scale to the top of E4M3."""
    largest = scales.amax().double()
    zero = torch.zeros_like(largest)
    loose = (largest > 0) & (largest < 0.85 * E4M3.maximum)
    return torch.stack([zero + 1, zero, zero, loose.double(), zero, zero, largest, zero + 1])


def describe(figures: Sequence[float], grid: Grid, scaling: Scaling) -> str | None:
    """What `examine` found, in words; None where nothing is wrong."""
    blocks, foreign, unfit, loose, row, column, amax, scale = figures
    found = []
    if foreign:
        found.append(f"{foreign:.0f} hold values that are no {grid.name} numbers times their scale")
    if unfit:
        found.append(f"{unfit:.0f} have a scale that is no {scaling.kind if scaling.kind != 'FP32' else 'positive number'}")
    if loose:
        found.append(f"{loose:.0f} have a scale too large for their values, whose largest code could be {grid.maximum:g}")
    if not found:
        return None
    block = f"at row {row:.0f}, column {column:.0f}, whose scale is {scale:.4g} and largest code {amax:.4g}"
    return f"of {blocks:.0f} blocks {' and '.join(found)}, the first {block}"
