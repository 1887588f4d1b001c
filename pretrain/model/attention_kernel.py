"""Triton kernels for causal attention in packed documents, fast for short documents.

Each program computes a block of neighbouring tokens of one head. A block may begin inside a
document. FlashAttention gives each document its own blocks, and most of a block is empty if the
document is shorter than the block. Here only the first and the last block of a document have tokens
of other documents, and a mask hides their scores. A value of another document that is not finite
can still reach the document, because 0 * NaN is NaN. The sum of the losses would be NaN anyway.

The algorithm is FlashAttention-2's (Dao, 2023). Forward keeps the logarithm of each softmax sum.
Backward recomputes the probabilities, in one kernel for the gradient of queries and in another one
for the gradients of keys and values. So no gradient is summed in memory, and the results are the
same bit for bit in every run.

Queries q and outputs are [T, H, D], and keys k and values v are [T, KV, D], for T tokens, H query
heads, KV key heads and D values in a head. The last dimension must be contiguous. D is 16, 32 or
64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# For each kernel: size of a program's block in tokens, number of tokens that the program loads in
# a step of its loop, number of warps, and number of steps whose loads overlap. These values were
# the fastest on an H100 for heads of 64 values.
FORWARD = {"size": 64, "step": 32, "num_warps": 4, "stages": 3}
QUERY_GRADIENT = {"size": 64, "step": 32, "num_warps": 4, "stages": 3}
KEY_VALUE_GRADIENT = {"size": 64, "step": 32, "num_warps": 4, "stages": 1}
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
# Score of a key that a query must not see. It is finite, so that the maximum of a row without any
# visible key is finite too.
_MASKED = tl.constexpr(-1e30)
_LAST_INT32 = tl.constexpr(2**31 - 1)


@triton.jit
def _load(states, head, token, end, token_stride, head_stride, dim: tl.constexpr):
    """Load the values [n, dim] of a head for n tokens. Values of tokens from `end` on are 0."""
    rows = (
        states + head * tl.cast(head_stride, tl.int64) + token[:, None].to(tl.int64) * token_stride
    )
    return tl.load(rows + tl.arange(0, dim)[None, :], mask=token[:, None] < end, other=0.0)


@triton.jit
def _store(states, values, head, token, tokens, heads: tl.constexpr, dim: tl.constexpr):
    """Store the values [n, dim] of a head for n tokens in `states` [tokens, heads, dim]."""
    rows = states + (token[:, None].to(tl.int64) * heads + head) * dim
    # A store rounds to the dtype of the memory.
    tl.store(rows + tl.arange(0, dim)[None, :], values, mask=token[:, None] < tokens)


@triton.jit
def _load_row(rows, head, token, end, tokens):
    """Load one value of each token from `rows` [heads, tokens]. Values from `end` on are 0."""
    row = rows + tl.cast(head, tl.int64) * tokens
    return tl.load(row + token, mask=token < end, other=0.0)


@triton.jit
def _store_row(rows, values, head, token, tokens):
    """Store one value of each token in `rows` [heads, tokens]."""
    row = rows + tl.cast(head, tl.int64) * tokens
    tl.store(row + token, values, mask=token < tokens)


@triton.jit
def _masked_scores(rows, columns, query, key, start, scale):
    """Return the base-2 logarithms of unnormalized probabilities, _MASKED for masked keys.

    `rows` and `columns` are queries and keys, or keys and queries. `query`, `key` and `start` have
    the indices of queries, of keys and of the first tokens of the queries' documents.
    """
    scores = tl.dot(rows, tl.trans(columns)) * (scale * _LOG2_E)
    return tl.where((key >= start) & (key <= query), scores, _MASKED)


@triton.jit
def _differentiate_scores(scores, log2_sum, d_probabilities, dot):
    """Return the probabilities, and the gradient of q k^T * scale.

    `scores` is the result of `_masked_scores`, and `log2_sum` the base-2 logarithm of the softmax
    sum of each query. `dot` is the dot product of a query's output and the output's gradient.
    """
    probabilities = tl.exp2(scores - log2_sum)
    return probabilities, probabilities * (d_probabilities - dot)


@triton.jit
def _attend(
    q,
    k,
    v,
    starts,  # int32 [tokens]: first token of each token's document
    output,  # contiguous, written
    log_sums,  # FP32 [heads, tokens], written: logarithms of the softmax sums
    # The next six are strides between tokens and between heads.
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    scale,
    tokens,
    heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    size: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
):
    """Compute the output of `size` queries of one head. `group` query heads share a key head."""
    first = tl.program_id(0) * size
    head = tl.program_id(1)
    query = first + tl.arange(0, size)
    start = tl.load(starts + query, mask=query < tokens, other=0)[:, None]
    kv_head = head // group
    queries = _load(q, head, query, tokens, q_token, q_head, dim)
    maximum = tl.full([size], _MASKED, tl.float32)
    total = tl.zeros([size], tl.float32)
    accumulator = tl.zeros([size, dim], tl.float32)
    end = tl.minimum(first + size, tokens)
    for first_key in tl.range(tl.load(starts + first), end, step, num_stages=stages):
        key = first_key + tl.arange(0, step)
        keys = _load(k, kv_head, key, end, k_token, k_head, dim)
        scores = _masked_scores(queries, keys, query[:, None], key[None, :], start, scale)
        # In a row without any visible key, all probabilities are 1. The next block with a visible
        # key multiplies them by 0.
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        probabilities = tl.exp2(scores - new_maximum[:, None])
        correction = tl.exp2(maximum - new_maximum)
        total = total * correction + tl.sum(probabilities, axis=1)
        values = _load(v, kv_head, key, end, v_token, v_head, dim)
        accumulator = accumulator * correction[:, None]
        accumulator = tl.dot(probabilities.to(values.dtype), values, accumulator)
        maximum = new_maximum
    _store(output, accumulator / total[:, None], head, query, tokens, heads, dim)
    _store_row(log_sums, (maximum + tl.log2(total)) * _LN_2, head, query, tokens)


@triton.jit
def _differentiate_queries(
    d_output,  # contiguous
    q,
    k,
    v,
    output,  # contiguous
    log_sums,  # FP32 [heads, tokens]
    starts,  # int32 [tokens]: first token of each token's document
    dq,  # contiguous, written
    dots,  # FP32 [heads, tokens], written: dot products of `output` and `d_output`
    # The next six are strides between tokens and between heads.
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    scale,
    tokens,
    heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    size: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
):
    """Compute the gradient of `size` queries of one head."""
    first = tl.program_id(0) * size
    head = tl.program_id(1)
    query = first + tl.arange(0, size)
    start = tl.load(starts + query, mask=query < tokens, other=0)[:, None]
    kv_head = head // group
    queries = _load(q, head, query, tokens, q_token, q_head, dim)
    d_outputs = _load(d_output, head, query, tokens, heads * dim, dim, dim)
    outputs = _load(output, head, query, tokens, heads * dim, dim, dim)
    dot = tl.sum(outputs.to(tl.float32) * d_outputs.to(tl.float32), axis=1)
    _store_row(dots, dot, head, query, tokens)
    log2_sum = _load_row(log_sums, head, query, tokens, tokens) * _LOG2_E
    gradient = tl.zeros([size, dim], tl.float32)
    end = tl.minimum(first + size, tokens)
    for first_key in tl.range(tl.load(starts + first), end, step, num_stages=stages):
        key = first_key + tl.arange(0, step)
        keys = _load(k, kv_head, key, end, k_token, k_head, dim)
        scores = _masked_scores(queries, keys, query[:, None], key[None, :], start, scale)
        values = _load(v, kv_head, key, end, v_token, v_head, dim)
        _, d_scores = _differentiate_scores(
            scores, log2_sum[:, None], tl.dot(d_outputs, tl.trans(values)), dot[:, None]
        )
        gradient = tl.dot(d_scores.to(keys.dtype), keys, gradient)
    _store(dq, gradient * scale, head, query, tokens, heads, dim)


@triton.jit
def _differentiate_keys_and_values(
    d_output,  # contiguous
    q,
    k,
    v,
    log_sums,  # FP32 [heads, tokens]
    dots,  # written by `_differentiate_queries`
    starts,  # int32 [tokens]: first token of each token's document
    ends,  # int32 [tokens]: end of each token's document
    dk,  # contiguous, written
    dv,  # contiguous, written
    # The next six are strides between tokens and between heads.
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    scale,
    tokens,
    heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    size: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
):
    """Compute the gradients of `size` keys and values of one KV head.

    Matrices of scores have a row for each key and a column for each query.
    """
    first = tl.program_id(0) * size
    kv_head = tl.program_id(1)
    key = first + tl.arange(0, size)
    keys = _load(k, kv_head, key, tokens, k_token, k_head, dim)
    values = _load(v, kv_head, key, tokens, v_token, v_head, dim)
    d_keys = tl.zeros([size, dim], tl.float32)
    d_values = tl.zeros([size, dim], tl.float32)
    # Queries after the document of the last key see none of the keys.
    end = tl.load(ends + tl.minimum(first + size, tokens) - 1)
    for member in range(group):
        head = kv_head * group + member
        for first_query in tl.range(first, end, step, num_stages=stages):
            query = first_query + tl.arange(0, step)
            start = tl.load(starts + query, mask=query < end, other=_LAST_INT32)[None, :]
            queries = _load(q, head, query, end, q_token, q_head, dim)
            d_outputs = _load(d_output, head, query, end, heads * dim, dim, dim)
            log2_sum = _load_row(log_sums, head, query, end, tokens) * _LOG2_E
            dot = _load_row(dots, head, query, end, tokens)
            scores = _masked_scores(keys, queries, query[None, :], key[:, None], start, scale)
            probabilities, d_scores = _differentiate_scores(
                scores, log2_sum[None, :], tl.dot(values, tl.trans(d_outputs)), dot[None, :]
            )
            d_values = tl.dot(probabilities.to(d_outputs.dtype), d_outputs, d_values)
            d_keys = tl.dot(d_scores.to(queries.dtype), queries, d_keys)
    _store(dk, d_keys * scale, kv_head, key, tokens, heads // group, dim)
    _store(dv, d_values, kv_head, key, tokens, heads // group, dim)


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output [T, H, D], and the logarithms of the softmax sums, FP32 [H, T].

    Args:
        q: Queries, BF16 or FP16.
        k: Keys.
        v: Values.
        bounds: First token and end of each token's document, int32 [2, T].
        scale: Factor of q k^T.
    """
    tokens, heads, _ = q.shape
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    log_sums = q.new_empty(heads, tokens, dtype=torch.float32)
    grid = (triton.cdiv(tokens, FORWARD["size"]), heads)
    _attend[grid](
        starts=bounds[0], output=output, log_sums=log_sums, **_arguments(q, k, v, scale), **FORWARD
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
    tokens, heads, _ = q.shape
    d_output = d_output.contiguous()
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    dots = torch.empty_like(log_sums)
    starts, ends = bounds
    arguments = _arguments(q, k, v, scale)
    _differentiate_queries[(triton.cdiv(tokens, QUERY_GRADIENT["size"]), heads)](
        d_output=d_output,
        output=output,
        log_sums=log_sums,
        starts=starts,
        dq=dq,
        dots=dots,
        **arguments,
        **QUERY_GRADIENT,
    )
    _differentiate_keys_and_values[(triton.cdiv(tokens, KEY_VALUE_GRADIENT["size"]), k.shape[1])](
        d_output=d_output,
        log_sums=log_sums,
        dots=dots,
        starts=starts,
        ends=ends,
        dk=dk,
        dv=dv,
        **arguments,
        **KEY_VALUE_GRADIENT,
    )
    return dq, dk, dv


def _arguments(q: Tensor, k: Tensor, v: Tensor, scale: float) -> dict[str, Any]:
    """Return the arguments that all three kernels have."""
    tokens, heads, dim = q.shape
    arguments = {"q": q, "k": k, "v": v, "scale": scale, "tokens": tokens, "heads": heads}
    for name, states in (("q", q), ("k", k), ("v", v)):
        arguments[f"{name}_token"], arguments[f"{name}_head"], _ = states.stride()
    return {**arguments, "group": heads // k.shape[1], "dim": dim}
