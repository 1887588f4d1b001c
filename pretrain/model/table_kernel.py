"""The gradient of a table of tokens, added to its sum on a GPU. Imported only where Triton is.

Autograd's way writes a gradient of the whole table, zeros but for the microbatch's tokens, and adds that: with 151,936 words some
five times the bytes of what is read. Here tokens are sorted, and a program takes some neighbours of that order. Those of one word
are summed by a product with a matrix of zeros and ones, exact for BF16 with sums in FP32, and each sum is added where it belongs.
A value that is not finite makes NaN of its neighbours' sums too: a step whose gradient has one is not taken in any case.

A common word is some programs', which add in the order in which they finish: its last bits may differ from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pretrain.precision.fp8_tile import INTERPRETED

ROWS, COLUMNS, WARPS = 64, 128, 4


@triton.jit
def _add_rows(
    total,  # FP32 [vocabulary, width]
    gradient,  # BF16 [n, width]
    words,  # int32 [n], sorted
    order,  # int64 [n]: the row of `gradient` that each is of
    n,
    width,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    place = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    word = tl.load(words + place, mask=place < n, other=-1)
    row = tl.load(order + place, mask=place < n, other=0)
    here = (place < n)[:, None] & (column < width)[None, :]
    values = tl.load(gradient + row[:, None] * width + column[None, :], mask=here, other=0)
    if INTERPRETED:  # which multiplies the bits of BF16
        values = values.to(tl.float32)
    sums = tl.dot((word[:, None] == word[None, :]).to(values.dtype), values)
    before = tl.load(words + place - 1, mask=(place > 0) & (place < n), other=-1)
    first = (word != before) | (tl.arange(0, rows) == 0)  # of its word in this program
    tl.atomic_add(total + word.to(tl.int64)[:, None] * width + column[None, :], sums, mask=here & first[:, None], sem="relaxed")


def add_rows_(total: Tensor, gradient: Tensor, ids: Tensor) -> None:
    """Add the rows of `gradient` [n, width] BF16 to those of `total` [vocabulary, width] FP32, contiguous, that `ids` [n] say."""
    words, order = ids.int().sort()
    n, width = gradient.shape
    grid = triton.cdiv(n, ROWS), triton.cdiv(width, COLUMNS)
    arguments = (total, gradient.contiguous(), words, order, n, width, ROWS, COLUMNS)
    _add_rows[grid](*arguments, num_warps=WARPS, enable_fp_fusion=False)
