"""Packed attention: every token sees only its own document, whichever kernel computes it.

A model that is built with `attn_implementation=choose(...).name` calls one of the functions below
in each layer. transformers' attention registry passes q, k, v and the keyword arguments of the
model's forward:

    hf.base_model(input_ids=..., position_ids=..., use_cache=False,
                  cu_seqlens=..., max_seqlen=..., document_mask=...)

* `cu_seqlens`: [bucket] int32 on the model's device: 0, the ends of the documents, then T repeated
  up to the size of the bucket.
* `max_seqlen`: int, the pack length, which no document exceeds. A constant, so that kernels are
  compiled once.
* `document_mask`: result of `document_mask`, computed once a batch instead of once a layer. Only
  packed_sdpa reads it.

No attention mask is registered beside them. The model builds none for a name that transformers'
mask registry does not know.

The end of the file has kernels of FlashAttention-4 without a graph, and the operators that are made
of them. Their q and output are [T, H, D], and k and v are [T, KV, D]. Attention is causal in each
document, and `scale` is the factor of q k^T.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

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

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
# FlashAttention-4 reads both when it is imported. Transformer Engine imports it too, so they are
# set before either can be imported.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault(
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(_CACHE / "pretrain" / "flash_attn_4")
)

# Users call `fa4` `flash_attn`. transformers loads its own kernels for names with "flash".
# `varlen` is torch's version of FlashAttention-2.
FASTEST_FIRST = ("fa4", "varlen", "documents", "sdpa")
MAX_FLASH_HEAD_DIM = 256
# Smaller heads have not been measured.
FA4_HEAD_DIMS = range(64, MAX_FLASH_HEAD_DIM + 1)
# Hopper and data-centre Blackwell. The speed was measured on Hopper only.
FA4_GENERATIONS = (9, 10)
# Tokens of a mean document times the query heads of a group. Above it, FlashAttention-4's products
# take so long that memory traffic does not matter. Empty places count as documents, because only
# the device can tell them apart: 4 packs of one document have 15 places.
LONG = 8192
# Maximum number of query heads of a group. Each head is a call, and larger groups have not been
# measured.
WIDE = 4
# torch 2.13 needs a flag if there are fewer KV heads than query heads. torch 2.11 has no such flag.
VARLEN_HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters


# ── The choice of a backend ──


class Choice(NamedTuple):
    """An attention backend and the reason for it, for the audit."""

    name: str  # transformers' `attn_implementation`
    reason: str


def choose(requested: Attention, device_type: str, head_dim: int, dtype: torch.dtype) -> Choice:
    """Return the backend for a device, the size of the model's heads and the compute dtype.

    `auto` takes the first of FASTEST_FIRST that runs on the device. Raise InputError if the
    requested backend does not run. Parity checks what a kernel computes.
    """
    kinds: tuple[str, ...] = ("fa4" if requested == "flash_attn" else requested,)
    reasons = ["requested"]
    if requested == "auto":
        kinds = FASTEST_FIRST
        reasons = ["fastest that runs here"]
    for kind in kinds:
        obstacle = _obstacle(kind, device_type, head_dim, dtype)
        if obstacle is None:
            return Choice(f"packed_{kind}", "; ".join(reasons))
        reasons.append(f"{kind} {obstacle}")
    raise InputError(
        f"model.attention: {requested} cannot be used here: {'; '.join(reasons[1:])}; "
        "set model.attention: auto"
    )


def _obstacle(kind: str, device_type: str, head_dim: int, dtype: torch.dtype) -> str | None:
    """Return why a backend cannot run and what would help, or None if it can.

    The text follows the name of the backend.
    """
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
        computed = str(dtype).removeprefix("torch.")
        return f"needs bf16 and the run computes in {computed}: set precision: bf16"
    if head_dim > MAX_FLASH_HEAD_DIM or head_dim % 8:
        return (
            f"needs a head dimension divisible by 8 and at most {MAX_FLASH_HEAD_DIM}, the model's "
            f"is {head_dim}"
        )
    if kind == "varlen":
        return None
    if generation not in FA4_GENERATIONS:
        return f"needs an sm_90 or sm_100 GPU, this is {torch.cuda.get_device_name()}"
    if head_dim not in FA4_HEAD_DIMS or (generation == 10 and 128 < head_dim < 256):
        return f"has no kernel, or none that was measured, for heads of {head_dim} here"
    try:
        _flash()  # last, because the import takes seconds
    except (ImportError, OSError, AttributeError) as error:
        return f"needs the package flash-attn-4 (pip install -r requirements-cuda.txt): {error}"
    return None


def check(model: PreTrainedModel, length: int) -> None:
    """Raise InputError for a model that packed attention would train wrongly.

    The message names the part of the model that packed attention does not support.

    Args:
        model: The model, on the meta device or not.
        length: Pack length in tokens.
    """
    config: Any = model.config
    name = f"model: {type(model).__name__}"
    # None if all layers are alike, as in Mistral with one window for all layers.
    layer_types = getattr(config, "layer_types", None)
    supported = {"full_attention", "sliding_attention", "mlp", "moe"}
    unsupported = sorted({*(layer_types or ())} - supported)
    sinks = [parameter for parameter, _ in model.named_parameters() if "sink" in parameter]
    cap = getattr(config, "attn_logit_softcapping", None)
    lacking = {
        f"has layers other than attention ({', '.join(unsupported) or 'recurrent'}); they need "
        "kernels that begin anew at each document": (
            unsupported or (model._is_stateful and layer_types is None)
        ),
        # It would ignore the registered name, and tokens would see other documents.
        "does not use transformers' attention registry, which keeps documents apart": (
            not model._supports_attention_backend
        ),
        f"has attention sinks ({', '.join(sinks[:1])}); they need kernels with a sink in "
        "the softmax": sinks,
        "has latent keys; they need kernels for keys wider than values": (
            getattr(config, "kv_lora_rank", None)
        ),
        f"caps its scores at {cap}, which needs kernels that do, or "
        "`model.config.attn_logit_softcapping: null`": cap,
        "has scores that torch's own attention does not compute": (
            not model._supports_sdpa and not hasattr(config, "attn_logit_softcapping")
        ),
    }
    for reason, is_lacking in lacking.items():
        if is_lacking:
            raise InputError(f"{name} {reason}; name another")
    for key in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if value := getattr(config, key, None):
            raise InputError(
                f"{name} has {key} {value}, which is not computed here; "
                f"set `model.config.{key}: 0.0`"
            )
    window = getattr(config, "sliding_window", None)
    has_window = layer_types is None or "sliding_attention" in layer_types
    # Models that do not support FlashAttention express the window in their masks only.
    if window is not None and window < length and has_window and not model._supports_flash_attn:
        raise InputError(
            f"{name} does not tell its attention of its sliding window; "
            f"set `data.length` to {window} or less"
        )
    longest = longest_rotated(config.get_text_config())
    if longest is not None and length > longest:
        raise InputError(
            f"{name}: longrope or dynamic rotation changes all documents beyond {longest}; "
            f"set `data.length` to {longest}"
        )


def admit_packed_sdpa(config: PretrainedConfig) -> None:
    """Let transformers build the model of `config` with `packed_sdpa`.

    It refuses names with "sdpa" for classes whose scores can be capped. `check` refuses models
    whose scores are capped.
    """
    for classes in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        model_class: Any = classes[type(config)]
        model_class._supports_sdpa = True


def longest_rotated(config: PretrainedConfig) -> int | None:
    """Return the length above which one document changes the rotation of all in its batch.

    Return None if the frequencies of the rotation are fixed.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") not in ("longrope", "dynamic"):
        return None
    return parameters.get("original_max_position_embeddings") or config.max_position_embeddings


# ── The functions that transformers' layers call ──


class Packed(NamedTuple):
    """The documents of a batch, and the parameters of attention."""

    cu_seqlens: Tensor
    max_seqlen: int
    mask: Tensor | None  # result of `document_mask`, for packed_sdpa only
    scale: float  # factor of q k^T
    window: int | None  # keys that a query sees, including its own; None for all before it


Kernel = Callable[[Tensor, Tensor, Tensor, Packed], Tensor]


def document_mask(cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> Tensor:
    """Return the keys that each query may see, [packs, 1, max_seqlen, max_seqlen] bool.

    They are those of its document, up to its own. `tokens` is a multiple of `max_seqlen`. The host
    does not wait for the device.
    """
    position = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.bucketize(position, cu_seqlens[1:], right=True).view(-1, 1, max_seqlen)
    return (document[..., :, None] == document[..., None, :]).tril_()


def _registered(kernel: Kernel) -> Kernel:
    """Register `kernel` with transformers, by its name.

    The kernel maps q, k and v [T, heads, D] to the output. A layer of transformers passes them as
    [1, heads, T, D]. All get the dtype of v, because a rotation with FP32 factors may leave queries
    and keys in FP32.
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
        document_mask: Tensor | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if cu_seqlens is None or max_seqlen is None:
            raise InputError(
                f"model: {type(module).__name__} does not tell its attention where documents end; "
                "name another"
            )
        q, k, v = (t.squeeze(0).transpose(0, 1).to(value.dtype) for t in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        has_effect = sliding_window is not None and sliding_window < max_seqlen
        window = sliding_window if has_effect else None
        packed = Packed(cu_seqlens, max_seqlen, document_mask, scale, window)
        return kernel(q, k, v, packed)[None], None

    AttentionInterface.register(kernel.__name__, attention)
    return kernel


@_registered
def packed_sdpa(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Compute attention by torch's kernels, on any device and in any dtype.

    Packs become the batch, so mask and work grow with T x max_seqlen instead of T squared. KV heads
    are repeated: with a mask, `enable_gqa` gains 5 % on a CPU, and on CUDA it prevents fused
    kernels.
    """

    def by_pack(states: Tensor) -> Tensor:
        """Return [packs, heads, max_seqlen, D] for states [T, KV heads, D]."""
        repeated = _repeated(states, query.shape[1])
        return repeated.unflatten(0, (-1, packed.max_seqlen)).transpose(1, 2)

    mask = packed.mask
    if mask is not None and packed.window is not None:
        mask = mask.triu(1 - packed.window)
    output = F.scaled_dot_product_attention(
        by_pack(query), by_pack(key), by_pack(value), attn_mask=mask, scale=packed.scale
    )
    return output.transpose(1, 2).flatten(0, 1)


@_registered
@torch.compiler.disable  # a graph would be compiled for the lengths of one microbatch
def packed_documents(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Compute attention by torch's CPU kernel, one document at a time.

    The work grows with the squares of the lengths of documents. With a mask, the kernel would
    compute full packs. It has no sliding window, so a window needs the mask.
    """
    if packed.window is not None:
        mask = document_mask(packed.cu_seqlens, packed.max_seqlen, len(query))
        return packed_sdpa(query, key, value, packed._replace(mask=mask))
    lengths = [end - begin for begin, end in pairwise(packed.cu_seqlens.tolist()) if end > begin]
    states = [_repeated(t, query.shape[1]).transpose(0, 1)[None] for t in (query, key, value)]
    outputs = []
    for q, k, v in zip(*(t.split_with_sizes(lengths, 2) for t in states), strict=True):
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=packed.scale)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def _repeated(states: Tensor, heads: int) -> Tensor:
    """Return [T, heads, D] for states [T, KV heads, D]."""
    group = heads // states.shape[1]
    return states if group == 1 else states.repeat_interleave(group, dim=1)


@_registered
def packed_varlen(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Compute attention by torch's kernel for variable lengths, in BF16 or FP16.

    The kernel skips the products between documents.
    """
    # Number of keys before and after a query's own. None after it: attention is causal.
    window = (-1 if packed.window is None else packed.window - 1, 0)
    documents = (packed.cu_seqlens, packed.cu_seqlens, packed.max_seqlen, packed.max_seqlen)
    options: dict[str, Any] = {"scale": packed.scale, "window_size": window}
    if VARLEN_HAS_GQA_FLAG:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    return cast(Tensor, varlen_attn(query, key, value, *documents, **options))


@_registered
def packed_fa4(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Compute attention by FlashAttention-4, or with a window by torch's kernel; BF16 or FP16."""
    if packed.window is not None:
        return packed_varlen(query, key, value, packed)
    return flash_attention(query, key, value, packed.cu_seqlens, packed.max_seqlen, packed.scale)[0]


# ── FlashAttention-4 (package `flash-attn-4`) ──
#
# It compiles a kernel for each shape of heads, in about ten seconds, for any number of tokens and
# documents. The kernels are cached in `$XDG_CACHE_HOME/pretrain/flash_attn_4`, unless
# FLASH_ATTENTION_CUTE_DSL_CACHE_DIR names another folder. In its backward, blocks of keys add to dQ
# in the order in which they finish. So the last bits of dQ may differ from run to run. Everything
# else is reproducible bit for bit. `deterministic: true` fixes the order, which takes 10 % longer.


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output, and the logarithms of the softmax's sums, FP32 [H, T], for backward."""
    output, log_sums, *_ = _flash()._flash_attn_fwd(
        q, k, v, softmax_scale=scale, causal=True, return_lse=True, **_documents(ends, longest)
    )
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
    """Return dq, dk and dv, contiguous.

    dk and dv may be [T, KV, H / KV, D], with one part for each query head. The caller sums them.

    The kernel adds the query heads of a group to FP32 sums in memory. Here it gets one head of each
    group at a time. These share nothing, so each gradient is written once: 911 us instead of 1,299
    on an H200, with groups of two and documents of 180 tokens. In groups of four with documents of
    4,096 the kernel's sums are faster (benchmarks/results/kernels/h200_kernels_in_parts.json).
    """
    options = _documents(ends, longest)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    backward = _flash()._flash_attn_bwd
    heads = k.shape[1]
    group = q.shape[1] // heads
    apart = 1 < group <= WIDE and group * len(q) <= LONG * (len(ends) - 1)
    if not apart:
        dq, dk, dv, *_ = backward(q, k, v, output, d_output, log_sums, scale, True, **options)
        return dq, dk, dv
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (t.new_empty(len(t), heads, group, t.shape[2]) for t in (k, v))
    grouped = [t.unflatten(1, (heads, group)) for t in (q, output, d_output, dq)]
    for member in range(group):
        of_q, of_output, of_d_output, of_dq = (t[:, :, member] for t in grouped)
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
    """Return `flash_backward_in_parts` with its parts summed in FP32 and rounded once."""
    dq, *parts = flash_backward_in_parts(d_output, q, k, v, output, log_sums, ends, longest, scale)
    dk, dv = (part.sum(2) if part.dim() == 4 else part for part in parts)
    return dq, dk, dv


@cache
def _flash() -> ModuleType:
    """Import FlashAttention-4."""
    # Load Transformer Engine first. After FlashAttention-4's libraries it would load parts of
    # another cuDNN and fail.
    transformer_engine.missing()
    from flash_attn.cute import interface

    return interface


def _documents(ends: Tensor, longest: int) -> dict[str, Any]:
    """Return the documents as keyword arguments of FlashAttention-4."""
    return {
        "cu_seqlens_q": ends,
        "cu_seqlens_k": ends,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


# ── FlashAttention-4 as an operator: torch.compile does not look into it, for any number of
# documents ──


flash_attention = torch.library.custom_op(
    "pretrain::flash_attention", flash_forward, mutates_args=()
)
_flash_attention_backward = torch.library.custom_op(
    "pretrain::flash_attention_backward", flash_backward, mutates_args=()
)


@flash_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@_flash_attention_backward.register_fake
def _(d_output: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_seqlens, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.set_materialize_grads(False)  # the log-sums have no gradient


def _differentiate(ctx: Any, d_output: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    return *_flash_attention_backward(d_output, *ctx.saved_tensors, *ctx.numbers), None, None, None


flash_attention.register_autograd(_differentiate, setup_context=_save)
