"""Packed attention: every token sees its own document only, whichever kernel computes it.

A model built with `attn_implementation=choose(...).name` calls one of the functions below in each layer, through transformers'
attention registry, with q, k, v and the keyword arguments that its own forward was given:

    hf.base_model(input_ids=..., position_ids=..., use_cache=False, cu_seqlens=..., max_seqlen=..., document_mask=...)

* `cu_seqlens`: [bucket] int32 on the model's device, 0, then the documents' ends, then T repeated up to the bucket's size.
* `max_seqlen`: int, always the pack length, which no document crosses: a constant, so that kernels are compiled once.
* `document_mask`: only packed_sdpa reads it; `document_mask()` makes it, once a batch and not once a layer.

No attention mask is registered beside them: for a name that transformers' mask registry does not know, the model builds none.

Below these stand kernels without a graph, of FlashAttention-4 and torch, and the operators that are made of them. q and the
output are [T, H, D], k and v [T, KV, D]; attention is causal in each document, and `scale` is what q k^T is multiplied by.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AttentionInterface,
    PretrainedConfig,
    PreTrainedModel,
)

from foundation.errors import InputError
from pretrain.precision import transformer_engine
from pretrain.settings.recipe import Attention

_CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pretrain" / "flash_attn_4"
)
# Both are read when FlashAttention-4 is imported, and Transformer Engine imports it too: so they are set before either can be.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(_CACHE))

# `fa4` is `flash_attn` to a user: for names with "flash" transformers loads kernels of its own. Version 2 is torch's `varlen`.
FASTEST_FIRST = ("fa4", "varlen", "documents", "sdpa")
MAX_FLASH_HEAD_DIM = 256
FA4_HEAD_DIMS = range(64, MAX_FLASH_HEAD_DIM + 1)  # below, nobody has measured whether it is faster
# Hopper and data-centre Blackwell: it is written for these, and measured on the first
FA4_GENERATIONS = (9, 10)
# Tokens of a mean document times the query heads of a group. Beyond it, FlashAttention-4's products take so long that memory does
# not count. Empty slots count as documents, as only the device tells them apart: 4 packs of one document have 15 slots.
LONG = 8192
# query heads of a group: each is a call of its own, and wider groups have not been measured
WIDE = 4
# torch 2.13 wants to be told that there are fewer KV heads than query heads, 2.11 takes them as they come and has no such flag.
VARLEN_HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters


# ── Which backend, for which models ─────────────────────────────────────────────────────────────────────────────────────────────


class Choice(NamedTuple):
    """An attention backend and why it was taken, for the audit."""

    name: str  # transformers' `attn_implementation`
    reason: str


def choose(requested: Attention, device_type: str, head_dim: int, dtype: torch.dtype) -> Choice:
    """The backend for a device, the size of the model's heads and the dtype that attention computes in.

    `auto` takes the first of FASTEST_FIRST that runs here. Raises InputError where the requested one does not. Whether a kernel
    computes what it should here is for parity to say.
    """
    passed_over = []
    for kind in (
        FASTEST_FIRST
        if requested == "auto"
        else ("fa4" if requested == "flash_attn" else requested,)
    ):
        obstacle = _obstacle(kind, device_type, head_dim, dtype)
        if not obstacle:
            reason = (
                "; ".join(["fastest that runs here", *passed_over])
                if requested == "auto"
                else "requested"
            )
            return Choice(f"packed_{kind}", reason)
        passed_over.append(f"{kind} {obstacle}")
    raise InputError(
        f"model.attention: {requested} cannot be used here: {'; '.join(passed_over)}; set model.attention: auto"
    )


def _obstacle(kind: str, device_type: str, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why a backend cannot run here and what would help, worded to follow its name; None if it can."""
    if kind == "sdpa":
        return None
    if kind == "documents":
        return None if device_type == "cpu" else f"is for CPUs, this is {device_type}"
    if device_type != "cuda":
        return f"needs a CUDA device, this is {device_type}"
    generation = torch.cuda.get_device_capability()[0]
    if generation < 8:
        return f"needs an Ampere GPU or newer, this is {torch.cuda.get_device_name()}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 and the run computes in {str(dtype).removeprefix('torch.')}: set precision: bf16"
    if head_dim > MAX_FLASH_HEAD_DIM or head_dim % 8:
        return f"needs a head dimension divisible by 8 and at most {MAX_FLASH_HEAD_DIM}, the model's is {head_dim}"
    if kind == "varlen":
        return None
    if generation not in FA4_GENERATIONS:
        return f"needs an sm_90 or sm_100 GPU, this is {torch.cuda.get_device_name()}"
    if head_dim not in FA4_HEAD_DIMS or (generation == 10 and 128 < head_dim < 256):
        return f"has no kernel, or none that was measured, for heads of {head_dim} here"
    try:
        _flash()  # imported, which takes seconds, where nothing else stands in the way
    except (ImportError, OSError, AttributeError) as error:
        return f"needs the package flash-attn-4 (pip install -r requirements-cuda.txt): {error}"
    return None


def check(model: PreTrainedModel, length: int) -> None:
    """Refuse a model that packed attention would train wrongly; `length` is the pack length in tokens.

    A model on the meta device is enough. Raises InputError naming what the model has and packed attention has not.
    """
    config, name = model.config, f"model: {type(model).__name__}"
    # None: all alike, as Mistral's with one window for all layers
    layer_types = getattr(config, "layer_types", None)
    others = sorted({*(layer_types or ())} - {"full_attention", "sliding_attention", "mlp", "moe"})
    sinks = [parameter for parameter, _ in model.named_parameters() if "sink" in parameter]
    cap = getattr(config, "attn_logit_softcapping", None)
    lacking = {
        f"has layers other than attention ({', '.join(others) or 'recurrent'}); they need kernels "
        "that begin anew at each document": others or (model._is_stateful and layer_types is None),
        # It would ignore the name we registered and let documents see each other.
        "does not use transformers' attention registry, which keeps documents apart": (
            not model._supports_attention_backend
        ),
        f"has attention sinks ({', '.join(sinks[:1])}); they need kernels with a sink in "
        "the softmax": sinks,
        "has latent keys; they need kernels for keys wider than values": getattr(
            config, "kv_lora_rank", None
        ),
        f"caps its scores at {cap}, which needs kernels that do, or "
        "`model.config.attn_logit_softcapping: null`": cap,
        "has scores that torch's own attention does not compute": not model._supports_sdpa
        and not hasattr(config, "attn_logit_softcapping"),
    }
    if reason := next((reason for reason, found in lacking.items() if found), None):
        raise InputError(f"{name} {reason}; name another")
    for key in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if value := getattr(config, key, None):
            raise InputError(
                f"{name} has {key} {value}, which is not computed here; set `model.config.{key}: 0.0`"
            )
    window = getattr(config, "sliding_window", None)
    slides = (
        window is not None
        and window < length
        and (layer_types is None or "sliding_attention" in layer_types)
    )
    # others keep their window to the masks that they make
    if slides and not model._supports_flash_attn:
        raise InputError(
            f"{name} does not tell its attention of its sliding window; set `data.length` to {window} or less"
        )
    if (most := longest_rotated(config.get_text_config())) and length > most:
        raise InputError(
            f"{name}: longrope or dynamic rotation changes all documents beyond {most}; set `data.length` to {most}"
        )


def admit_packed_sdpa(config: PretrainedConfig) -> None:
    """Let transformers build the model of `config` with `packed_sdpa`.

    It refuses names with "sdpa" for classes whose scores can be capped. `check` refuses the scores
    that are.
    """
    for classes in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        classes[type(config)]._supports_sdpa = True


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
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        longest, window, scale = (
            options.get(name) for name in ("max_seqlen", "sliding_window", "scaling")
        )
        if longest is None:
            raise InputError(
                f"model: {type(module).__name__} does not tell its attention where documents end; name another"
            )
        states = (each.squeeze(0).transpose(0, 1).to(value.dtype) for each in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        window = None if window is None or window >= longest else window
        packed = Packed(
            options.get("cu_seqlens"), longest, options.get("document_mask"), scale, window
        )
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
        return (
            _repeated(states, query.shape[1]).unflatten(0, (-1, packed.max_seqlen)).transpose(1, 2)
        )

    mask = packed.mask if packed.window is None else packed.mask.triu(1 - packed.window)
    output = F.scaled_dot_product_attention(
        by_pack(query), by_pack(key), by_pack(value), attn_mask=mask, scale=packed.scale
    )
    return output.transpose(1, 2).flatten(0, 1)


@_packed
@torch.compiler.disable  # which would compile for the lengths of one microbatch
def packed_documents(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Attends by torch's CPU kernel, a document at a time: its work grows with the squares of their lengths. With a mask it would
    compute whole packs; so it does within a window, which it lacks."""
    if packed.window is not None:
        mask = document_mask(packed.cu_seqlens, packed.max_seqlen, len(query))
        return packed_sdpa.kernel(query, key, value, packed._replace(mask=mask))
    lengths = [end - begin for begin, end in pairwise(packed.cu_seqlens.tolist()) if end > begin]
    states = (_repeated(each, query.shape[1]).transpose(0, 1)[None] for each in (query, key, value))
    documents = zip(*(each.split_with_sizes(lengths, 2) for each in states), strict=True)
    attended = (
        F.scaled_dot_product_attention(*each, is_causal=True, scale=packed.scale)
        for each in documents
    )
    return torch.cat([each[0].transpose(0, 1) for each in attended])


def _repeated(states: Tensor, heads: int) -> Tensor:
    """[T, KV heads, D] -> [T, heads, D]."""
    return (
        states.repeat_interleave(heads // states.shape[1], dim=1)
        if states.shape[1] < heads
        else states
    )


@_packed
def packed_varlen(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Attends by torch's variable-length kernel, which skips what lies between documents; bf16 or fp16."""
    # keys; none after a query's own: causal
    before = -1 if packed.window is None else packed.window - 1
    options: dict[str, Any] = {"scale": packed.scale, "window_size": (before, 0)}
    if VARLEN_HAS_GQA_FLAG:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    ends, longest = packed.cu_seqlens, packed.max_seqlen
    return varlen_attn(query, key, value, ends, ends, longest, longest, **options)


@_packed
def packed_fa4(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Attends by FlashAttention-4, within a window by torch's kernel; bf16 or fp16."""
    if packed.window is not None:
        return packed_varlen.kernel(query, key, value, packed)
    return flash_attention(query, key, value, packed.cu_seqlens, packed.max_seqlen, packed.scale)[0]


# ── FlashAttention-4 (package `flash-attn-4`) ───────────────────────────────────────────────────────────────────────────────────
#
# It compiles a head shape once, for some ten seconds, whatever the numbers of tokens and documents, and keeps that in
# `$XDG_CACHE_HOME/pretrain/flash_attn_4` unless FLASH_ATTENTION_CUTE_DSL_CACHE_DIR names another folder. In its backward, blocks
# of keys add to dQ as they finish, so its last bits may differ from run to run; all else repeats bit for bit. For
# `deterministic: true` they have a fixed order, which takes a tenth longer.


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The output, and for backward the logarithms of the softmax's sums [H, T], FP32."""
    options = _documents(ends, longest) | {
        "softmax_scale": scale,
        "causal": True,
        "return_lse": True,
    }
    output, log_sums, *_ = _flash()._flash_attn_fwd(q, k, v, **options)
    return output, log_sums


def flash_backward_in_parts(
    d_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    log_sums: Tensor,
    ends: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous; dk and dv may be [T, KV, H / KV, D], one part for each query head, which the caller adds up.

    The kernel adds the query heads of a group to FP32 sums in memory. Here it gets one head of each group at a time, which share
    nothing, so each gradient is written once: 911 us for 1,299 on an H200, with groups of two and documents of 180 tokens. In
    groups of four with documents of 4,096 the kernel's own way is faster (benchmarks/results/kernels/h200_kernels_in_parts.json).
    """
    options = _documents(ends, longest) | {
        "deterministic": torch.are_deterministic_algorithms_enabled()
    }
    backward, heads, group = _flash()._flash_attn_bwd, k.shape[1], q.shape[1] // k.shape[1]
    apart = 1 < group <= WIDE and group * len(q) <= LONG * (len(ends) - 1)
    if not apart:
        dq, dk, dv, *_ = backward(q, k, v, output, d_output, log_sums, scale, True, **options)
        return dq, dk, dv
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (each.new_empty(len(each), heads, group, each.shape[2]) for each in (k, v))
    grouped = [each.unflatten(1, (heads, group)) for each in (q, output, d_output, dq)]
    for member in range(group):
        of_q, of_output, of_d_output, of_dq = (each[:, :, member] for each in grouped)
        of_sums = log_sums.unflatten(0, (heads, group))[:, member]
        into = {"dq": of_dq, "dk": dk[:, :, member], "dv": dv[:, :, member]}
        backward(of_q, k, v, of_output, of_d_output, of_sums, scale, True, **into, **options)
    return dq, dk, dv


def flash_backward(
    d_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    log_sums: Tensor,
    ends: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`flash_backward_in_parts`, its parts added up in FP32 and rounded once."""
    dq, *parts = flash_backward_in_parts(d_output, q, k, v, output, log_sums, ends, longest, scale)
    dk, dv = (part.sum(2) if part.dim() == 4 else part for part in parts)
    return dq, dk, dv


@cache
def _flash() -> ModuleType:
    # Transformer Engine goes first: once FlashAttention-4's libraries are loaded, it takes parts of another cuDNN and cannot be.
    transformer_engine.missing()
    from flash_attn.cute import interface

    return interface


def _documents(ends: Tensor, longest: int) -> dict[str, Tensor | int]:
    return {
        "cu_seqlens_q": ends,
        "cu_seqlens_k": ends,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


# ── As an operator: differentiable in q, k and v, and left whole by torch.compile, whatever the number of slots ────────────────


flash_attention = torch.library.custom_op(
    "pretrain::flash_attention", flash_forward, mutates_args=()
)
_flash_attention_backward = torch.library.custom_op(
    "pretrain::flash_attention_backward", flash_backward, mutates_args=()
)


@flash_attention.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@_flash_attention_backward.register_fake
def _(
    d_output: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_seqlens, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.set_materialize_grads(False)  # nothing flows into the statistics


def _differentiate(ctx: Any, d_output: Tensor, *others: None) -> tuple[Tensor | None, ...]:
    return *_flash_attention_backward(d_output, *ctx.saved_tensors, *ctx.numbers), None, None, None


flash_attention.register_autograd(_differentiate, setup_context=_save)
