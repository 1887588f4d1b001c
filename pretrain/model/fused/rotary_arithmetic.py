"""What the kernels of the rotation's gradient compute with a tile, whatever they write it as.

Every multiplication and addition is rounded as it is written here, so that all of them have the same bits: left to the compiler,
some lanes of a tile would fuse two operations and others not.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turned_back(dy1, dy2, c, s):
    """The gradient of both halves of heads before they were rotated."""
    return tl.fma(dy1, c, dy2 * s), tl.fma(dy2, c, -(dy1 * s))


@triton.jit
def normal(x1, x2, dim: tl.constexpr, eps):
    """Both halves of heads over their root mean square, and the factor [rows, 1] that made them so."""
    factor = tl.rsqrt(tl.fma(tl.sum(tl.fma(x1, x1, x2 * x2), axis=1), 1.0 / dim, eps))[:, None]
    return x1 * factor, x2 * factor, factor


@triton.jit
def through_norm(dn1, dn2, n1, n2, factor, dim: tl.constexpr):
    """The gradient of what `normal` was given, from that of what it returned."""
    along = (tl.sum(tl.fma(dn1, n1, dn2 * n2), axis=1) * (1.0 / dim))[:, None]
    return factor * tl.fma(-n1, along, dn1), factor * tl.fma(-n2, along, dn2)


@triton.jit
def sum_of_parts(at, stride, here, head, from_head, parts: tl.constexpr, half: tl.constexpr):
    """Both halves of heads at `at`, FP32, where the mask `here` says; from the head `from_head` on with the parts beside them,
    `stride` values apart. Masked and not branched: only so are a next tile's loads under way while this one is computed."""
    first = tl.load(at, mask=here, other=0).to(tl.float32)
    second = tl.load(at + half, mask=here, other=0).to(tl.float32)
    for part in tl.static_range(1, parts):
        more = at + part * tl.cast(stride, tl.int64)
        also = here & (tl.zeros(at.shape, tl.int32) + head >= from_head)
        first += tl.load(more, mask=also, other=0).to(tl.float32)
        second += tl.load(more + half, mask=also, other=0).to(tl.float32)
    return first, second
