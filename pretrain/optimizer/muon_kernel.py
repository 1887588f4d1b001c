"""Newton-Schulz steps of Muon on a GPU, with symmetric products as a Triton kernel."""

# Kernel arguments without annotations are allowed in this file, because Triton reads annotations
# and accepts its own types only.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _symmetric_product(
    a,  # FP16 [matrices, depth, size]
    b,  # FP16 [matrices, depth, size], with the strides of `a`
    product,  # FP16 [matrices, size, size], written
    size,
    depth,
    stride_inner,  # stride of `a` and `b` along depth
    stride,  # stride of `a` and `b` along size
    # The next three are factors of the identity, of `a`, and of aᵀ b.
    identity,
    linear,
    quadratic,
    # Sizes of a tile of the product and of its operands. An H200 computes with 580 TFLOP/s by
    # these sizes, 3 stages and 8 warps, and with at most 540 by others.
    rows: tl.constexpr = 128,
    columns: tl.constexpr = 256,
    block: tl.constexpr = 64,
):
    """Write one tile of the product and its mirror image, unless the tile is above the diagonal.

    The product is divided into square blocks, and a block into tiles with all of its columns. The
    tiles of a block on the diagonal have no mirror images.
    """
    block_row = tl.program_id(0) * rows // columns
    block_column = tl.program_id(1)
    if block_row >= block_column:
        row = tl.program_id(0) * rows + tl.arange(0, rows)
        column = block_column * columns + tl.arange(0, columns)
        # Number of rows of the earlier matrices in `product`.
        first = tl.program_id(2).to(tl.int64) * size
        inner = first * depth + tl.arange(0, block)[:, None] * stride_inner
        a_at = a + inner + row * stride
        b_at = b + inner + column * stride
        total = tl.zeros((rows, columns), tl.float32)
        for _ in range(0, depth, block):
            total = tl.dot(tl.load(a_at).T, tl.load(b_at), total)
            a_at += block * stride_inner
            b_at += block * stride_inner
        total *= quadratic
        index = first * size + row[:, None] * size + column
        if identity != 0:
            total += linear * tl.load(a + index)
            total += tl.where(row[:, None] == column, identity, 0.0)
        result = total.to(tl.float16)
        tl.store(product + index, result)
        if block_row > block_column:
            mirrored = first * size + column[:, None] * size + row
            tl.store(product + mirrored, result.T)


def symmetric_product(
    a: Tensor, b: Tensor, factors: tuple[float, float, float] = (0.0, 0.0, 1.0)
) -> Tensor:
    """Return `identity` I + `linear` a + `quadratic` aᵀ b, which must be symmetric, in FP16.

    Args:
        a, b: FP16 [matrices, depth, size] with equal strides. `depth` is a multiple of 64, and
            `size` is a multiple of 256, because the kernel has no partial tiles. One matrix
            follows another in memory. If `identity` is not 0, the matrices are contiguous and
            square, because the kernel then reads `a` like the product.
        factors: identity, linear and quadratic.
    """
    matrices, depth, size = a.shape
    product = a.new_empty(matrices, size, size)
    _symmetric_product[size // 128, size // 256, matrices](
        a, b, product, size, depth, *a.stride()[1:], *factors, num_warps=8, num_stages=3
    )
    return product


def newton_schulz(x: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """Return the result of five Newton-Schulz steps, FP16 [matrices, depth, size] like `x`.

    A step multiplies x by F = a I + b G + c G², for G = xᵀ x. After the step, G is F G F. So two
    steps multiply x once, by both factors. In FP16, this is more accurate than single steps in
    BF16.
    """
    for steps in (2, 2, 1):
        gram = symmetric_product(x, x)
        factor = symmetric_product(gram, gram, coefficients)
        if steps == 2:
            gram = symmetric_product(symmetric_product(gram, factor), factor)
            factor = symmetric_product(factor, symmetric_product(gram, gram, coefficients))
        x = torch.bmm(x, factor, out=torch.empty_like(x))
    return x
