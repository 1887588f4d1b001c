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


@triton.jit
def gradient_of_head(
    dy,
    dy_token,
    part,
    from_head,
    cos,
    sin,
    qkv,
    weight,
    sum1,
    sum2,
    first,
    every,
    here,
    head,
    width: tl.constexpr,
    dim: tl.constexpr,
    parts: tl.constexpr,
    eps,
):
    """The gradients [height, dim / 2] of a head's halves at every so many tokens (`every`) from `first` on, FP32, not rounded;
    and the sums for its norm's weight with theirs added.

    `dy` points to the head, with `dy_token` values between tokens; `here` [height, dim / 2] says which values there are. `part`,
    `from_head`: as `stride` and `from_head` of `sum_of_parts`. `cos` is None for a head of values, `weight` without norms: then
    the sums stay as they are. `qkv` [tokens, width] is what was normed."""
    height: tl.constexpr = here.shape[0]
    half: tl.constexpr = dim // 2
    dx1, dx2 = sum_of_parts(dy + _offsets(first, every, dy_token, height, half), part, here, head, from_head, parts, half)
    if cos is not None:
        angle = _offsets(first, every, dim, height, half)
        c = tl.load(cos + angle, mask=here, other=0).to(tl.float32)
        s = tl.load(sin + angle, mask=here, other=0).to(tl.float32)
        dx1, dx2 = turned_back(dx1, dx2, c, s)
    if weight is not None:
        x = qkv + head * dim + _offsets(first, every, width, height, half)
        x1 = tl.load(x, mask=here, other=1).to(tl.float32)
        x2 = tl.load(x + half, mask=here, other=1).to(tl.float32)
        x1, x2, factor = normal(x1, x2, dim, eps)
        sum1, sum2 = tl.fma(dx1, x1, sum1), tl.fma(dx2, x2, sum2)
        # Loaded for every tile: registers for them, too, would leave a multiprocessor too few programs.
        weight_at = weight + tl.arange(0, half)[None, :]
        w1, w2 = tl.load(weight_at).to(tl.float32), tl.load(weight_at + half).to(tl.float32)
        dx1, dx2 = through_norm(dx1 * w1, dx2 * w2, x1, x2, factor, dim)
    return dx1, dx2, sum1, sum2


@triton.jit
def _offsets(first, every, stride, height: tl.constexpr, half: tl.constexpr):
    """Returns the offsets of the first halves [height, half] of each `every`-th token from `first` on; the second lie `half`
    further."""
    inside = every * tl.arange(0, height) * stride  # 32 bits do within a tile, which holds few tokens
    return tl.cast(first, tl.int64) * stride + (inside[:, None] + tl.arange(0, half)[None, :])
