"""Packed attention: every token sees its own document only, whichever kernel computes it.

A model built with `attn_implementation=choose(...).name` calls one of the functions below in each layer, through transformers'
attention registry, with q, k, v and the keyword arguments that its own forward was given:

    hf.base_model(input_ids=..., position_ids=..., use_cache=False, cu_seqlens=..., max_seqlen=..., document_mask=...)

* `cu_seqlens`: [bucket] int32 on the model's device, 0, then the documents' ends, then T repeated up to the bucket's size.
* `max_seqlen`: int, always the pack length, which no document crosses: a constant, so that kernels are compiled once.
* `document_mask`: only packed_sdpa reads it; `document_mask()` makes it, once a batch and not once a layer.

No attention mask is registered beside them: for a name that transformers' mask registry does not know, the model builds none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import CustomOpDef
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from foundation.errors import InputError
from pretrain.model import gpu_attention
from pretrain.settings.recipe import Attention

# `fa4` is `flash_attn` to a user: for names with "flash" transformers loads kernels of its own. Version 2 is torch's `varlen`.
# On an H200, steps of Qwen3-1.7B are 1.5 % shorter with fa4 than with cudnn, which takes 0.71 of varlen's time
# (benchmarks/results/h200_attention_in_steps.json).
FASTEST_FIRST = ("fa4", "cudnn", "varlen", "documents", "sdpa")
MIN_MEASURED_HEAD_DIM = 64  # below, nobody has measured whether fa4 and cudnn are faster
MAX_FLASH_HEAD_DIM = 256
GENERATIONS = (9, 10)  # Hopper and data-centre Blackwell: fa4 and cudnn are written for these, and measured on the first
# torch 2.13 wants to be told that there are fewer KV heads than query heads, 2.11 takes them as they come and has no such flag.
VARLEN_HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters


# ── Which backend, for which models ─────────────────────────────────────────────────────────────────────────────────────────────


class Choice(NamedTuple):
    """An attention backend and why it was taken, for the audit."""

    name: str  # transformers' `attn_implementation`
    reason: str


def choose(requested: Attention, device_type: str, head_dim: int, dtype: torch.dtype) -> Choice:
    """The backend for a device, the size of the model's heads and the dtype that attention computes in.

    `auto` takes the first of FASTEST_FIRST that runs here; fa4 and cudnn from MIN_MEASURED_HEAD_DIM on. Raises InputError where
    the requested one does not. Whether a kernel computes what it should here is for parity to say.
    """
    auto = requested == "auto"
    passed_over = []
    for kind in FASTEST_FIRST if auto else ("fa4" if requested == "flash_attn" else requested,):
        obstacle = _obstacle(kind, device_type, head_dim, dtype)
        if auto and not obstacle and kind in ("fa4", "cudnn") and head_dim < MIN_MEASURED_HEAD_DIM:
            obstacle = f"is not measured with heads of {head_dim}"
        if not obstacle:
            return Choice(f"packed_{kind}", "; ".join(["fastest that runs here", *passed_over]) if auto else "requested")
        passed_over.append(f"{kind} {obstacle}")
    raise InputError(f"model.attention: {requested} cannot be used here: {'; '.join(passed_over)}; set model.attention: auto")


def _obstacle(kind: str, device_type: str, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why a backend cannot run here and what would help; None if it can."""
    if kind == "sdpa":
        return None
    if kind == "documents":
        return None if device_type == "cpu" else f"is for CPUs, this is {device_type}"
    if device_type != "cuda":
        return f"needs a CUDA device, this is {device_type}"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"needs an Ampere GPU or newer, this is {torch.cuda.get_device_name()}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 and the run computes in {str(dtype).removeprefix('torch.')}: set precision: bf16"
    if head_dim > MAX_FLASH_HEAD_DIM or head_dim % 8:
        return f"needs a head dimension divisible by 8 and at most {MAX_FLASH_HEAD_DIM}, the model's is {head_dim}"
    if kind == "varlen":
        return None
    if torch.cuda.get_device_capability()[0] not in GENERATIONS:
        return f"needs an sm_90 or sm_100 GPU, this is {torch.cuda.get_device_name()}"
    return gpu_attention.flash_obstacle(head_dim) if kind == "fa4" else gpu_attention.cudnn_obstacle(head_dim)


def check(model: PreTrainedModel, length: int) -> None:
    """Refuse a model that packed attention would train wrongly; `length` is the pack length in tokens.

    A model on the meta device is enough. Raises InputError naming what the model has and packed attention has not.
    """
    config, name = model.config, f"model: {type(model).__name__}"
    if not model._supports_attention_backend:  # it would ignore the name we registered and let documents see each other
        raise InputError(f"{name} does not use transformers' attention registry, which keeps documents apart; name another")
    layer_types = getattr(config, "layer_types", None)  # None: all alike, as Mistral's with one window for all layers
    if model._is_stateful or {*(layer_types or ())} - {"full_attention", "sliding_attention"}:
        raise InputError(f"{name} has layers other than attention, whose state would run on into the next document; name another")
    if not model._supports_sdpa or getattr(config, "kv_lora_rank", None):  # caps, sinks, or value heads narrower than query heads
        raise InputError(f"{name} attends in a way of its own, which no backend here computes; name another")
    for key in ("attn_logit_softcapping", "attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if value := getattr(config, key, None):
            raise InputError(f"{name} has {key} {value}, which is not computed here; set `model.config.{key}: 0.0`")
    window = getattr(config, "sliding_window", None)
    slides = window is not None and window < length and (layer_types is None or "sliding_attention" in layer_types)
    if slides and not model._supports_flash_attn:  # others keep their window to the masks that they make
        raise InputError(f"{name} does not tell its attention of its sliding window; set `data.length` to {window} or less")
    if (most := longest_rotated(config.get_text_config())) and length > most:
        raise InputError(f"{name}: longrope or dynamic rotation changes all documents beyond {most}; set `data.length` to {most}")


def longest_rotated(config: PretrainedConfig) -> int | None:
    """The length beyond which one document of a batch changes the frequencies by which all are rotated; None: they are fixed."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") not in ("longrope", "dynamic"):
        return None
    return parameters.get("original_max_position_embeddings") or config.max_position_embeddings


# ── As transformers' layers call it ─────────────────────────────────────────────────────────────────────────────────────────────


class Packed(NamedTuple):
    """What a kernel is told of the documents, and what it multiplies q k^T by."""

    cu_seqlens: Tensor
    max_seqlen: int
    mask: Tensor | None  # as `document_mask` makes it, of packed_sdpa alone
    scale: float
    window: int | None  # keys that a query sees, its own the last; None: all before it


def document_mask(cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> Tensor:
    """Which keys each query may see, [packs, 1, max_seqlen, max_seqlen] bool: its own document's, up to itself.

    `tokens` is a multiple of `max_seqlen`. Nothing is read back from the device.
    """
    position = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.bucketize(position, cu_seqlens[1:], right=True).view(-1, 1, max_seqlen)
    return (document[..., :, None] == document[..., None, :]).tril_()


def _packed(kernel: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """`kernel`, of q, k, v [T, heads, D] to the same, as a layer of transformers calls its attention: [1, heads, T, D]; and known
    to transformers by its name, such as `packed_varlen`.

    All get the values' dtype, as a rotation with FP32 factors may leave queries and keys in FP32.
    """

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        longest, window, scale = (options.get(name) for name in ("max_seqlen", "sliding_window", "scaling"))
        if longest is None:
            raise InputError(f"model: {type(module).__name__} does not tell its attention where documents end; name another")
        states = (each.squeeze(0).transpose(0, 1).to(value.dtype) for each in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        window = None if window is None or window >= longest else window
        packed = Packed(options.get("cu_seqlens"), longest, options.get("document_mask"), scale, window)
        return kernel(*states, packed)[None], None

    attention.__name__, attention.kernel = kernel.__name__, kernel
    AttentionInterface.register(kernel.__name__, attention)
    return attention


@_packed
def packed_sdpa(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Attends by torch's own kernels: any device, any dtype.

    Packs become the batch, so the mask and the work grow with T x max_seqlen and not with T squared. KV heads are repeated here:
    with a mask, `enable_gqa` gains 5 % on a CPU and leaves the fused kernels on CUDA.
    """

    def by_pack(states: Tensor) -> Tensor:  # [T, KV heads, D] -> [packs, heads, max_seqlen, D]
        return _repeated(states, query.shape[1]).unflatten(0, (-1, packed.max_seqlen)).transpose(1, 2)

    mask = packed.mask if packed.window is None else packed.mask.triu(1 - packed.window)
    output = F.scaled_dot_product_attention(by_pack(query), by_pack(key), by_pack(value), attn_mask=mask, scale=packed.scale)
    return output.transpose(1, 2).flatten(0, 1)


@_packed
def packed_documents(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Attends by torch's kernel for CPUs, a document at a time; within a window, which that kernel does not know, by
    `packed_sdpa`."""
    if packed.window is not None:
        mask = document_mask(packed.cu_seqlens, packed.max_seqlen, len(query))
        return packed_sdpa.kernel(query, key, value, packed._replace(mask=mask))
    repeated = (_repeated(each, query.shape[1]) for each in (key, value))
    return attend_by_document(query, *repeated, packed.cu_seqlens, packed.scale)[0]


def _repeated(states: Tensor, heads: int) -> Tensor:
    """[T, KV heads, D] -> [T, heads, D]."""
    return states.repeat_interleave(heads // states.shape[1], dim=1) if states.shape[1] < heads else states


@_packed
def packed_varlen(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Attends by torch's variable-length kernel, which skips what lies between documents; bf16 or fp16."""
    before = -1 if packed.window is None else packed.window - 1  # keys; none after a query's own: causal
    options: dict[str, Any] = {"scale": packed.scale, "window_size": (before, 0)}
    if VARLEN_HAS_GQA_FLAG:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    ends, longest = packed.cu_seqlens, packed.max_seqlen
    return varlen_attn(query, key, value, ends, ends, longest, longest, **options)


@_packed
def packed_fa4(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Attends by FlashAttention-4, within a window by torch's kernel; bf16 or fp16."""
    return _by_operator(flash_attention, query, key, value, packed)


@_packed
def packed_cudnn(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Attends by cuDNN's variable-length kernels, within a window by torch's; bf16 or fp16."""
    return _by_operator(cudnn_attention, query, key, value, packed)


def _by_operator(attend: CustomOpDef, query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    if packed.window is not None:
        return packed_varlen.kernel(query, key, value, packed)
    return attend(query, key, value, packed.cu_seqlens, packed.max_seqlen, packed.scale)[0]


# ── Kernels as operators: differentiable in q, k and v, and left whole by torch.compile, whatever the number of slots ───────────


def _operator(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], statistics: Callable[[Tensor], tuple[Tensor, ...]]
) -> CustomOpDef:
    """`pretrain::name`: `forward`(q, k, v, cu_seqlens, *numbers), with q [T, H, D] and k, v [T, KV, D], gives an output shaped as
    q and the statistics that backward needs.

    `backward`(d_output, q, k, v, *forward's results, cu_seqlens, *numbers) gives dq, dk and dv. `statistics`: of q, empty tensors
    of the statistics' shapes and dtypes, for torch.compile.
    """
    attend = torch.library.custom_op(f"pretrain::{name}", forward, mutates_args=())
    attend_backward = torch.library.custom_op(f"pretrain::{name}_backward", backward, mutates_args=())

    @attend.register_fake
    def _(q: Tensor, *others: Any) -> tuple[Tensor, ...]:
        return q.new_empty(q.shape), *statistics(q)

    @attend_backward.register_fake
    def _(d_output: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, cu_seqlens, *ctx.numbers = inputs
        ctx.save_for_backward(q, k, v, *output, cu_seqlens)
        ctx.set_materialize_grads(False)  # nothing flows into the statistics

    def differentiate(ctx: Any, d_output: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (1 + len(ctx.numbers))
        if d_output is None:
            return (None, None, None, *nothing)
        return *attend_backward(d_output, *ctx.saved_tensors, *ctx.numbers), *nothing

    attend.register_autograd(differentiate, setup_context=save)
    return attend


def _log_sums(q: Tensor) -> tuple[Tensor]:
    """Memory for the logarithms of the softmax's sums of q [T, H, D]: [H, T] FP32."""
    return (q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32),)


def _of_cudnn(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:2], 1), dtype=torch.float32), q.new_empty(2, dtype=torch.int64)


def _forward_by_document(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention within each document: q, k, v [T, H, D] on a CPU, FP32 or BF16 -> the output [T, H, D] and, for backward,
    the logarithms of the softmax's sums [H, T], FP32.

    With a mask torch's flash kernel for CPUs computes whole packs, what lies between documents included; called once a document,
    it takes work that grows with the squares of their lengths. All is computed in one order, so bits repeat with the same number
    of threads.
    """
    output, (log_sums,) = torch.empty_like(q, memory_format=torch.contiguous_format), _log_sums(q)
    for *states, into, sums in _by_document(cu_seqlens, q, k, v, output, log_sums=log_sums):
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*states, 0.0, True, scale=scale)
        into.copy_(result[0])
        sums.copy_(result[1])
    return output, log_sums


def _backward_by_document(
    d_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sums: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv [T, H, D], contiguous."""
    gradients = tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for *states, dq, dk, dv, sums in _by_document(cu_seqlens, d_output, q, k, v, output, *gradients, log_sums=log_sums):
        result = kernel(*states, sums.contiguous(), 0.0, True, scale=scale)
        for into, part in zip((dq, dk, dv), result, strict=True):
            into.copy_(part)
    return gradients


def _by_document(cu_seqlens: Tensor, *states: Tensor, log_sums: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """For each document, views: [1, H, tokens, D] of every [T, H, D], and [1, H, tokens] of `log_sums` [H, T]."""
    lengths = [end - begin for begin, end in pairwise(cu_seqlens.tolist()) if end > begin]
    batches = (each.transpose(0, 1)[None].split_with_sizes(lengths, 2) for each in states)
    return zip(*batches, log_sums[None].split_with_sizes(lengths, 2), strict=True)


attend_by_document = _operator("attend_by_document", _forward_by_document, _backward_by_document, _log_sums)
flash_attention = _operator("flash_attention", gpu_attention.flash_forward, gpu_attention.flash_backward, _log_sums)
cudnn_attention = _operator("cudnn_attention", gpu_attention.cudnn_forward, gpu_attention.cudnn_backward, _of_cudnn)
