"""Triton kernels for causal attention in packed documents, fast for short documents.

Each program computes a tile of neighbouring tokens of one head. A tile may begin inside a document.
FlashAttention gives each document its own tiles, and most of a tile is empty if the document is
shorter than the tile. Here only the first and the last tile of a document have tokens of other
documents, and a mask hides their scores. A value of another document that is not finite can still
reach the document, because 0 * NaN is NaN. The sum of the losses would be NaN anyway.

The algorithm is FlashAttention-2's (Dao, 2023). Forward keeps the logarithm of each softmax sum.
Backward recomputes the probabilities, in one kernel for the gradient of queries and in another one
for the gradients of keys and values. So no gradient is summed in memory, and the results are the
same bit for bit in every run.

The kernels load tiles through tensor descriptors. On Hopper and newer GPUs, the copy engine then
loads a tile while the program computes, and the program needs no registers for addresses.

Queries q and outputs are [T, H, D], and keys k and values v are [T, KV, D], for T tokens, H query
heads, KV key heads and D values in a head. The last dimension must be contiguous, and all other
strides multiples of 16 bytes. D is 64 or 128.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Number of rows of a program's tile. A row is a token of a query head, or of a KV head.
SIZE = 64
# For each kernel and head size: number of rows that a program loads in a step of its loop, and
# number of steps whose loads overlap. These values were the fastest on an H200 for documents of 180
# tokens (benchmarks/results/kernels/h200_triton_attention.json). A step of FORWARD must not have as
# many rows as a head has values. If a tile then has two heads, ptxas 12.8 of Triton 3.6 keeps the
# queries and the probabilities in the same registers, and later steps are wrong (13.4 does not).
FORWARD = {64: {"step": 32, "stages": 3}, 128: {"step": 32, "stages": 3}}
QUERY_GRADIENT = {64: {"step": 32, "stages": 3}, 128: {"step": 64, "stages": 3}}
KEY_VALUE_GRADIENT = {64: {"step": 32, "stages": 3}, 128: {"step": 64, "stages": 2}}
_SIZE = tl.constexpr(SIZE)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
# Score of a key that a query must not see. It is finite, so that the maximum of a row without any
# visible key is finite too. It is a power of two, so that its products are exact.
_MASKED = tl.constexpr(-(2.0**100))


@triton.jit
def _load(tiles, head, token, rows: tl.constexpr, dim: tl.constexpr):
    """Return a tile of `tiles` as [rows, dim].

    The tile begins with the head `head` and the token `token`. All tokens of a head precede those
    of the next head. Values of tokens that do not exist are 0.
    """
    return tl.reshape(tiles.load([head, token, 0]), [rows, dim])


@triton.jit
def _store(states, values, head, token, tokens, heads: tl.constexpr, dim: tl.constexpr):
    """Store the values [n, dim] of n heads and tokens in `states` [tokens, heads, dim]."""
    rows = states + (token.to(tl.int64) * heads + head)[:, None] * dim
    # A store rounds to the dtype of the memory.
    tl.store(rows + tl.arange(0, dim)[None, :], values, mask=token[:, None] < tokens)


@triton.jit
def _load_row(tiles, head, token, rows: tl.constexpr):
    """Load one value for each row of a tile as [1, rows]."""
    return tl.reshape(tiles.load([head, token]), [1, rows])


@triton.jit
def _queries_of(starts, first_head, first, tokens, pack: tl.constexpr):
    """Return the head, the token, and the first token of the document of each row of a tile."""
    row = tl.arange(0, _SIZE)
    query = first + row % (_SIZE // pack)
    start = tl.load(starts + query, mask=query < tokens, other=0)
    return first_head + row // (_SIZE // pack), query, start


@triton.jit
def _is_visible(distance, count):
    """Return True where 0 <= distance < count.

    One comparison suffices, because a negative distance is a large unsigned number.
    """
    return distance.to(tl.uint32, bitcast=True) < count.to(tl.uint32, bitcast=True)


@triton.jit
def _visible_keys(first_key, step: tl.constexpr, query, start):
    """Return True [queries, step] where a query sees a key."""
    position = (first_key - start)[:, None] + tl.arange(0, step)[None, :]
    return _is_visible(position, (query - start + 1)[:, None])


@triton.jit
def _exponentiate(scores, maximum, factor):
    """Return the new maxima of rows, the probabilities before normalization, and corrections.

    `maximum` has the maxima of earlier blocks of keys, and `factor` is the scale of q k^T times
    log2(e). A probability is exp(scale * (score - new maximum)). Sums over earlier blocks must be
    multiplied by the corrections, because they were computed with the earlier maxima. In a row
    without any visible key, all probabilities are 1. The correction of the next block with a
    visible key is 0.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    shift = new_maximum * factor
    probabilities = tl.exp2(scores * factor - shift[:, None])
    return new_maximum, probabilities, tl.exp2(maximum * factor - shift)


@triton.jit
def _differentiate_scores(scores, visible, log2_sum, d_probabilities, dot, factor):
    """Return the probabilities, and the gradient of q k^T * scale.

    `scores` is q k^T, and `log2_sum` the base-2 logarithm of the softmax sum of each query. `dot`
    is the dot product of a query's output and the output's gradient. `factor` is the scale of q k^T
    times log2(e).
    """
    probabilities = tl.where(visible, tl.exp2(scores * factor - log2_sum), 0.0)
    return probabilities, probabilities * (d_probabilities - dot)


@triton.jit
def _attend(
    q,  # descriptors of tiles
    k,
    v,
    starts,  # int32 [tokens]: first token of each token's document
    output,  # contiguous, written
    log_sums,  # FP32 [heads, tokens], written: logarithms of the softmax sums
    scale,
    tokens,
    heads: tl.constexpr,
    group: tl.constexpr,
    pack: tl.constexpr,
    dim: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
):
    """Compute the output of a tile of queries of `pack` heads.

    `group` query heads share a KV head.
    """
    first_head = tl.program_id(0) * pack
    first = tl.program_id(1) * (_SIZE // pack)
    head, query, start = _queries_of(starts, first_head, first, tokens, pack)
    queries = _load(q, first_head, first, _SIZE, dim)
    maximum = tl.full([_SIZE], _MASKED, tl.float32)
    total = tl.zeros([_SIZE], tl.float32)
    accumulator = tl.zeros([_SIZE, dim], tl.float32)
    # The queries of the tile see no key before the document of the first query.
    end = tl.minimum(first + _SIZE // pack, tokens)
    for first_key in tl.range(tl.load(starts + first), end, step, num_stages=stages):
        keys = _load(k, first_head // group, first_key, step, dim)
        scores = tl.dot(queries, tl.trans(keys))
        scores = tl.where(_visible_keys(first_key, step, query, start), scores, _MASKED)
        maximum, probabilities, correction = _exponentiate(scores, maximum, scale * _LOG2_E)
        total = total * correction + tl.sum(probabilities, axis=1)
        values = _load(v, first_head // group, first_key, step, dim)
        accumulator = accumulator * correction[:, None]
        accumulator = tl.dot(probabilities.to(values.dtype), values, accumulator)
    _store(output, accumulator / total[:, None], head, query, tokens, heads, dim)
    place = tl.cast(head, tl.int64) * tokens + query
    tl.store(log_sums + place, maximum * scale + tl.log2(total) * _LN_2, mask=query < tokens)


@triton.jit
def _differentiate_queries(
    q,  # descriptors of tiles
    k,
    v,
    output,
    d_output,
    starts,  # int32 [tokens]: first token of each token's document
    log_sums,  # FP32 [heads, tokens]
    dq,  # contiguous, written
    log2_sums,  # FP32 [heads, row_length], written: base-2 logarithms of the softmax sums
    dots,  # FP32 [heads, row_length], written: dot products of `output` and `d_output`
    row_length,
    scale,
    tokens,
    heads: tl.constexpr,
    group: tl.constexpr,
    pack: tl.constexpr,
    dim: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
):
    """Compute the gradient of a tile of queries of `pack` heads."""
    first_head = tl.program_id(0) * pack
    first = tl.program_id(1) * (_SIZE // pack)
    head, query, start = _queries_of(starts, first_head, first, tokens, pack)
    place = tl.cast(head, tl.int64) * tokens + query
    log2_sum = tl.load(log_sums + place, mask=query < tokens, other=0.0) * _LOG2_E
    queries = _load(q, first_head, first, _SIZE, dim)
    d_outputs = _load(d_output, first_head, first, _SIZE, dim)
    outputs = _load(output, first_head, first, _SIZE, dim)
    dot = tl.sum(outputs.to(tl.float32) * d_outputs.to(tl.float32), axis=1)
    place = tl.cast(head, tl.int64) * row_length + query
    tl.store(log2_sums + place, log2_sum, mask=query < tokens)
    tl.store(dots + place, dot, mask=query < tokens)
    gradient = tl.zeros([_SIZE, dim], tl.float32)
    end = tl.minimum(first + _SIZE // pack, tokens)
    for first_key in tl.range(tl.load(starts + first), end, step, num_stages=stages):
        keys = _load(k, first_head // group, first_key, step, dim)
        values = _load(v, first_head // group, first_key, step, dim)
        _, d_scores = _differentiate_scores(
            tl.dot(queries, tl.trans(keys)),
            _visible_keys(first_key, step, query, start),
            log2_sum[:, None],
            tl.dot(d_outputs, tl.trans(values)),
            dot[:, None],
            scale * _LOG2_E,
        )
        gradient = tl.dot(d_scores.to(keys.dtype), keys, gradient)
    _store(dq, gradient * scale, head, query, tokens, heads, dim)


@triton.jit
def _differentiate_keys_and_values(
    q,  # descriptors of tiles
    k,
    v,
    d_output,
    log2_sums,  # descriptors of what `_differentiate_queries` has written
    dots,
    ends,  # int32 [tokens]: end of each token's document
    dk,  # contiguous, written
    dv,  # contiguous, written
    scale,
    tokens,
    heads: tl.constexpr,
    group: tl.constexpr,
    pack: tl.constexpr,
    dim: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
):
    """Compute the gradients of a tile of keys and values of one KV head.

    Matrices of scores have a row for each key, and a column for each query of `pack` heads.
    """
    kv_head = tl.program_id(0)
    first = tl.program_id(1) * _SIZE
    key = first + tl.arange(0, _SIZE)
    keys = _load(k, kv_head, first, _SIZE, dim)
    values = _load(v, kv_head, first, _SIZE, dim)
    d_keys = tl.zeros([_SIZE, dim], tl.float32)
    d_values = tl.zeros([_SIZE, dim], tl.float32)
    # A key is visible to the queries from its own to the last one of its document.
    visible_to = tl.maximum(tl.load(ends + key, mask=key < tokens, other=0) - key, 0)
    column = tl.arange(0, step) % (step // pack)
    # Queries after the document of the last key see none of the keys.
    end = tl.load(ends + tl.minimum(first + _SIZE, tokens) - 1)
    for member in range(0, group, pack):
        head = kv_head * group + member
        for first_query in tl.range(first, end, step // pack, num_stages=stages):
            queries = _load(q, head, first_query, step, dim)
            d_outputs = _load(d_output, head, first_query, step, dim)
            distance = (first_query - key)[:, None] + column[None, :]
            probabilities, d_scores = _differentiate_scores(
                tl.dot(keys, tl.trans(queries)),
                _is_visible(distance, visible_to[:, None]),
                _load_row(log2_sums, head, first_query, step),
                tl.dot(values, tl.trans(d_outputs)),
                _load_row(dots, head, first_query, step),
                scale * _LOG2_E,
            )
            d_values = tl.dot(probabilities.to(d_outputs.dtype), d_outputs, d_values)
            d_keys = tl.dot(d_scores.to(queries.dtype), queries, d_keys)
    _store(dk, d_keys * scale, kv_head, key, tokens, heads // group, dim)
    _store(dv, d_values, kv_head, key, tokens, heads // group, dim)


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output [T, H, D], and the logarithms of the softmax sums, FP32 [H, T].

    Args:
        q: Queries [T, H, D], BF16 or FP16.
        k: Keys [T, KV, D].
        v: Values [T, KV, D].
        bounds: First token and end of each token's document, int32 [2, T].
        scale: Factor of q k^T, above 0.
    """
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    log_sums = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    arguments = _arguments(FORWARD, q, k, scale)
    step = arguments["step"]
    _attend[_grid(q, arguments["pack"])](
        q=_tiles(q, SIZE, arguments["pack"]),
        k=_tiles(k, step),
        v=_tiles(v, step),
        starts=bounds[0],
        output=output,
        log_sums=log_sums,
        **arguments,
    )
    return output, log_sums


def attend_backward(
    d_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    log_sums: Tensor,
    bounds: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients dq, dk and dv. All are contiguous.

    `d_output` is the gradient of the output. `output` and `log_sums` are the results of `attend`,
    and all other arguments are its arguments.
    """
    d_output = d_output.contiguous()
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    # Rows of a descriptor begin at a multiple of 16 bytes.
    row_length = triton.cdiv(len(q), 4) * 4
    log2_sums, dots = log_sums.new_empty(2, q.shape[1], row_length)
    # The kernel multiplies these values by 0. They must not be NaN.
    dots[:, len(q) :] = 0
    arguments = _arguments(QUERY_GRADIENT, q, k, scale)
    pack, step = arguments["pack"], arguments["step"]
    _differentiate_queries[_grid(q, pack)](
        q=_tiles(q, SIZE, pack),
        k=_tiles(k, step),
        v=_tiles(v, step),
        output=_tiles(output, SIZE, pack),
        d_output=_tiles(d_output, SIZE, pack),
        starts=bounds[0],
        log_sums=log_sums,
        dq=dq,
        log2_sums=log2_sums,
        dots=dots,
        row_length=row_length,
        **arguments,
    )
    arguments = _arguments(KEY_VALUE_GRADIENT, q, k, scale)
    step = arguments["step"]
    _differentiate_keys_and_values[_grid(k, 1)](
        q=_tiles(q, step, pack),
        k=_tiles(k, SIZE),
        v=_tiles(v, SIZE),
        d_output=_tiles(d_output, step, pack),
        log2_sums=TensorDescriptor.from_tensor(log2_sums, [pack, step // pack]),
        dots=TensorDescriptor.from_tensor(dots, [pack, step // pack]),
        ends=bounds[1],
        dk=dk,
        dv=dv,
        **arguments,
    )
    return dq, dk, dv


def _arguments(
    blocks: dict[int, dict[str, int]], q: Tensor, k: Tensor, scale: float
) -> dict[str, Any]:
    """Return the arguments of a kernel that are numbers. `blocks` has its blocks by head size."""
    tokens, heads, dim = q.shape
    group = heads // k.shape[1]
    return {
        "scale": scale,
        "tokens": tokens,
        "heads": heads,
        "group": group,
        # Number of query heads in a tile. They share the keys that the program loads.
        "pack": 1 if group % 2 else 2,
        "dim": dim,
        **blocks[dim],
    }


def _grid(states: Tensor, pack: int) -> tuple[int, int]:
    """Return the number of programs: one for each tile of `pack` heads of `states`.

    Programs of neighbouring heads run at the same time. Their values are neighbours in memory.
    """
    tokens, heads, _ = states.shape
    return heads // pack, triton.cdiv(tokens * pack, SIZE)


def _tiles(states: Tensor, rows: int, pack: int = 1) -> TensorDescriptor:
    """Return a descriptor of tiles of `states` [T, heads, D]: `rows` rows of `pack` heads."""
    tile = [pack, rows // pack, states.shape[2]]
    return TensorDescriptor.from_tensor(states.transpose(0, 1), tile)
