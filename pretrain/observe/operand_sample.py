"""Sample whole blocks of an operand."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from pretrain.precision.formats.definition import Scaling

SAMPLED_VALUES = 2**15  # of an operand, at most, in whole blocks
PIECE = 128  # values that are sampled together if the whole tensor has one scale


def sample(
    matrix: Tensor, scales: Tensor | None, scaling: Scaling, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return some blocks of `matrix`.

    matrix: [rows, k] with the axis of the product's sum last, of any dtype and strides.
    scales: FP32 [rows or rows / block, k / block], or a scalar if the tensor has one scale.

    Returns the values of each block [n, values], its scale FP32 [n], and the row in which it begins
    int64 [n]. If `scales` is None or has another shape, scales are 0, which fits no value.
    """
    size = scaling.block or math.gcd(matrix.shape[1], PIECE)
    height = size if scaling.square else 1
    # [down, across, height, size]
    blocks = matrix.unflatten(1, (-1, size)).unflatten(0, (-1, height)).transpose(1, 2)
    down, across = blocks.shape[:2]
    most = max(SAMPLED_VALUES // (height * size), 1)
    if down * across > most:
        chosen = torch.randint(down * across, (most,), generator=generator, device=matrix.device)
    else:
        chosen = torch.arange(down * across, device=matrix.device)
    places = (chosen // across, chosen % across)
    if scales is not None and scales.dim() == 0 and scaling.block is None:
        scale = scales.float().expand(len(chosen))
    elif scales is not None and scales.shape == (down, across):
        scale = scales[places]
    else:
        scale = torch.zeros(len(chosen), device=matrix.device)
    return blocks[places].flatten(1), scale, places[0] * height


def generators(seed: int) -> Callable[[torch.device], torch.Generator]:
    """Return a function from a device to its generator.

    Numbers drawn from torch's own generators would change the run.
    """
    return functools.cache(lambda device: torch.Generator(device).manual_seed(seed))
