"""The random Hadamard transform that NVFP4 puts before quantizing the operands of the weight gradient.

An outlier is spread over its block of 16 and no longer sets the scale for 15 small neighbours. The transform is orthogonal, so
with both operands transformed their product is what it was, but for the rounding. "Random" is one vector of signs, drawn once and
fixed in Transformer Engine's source.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIZE = 16
# Transformer Engine's signs, bit i for value i of a block: + + + - + - - - - - - + - + - -
NEGATIVE = 0b1101_0111_1110_1000


def transform(x: Tensor) -> Tensor:
    """x [..., n] to the same shape and dtype, each block of 16 along the last dimension multiplied by `matrix`.

    BF16 is summed in FP32 and rounded once to BF16, as in Transformer Engine's reference and kernels. Devices differ in the order
    of adding: from a CPU to an H200 about one in 10^7 normally distributed values rounds the other way. Raises RuntimeError where
    n is no multiple of 16.
    """
    orthogonal = matrix(x.dtype, x.device)
    if x.dim() > 1 and x.stride(-1) != 1:  # as x.t() has it: multiplied from the left, x needs no copy in the other order
        return (orthogonal.t() @ x.mT.unflatten(-2, (-1, SIZE))).reshape(x.mT.shape).mT
    return (x.unflatten(-1, (-1, SIZE)) @ orthogonal).reshape(x.shape)


def matrix(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The transform's matrix [16, 16]: the signs on a diagonal, times Sylvester's Hadamard matrix, times 1/4; exact in any dtype.

    Entry (i, j) of Sylvester's is -1 where i and j share an odd number of bits. Computed on the device, since a constant written
    out here would be copied there at each call of a compiled function.
    """
    index = torch.arange(SIZE, device=device)
    odd = index[:, None] & index
    odd = odd ^ (odd >> 2)
    odd = odd ^ (odd >> 1) ^ (NEGATIVE >> index[:, None])
    return torch.where((odd & 1) == 1, -0.25, 0.25).to(dtype)
