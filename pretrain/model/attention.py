"""Packed attention: each token attends only to tokens of its own document.

A model that is built with `attn_implementation="packed_sdpa"`, or with another name that this
module registers, calls the function of this name in each layer. The attention registry of
transformers passes q, k, v and the keyword arguments of the model's forward to the function:

    hf.base_model(input_ids=..., position_ids=..., use_cache=False,
                  cu_seqlens=..., max_seqlen=..., documents=...)

* `cu_seqlens`: int32 [n] on the model's device. The first entry is 0, the ends of the documents
  follow, and all remaining entries are T, the number of tokens of the microbatch. n is rounded up
  to a multiple of 16, so that few different shapes occur.
* `max_seqlen`: int, the pack length, which no document exceeds. The pack length is a constant of
  the run, so kernels are compiled once.
* `documents`: result of `documents_for`. It is the description of the documents that the function
  needs, and it is computed once for a batch instead of once for each layer.

No mask functions are registered for these attention functions. The mask registry of transformers
does not contain their names, so the model builds no attention mask.

Some functions call the kernels of FlashAttention-4, of cuDNN and of Triton without autograd, and
operators of torch add autograd to them. In all of them, queries q and the output are [T, H, D], and
keys k and values v are [T, KV, D], for T tokens, H query heads, KV key heads and D values in a
head. Attention is causal in each document, and `scale` is the factor of q k^T.

`attention_backends.choose` returns the name of the fastest function that can run.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from foundation.errors import InputError
from foundation.files import CACHE
from pretrain.model.scores import Scores, flash_documents, flash_scores
from pretrain.precision import transformer_engine

# FlashAttention-4 reads these two environment variables when it is imported.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(CACHE / "flash_attn_4"))

# `flash_backward_in_parts` computes dk and dv in parts to save memory traffic. It does so only if
# the mean number of tokens of a document, times the number of query heads that share a KV head, is
# at most LONGEST_IN_PARTS. Above this limit, the matrix products of FlashAttention-4 take so long
# that memory traffic does not matter. Unused entries of cu_seqlens are counted as documents,
# because the host does not know which entries are unused. For example, 4 documents are counted as
# 15 documents, because cu_seqlens has at least 16 entries.
LONGEST_IN_PARTS = 8192
# The largest number of query heads per KV head for which `flash_backward_in_parts` computes dk and
# dv in parts. It calls the kernel once for each query head of a KV head, and more than four calls
# have not been measured.
MOST_PARTS = 4
# True if torch's kernel has the flag `enable_gqa`. torch 2.13 needs this flag if there are fewer KV
# heads than query heads. torch 2.11 has no such flag.
VARLEN_HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters


# ── The functions that transformers' layers call ──


class Packed(NamedTuple):
    """The documents of a batch, and the parameters of the attention of a layer."""

    cu_seqlens: Tensor
    max_seqlen: int
    documents: Tensor  # result of `documents_for`
    scale: float  # factor of q k^T
    # Maximum number of keys to which a query attends, including the key of the query's token. None
    # if a query attends to all earlier keys of its document.
    window: int | None
    # Cap and sinks of the scores. None if they are not changed.
    scores: Scores | None = None


Kernel = Callable[[Tensor, Tensor, Tensor, Packed], Tensor]


def documents_for(name: str, cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> Tensor:
    """Return the description of the documents that the attention function `name` needs.

    It is the result of `document_mask` for packed_sdpa, the result of `document_bounds` for
    packed_triton, and `cu_seqlens` for all others. `tokens` is the number of tokens of the batch.
    The host does not wait for the device.
    """
    if name == "packed_sdpa":
        return document_mask(cu_seqlens, max_seqlen, tokens)
    if name == "packed_triton":
        return document_bounds(cu_seqlens, tokens)
    return cu_seqlens


def document_mask(cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> Tensor:
    """Return the attention mask [packs, 1, max_seqlen, max_seqlen] bool.

    An entry is True if the query attends to the key: both are in the same document, and the key is
    not after the query. `tokens` is a multiple of `max_seqlen`.
    """
    document = _document_of_each_token(cu_seqlens, tokens).view(-1, 1, max_seqlen)
    return (document[..., :, None] == document[..., None, :]).tril_()


def document_bounds(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the first token and the end of each token's document, int32 [2, tokens].

    `tokens` is the last entry of `cu_seqlens`.
    """
    document = _document_of_each_token(cu_seqlens, tokens)
    return torch.stack([cu_seqlens[document], cu_seqlens[document + 1]])


def _document_of_each_token(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the index of the document of each token, int64 [tokens]."""
    position = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.bucketize(position, cu_seqlens[1:], right=True)


def _register(name: str, kernel: Kernel) -> None:
    """Register an attention function that calls `kernel` under `name`.

    `kernel` maps q, k and v [T, heads, D] to the output [T, heads, D]. The registered function gets
    q, k and v as [1, heads, T, D] from a layer of transformers and changes their layout. It casts
    queries and keys to the dtype of v, because queries and keys may be FP32 after a rotation with
    FP32 factors.
    """

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        documents: Tensor | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if cu_seqlens is None or max_seqlen is None or documents is None:
            raise InputError(
                f"model: {type(module).__name__} does not pass document boundaries to its "
                "attention; choose another model"
            )
        q, k, v = (t.squeeze(0).transpose(0, 1).to(value.dtype) for t in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        has_effect = sliding_window is not None and sliding_window < max_seqlen
        window = sliding_window if has_effect else None
        scores = Scores.of(softcap, s_aux)
        packed = Packed(cu_seqlens, max_seqlen, documents, scale, window, scores)
        return kernel(q, k, v, packed)[None], None

    AttentionInterface.register(name, attention)


def packed_sdpa(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Compute attention by torch's kernels, on any device and in any dtype.

    Each pack is a row of the batch, so mask and work grow with T x max_seqlen instead of T squared.
    KV heads are repeated for the query heads of their group. The flag `enable_gqa` would avoid the
    copies, but with a mask it saves only 5 % of the time on a CPU, and on CUDA it prevents fused
    kernels.
    """

    def by_pack(states: Tensor) -> Tensor:
        """Repeat the KV heads of `states` for the query heads, and split the tokens into packs.

        The argument is [T, KV heads, D]. The result is [packs, heads, max_seqlen, D].
        """
        repeated = _repeated(states, query.shape[1])
        return repeated.unflatten(0, (-1, packed.max_seqlen)).transpose(1, 2)

    mask = packed.documents  # the result of `document_mask`
    if packed.window is not None:
        mask = mask.triu(1 - packed.window)
    states = (by_pack(query), by_pack(key), by_pack(value))
    if packed.scores is None:
        output = F.scaled_dot_product_attention(*states, attn_mask=mask, scale=packed.scale)
    else:
        output = packed.scores.attend(*states, mask, packed.scale)
    return output.transpose(1, 2).flatten(0, 1)


# Not compiled, because a graph would be valid only for the document lengths of one microbatch.
@torch.compiler.disable
def packed_documents(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Compute attention by torch's CPU kernel, one document at a time.

    The work grows with the squares of the document lengths. With a mask, the kernel would compute
    complete packs instead. The kernel has neither a sliding window nor caps and sinks, so a layer
    with one of them is computed by `packed_sdpa` with a mask.
    """
    if packed.window is not None or packed.scores is not None:
        mask = document_mask(packed.cu_seqlens, packed.max_seqlen, len(query))
        return packed_sdpa(query, key, value, packed._replace(documents=mask))
    lengths = [end - begin for begin, end in pairwise(packed.cu_seqlens.tolist()) if end > begin]
    states = [_repeated(t, query.shape[1]).transpose(0, 1)[None] for t in (query, key, value)]
    outputs = []
    for q, k, v in zip(*(t.split_with_sizes(lengths, 2) for t in states), strict=True):
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=packed.scale)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def _repeated(states: Tensor, heads: int) -> Tensor:
    """Repeat the KV heads of `states` [T, KV heads, D]. The result is [T, heads, D]."""
    group = heads // states.shape[1]
    return states if group == 1 else states.repeat_interleave(group, dim=1)


def packed_varlen(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Compute attention by torch's kernel for variable lengths, in BF16 or FP16.

    The kernel does not compute scores of queries and keys from different documents.
    """
    # The number of keys before the query's token, where -1 stands for all earlier keys, and the
    # number of keys after this token, which is 0 because attention is causal.
    window = (-1 if packed.window is None else packed.window - 1, 0)
    documents = (packed.cu_seqlens, packed.cu_seqlens, packed.max_seqlen, packed.max_seqlen)
    options: dict[str, Any] = {"scale": packed.scale, "window_size": window}
    if VARLEN_HAS_GQA_FLAG:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    return cast(Tensor, varlen_attn(query, key, value, *documents, **options))


# ── FlashAttention-4 (package `flash-attn-4`) ──
#
# FlashAttention-4 compiles a kernel for each shape of heads. This takes about ten seconds, and the
# kernel works for any number of tokens and documents. The kernels are cached in the folder
# `$XDG_CACHE_HOME/pretrain/flash_attn_4`, or in the folder of FLASH_ATTENTION_CUTE_DSL_CACHE_DIR if
# this variable is set.
#
# In backward, the GPU computes blocks of keys in parallel, and each finished block adds its part to
# dQ. The order of these additions may differ from run to run, so the last bits of dQ may differ.
# All other results are reproducible bit for bit. `deterministic: true` fixes the order, and the
# backward kernel then takes 10 % longer.


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [T, H, D], and the logarithms of the softmax sums, FP32 [H, T].

    `max_seqlen` is the pack length. Backward needs the logarithms.
    """
    output, log_sums, *_ = flash_kernels()._flash_attn_fwd(
        q,
        k,
        v,
        softmax_scale=scale,
        causal=True,
        return_lse=True,
        **flash_documents(cu_seqlens, max_seqlen),
    )
    return output, log_sums


def flash_backward_in_parts(
    d_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    log_sums: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three contiguous gradients: dq [T, H, D], dk and dv.

    A group consists of the query heads that share a KV head. dk and dv are either [T, KV, D], or
    [T, KV, H / KV, D] with one part for each query head of a group. The caller must sum the parts.

    If one call of the kernel computes all heads of a group, the kernel adds the gradients of the
    heads to FP32 sums in memory. To avoid these sums, this function calls the kernel once for each
    query head of a group. The heads of one call share no KV head, so each gradient is written once.
    On an H200, this is faster with groups of two and short documents. With groups of four and
    documents of 4,096 tokens, a single call for all heads is faster.

    Args:
        d_output: Gradient of the output [T, H, D].
        q: The argument of `flash_forward`.
        k: The argument of `flash_forward`.
        v: The argument of `flash_forward`.
        output: First result of `flash_forward`.
        log_sums: Second result of `flash_forward`.
        cu_seqlens: The argument of `flash_forward`.
        max_seqlen: The argument of `flash_forward`.
        scale: The argument of `flash_forward`.
    """
    options = flash_documents(cu_seqlens, max_seqlen)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    backward = flash_kernels()._flash_attn_bwd
    is_causal = True
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    # The last condition limits `group` times the mean length of the documents.
    documents = len(cu_seqlens) - 1
    computes_parts = 1 < group <= MOST_PARTS and group * len(q) <= LONGEST_IN_PARTS * documents
    if not computes_parts:
        dq, dk, dv, *_ = backward(q, k, v, output, d_output, log_sums, scale, is_causal, **options)
        return dq, dk, dv
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (t.new_empty(len(t), kv_heads, group, t.shape[2]) for t in (k, v))
    for member in range(group):
        member_q, member_output, member_d_output, member_dq = (
            t[:, member::group] for t in (q, output, d_output, dq)
        )
        states = (member_q, k, v, member_output, member_d_output, log_sums[member::group])
        results = {"dq": member_dq, "dk": dk[:, :, member], "dv": dv[:, :, member]}
        backward(*states, scale, is_causal, **results, **options)
    return dq, dk, dv


@cache
def flash_kernels() -> ModuleType:
    """Import FlashAttention-4 and return its module with the kernels."""
    # Load Transformer Engine before FlashAttention-4. If Transformer Engine were loaded afterwards,
    # it would load parts of another cuDNN and fail.
    transformer_engine.unmet_need()
    with warnings.catch_warnings(action="ignore"):
        from flash_attn.cute import interface
    # While FlashAttention-4 compiles a kernel, its compiler warns of deprecated functions that
    # FlashAttention-4 calls, hundreds of times.
    warnings.filterwarnings("ignore", module=r"(cutlass|flash_attn\.cute)(\.|$)")
    return interface


# ── cuDNN's kernels, through Transformer Engine ──
#
# The functions have the arguments of the functions for FlashAttention-4. cuDNN rounds the number of
# documents up to a power of two, or to a multiple of 512, and plans once for each. Its backward
# adds to dQ in an order that may differ from run to run.


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the results of `flash_forward`."""
    kernels = _cudnn()
    backend = kernels.FusedAttnBackend["F16_arbitrary_seqlen"]
    inputs = (*_inputs(q, k, v, cu_seqlens, max_seqlen), q.dtype, backend)
    output, (log_sums, _) = kernels.fused_attn_fwd(True, *inputs, **_layout(cu_seqlens, scale))
    return output, log_sums.squeeze(2).t().contiguous()


def cudnn_backward(
    d_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    log_sums: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients dq [T, H, D], and dk and dv [T, KV, D].

    `flash_backward_in_parts` describes the arguments. cuDNN's log-sums are [T, H, 1].
    """
    kernels = _cudnn()
    backend = kernels.FusedAttnBackend["F16_arbitrary_seqlen"]
    # The state of a random number generator, which only dropout reads.
    unused = cu_seqlens.new_zeros(2, dtype=torch.int64)
    saved = [log_sums.t().unsqueeze(2).contiguous(), unused]
    inputs = (*_inputs(q, k, v, cu_seqlens, max_seqlen), output, d_output.contiguous(), q.dtype)
    layout = {"do_format": "thd", "dqkv_layout": "thd_thd_thd", **_layout(cu_seqlens, scale)}
    dq, dk, dv, *_ = kernels.fused_attn_bwd(*inputs, saved, backend, **layout)
    return dq, dk, dv


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> tuple[Any, ...]:
    """Return the positional arguments of cuDNN's kernels for queries and keys of documents."""
    return (
        max_seqlen,
        max_seqlen,
        cu_seqlens,
        cu_seqlens,
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
    )


def _cudnn() -> ModuleType:
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    return fused_attn


def _layout(cu_seqlens: Tensor, scale: float) -> dict[str, Any]:
    """Return the keyword arguments of cuDNN's kernels: causal attention, documents side by side."""
    return {
        "qkv_layout": "thd_thd_thd",  # tokens, heads, head dimension
        "o_format": "thd",
        "attn_mask_type": "padding_causal",
        "window_size": (-1, 0),
        "cu_seqlens_q_padded": cu_seqlens,
        "cu_seqlens_kv_padded": cu_seqlens,
        "attn_scale": scale,
        "cuda_graph": torch.cuda.is_current_stream_capturing(),
    }


# ── Our Triton kernels ──
#
# The functions have the arguments of the functions for FlashAttention-4, but `bounds` is the result
# of `document_bounds`. They import the kernels when they are called, because Triton runs on few
# platforms. The kernels do not need `max_seqlen`.


def triton_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, max_seqlen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the results of `flash_forward`."""
    from pretrain.model.attention_kernel import attend

    return attend(q, k, v, bounds, scale)


def triton_backward(
    d_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    log_sums: Tensor,
    bounds: Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `cudnn_backward`."""
    from pretrain.model.attention_kernel import attend_backward

    return attend_backward(d_output, q, k, v, output, log_sums, bounds, scale)


class AttentionKernels(NamedTuple):
    """Functions that compute attention and its gradients for a backend, without autograd.

    Attributes:
        forward: Map q, k, v, the result of `documents_for`, the pack length and the scale to the
            output and the log-sums, as `flash_forward`.
        backward: Map the gradient of the output, q, k, v, the output, the log-sums and the last
            three arguments of `forward` to dq, dk and dv, as `flash_backward_in_parts`.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


# Map the names of attention implementations to their kernels. Fused layers call these kernels in an
# autograd node of their own.
ATTENTION_KERNELS = {
    "packed_triton": AttentionKernels(triton_forward, triton_backward),
    "packed_fa4": AttentionKernels(flash_forward, flash_backward_in_parts),
    "packed_cudnn": AttentionKernels(cudnn_forward, cudnn_backward),
}


# ── Attention kernels as operators of torch ──
#
# torch.compile does not trace the code of an operator, so the compiled graph does not depend on the
# number of documents.

# The arguments of `AttentionKernels.forward` and `AttentionKernels.backward`.
_FORWARD = "(Tensor q, Tensor k, Tensor v, Tensor documents, int max_seqlen, float scale)"
_BACKWARD = (
    "(Tensor d_output, Tensor q, Tensor k, Tensor v, Tensor output, Tensor log_sums, "
    "Tensor documents, int max_seqlen, float scale)"
)


def _operator(name: str, kernels: AttentionKernels) -> Any:
    """Register `kernels` as operators of torch. Return the differentiable operator.

    If the backward returns parts of dk and dv, the parts are summed in FP32 and rounded once.
    """
    operator = torch.library.custom_op(
        f"pretrain::{name}",
        kernels.forward,
        mutates_args=(),
        schema=f"{_FORWARD} -> (Tensor, Tensor)",
    )

    def backward(*inputs: Any) -> tuple[Tensor, ...]:
        dq, *parts = kernels.backward(*inputs)
        return dq, *(part.sum(2) if part.dim() == 4 else part for part in parts)

    gradient = torch.library.custom_op(
        f"pretrain::{name}_backward",
        backward,
        mutates_args=(),
        schema=f"{_BACKWARD} -> (Tensor, Tensor, Tensor)",
    )

    @operator.register_fake
    def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)

    @gradient.register_fake
    def _(_: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(states.new_empty(states.shape) for states in inputs[:3])

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, documents, *ctx.numbers = inputs
        ctx.save_for_backward(q, k, v, *output, documents)
        ctx.set_materialize_grads(False)  # the log-sums have no gradient

    # The documents and the two numbers have no gradients.
    def differentiate(ctx: Any, d_output: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        return *gradient(d_output, *ctx.saved_tensors, *ctx.numbers), None, None, None

    operator.register_autograd(differentiate, setup_context=save)
    return operator


# The lambda reads the name `flash_kernels` at each call, because tests replace this function.
_FLASH_SCORES = flash_scores(lambda: flash_kernels())


def _full_attention(operator: Any, q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """Call `operator`, or another function for a layer with a sliding window, a cap or sinks.

    A layer with a cap or sinks is computed by FlashAttention-4, because `refusal_of` accepts no
    other backend of this function for such a model.
    """
    if packed.scores is not None:
        return _FLASH_SCORES(q, k, v, packed)
    if packed.window is not None:
        return packed_varlen(q, k, v, packed)
    return operator(q, k, v, packed.documents, packed.max_seqlen, packed.scale)[0]


_register("packed_sdpa", packed_sdpa)
_register("packed_documents", packed_documents)
_register("packed_varlen", packed_varlen)
for _name, _kernels in ATTENTION_KERNELS.items():
    _register(_name, partial(_full_attention, _operator(_name, _kernels)))
