"""Packed attention: each token attends only to tokens of its own document.

A model that is built with `attn_implementation=choose(...).name` calls one of the functions of this
module in each layer. The attention registry of transformers passes q, k, v and the keyword
arguments of the model's forward to the function:

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

At the end of the file are functions that call the kernels of FlashAttention-4, of cuDNN and of
Triton without autograd, and operators of torch that add autograd to them. In all of them,
queries q and the output are [T, H, D], and keys k and values v are [T, KV, D], for T tokens, H
query heads, KV key heads and D values in a head. Attention is causal in each document, and `scale`
is the factor of q k^T.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
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
from foundation.files import CACHE
from pretrain.precision import transformer_engine
from pretrain.settings.recipe import Attention

# FlashAttention-4 reads these two environment variables when it is imported.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(CACHE / "flash_attn_4"))

# Backends from the fastest to the slowest, if documents are long. In recipes, `fa4` is called
# `flash_attn`. This name is not used here, because transformers loads its own kernels for names
# that contain "flash". `varlen` is torch's version of FlashAttention-2.
FASTEST_FIRST: tuple[str, ...] = ("fa4", "cudnn", "varlen", "documents", "sdpa")
# Head sizes of our Triton kernels.
TRITON_HEAD_DIMS = (16, 32, 64)
# With `auto`, our kernels are used on Hopper, for heads of 64 values, if the mean document length
# is at most SHORT. The mean is weighted: it is the mean over all tokens of the length of the
# token's document. On an H100, our kernels were faster than the others at 545 tokens, and 9 %
# slower than FlashAttention-4 at 913 tokens. SHORT is about where the times cross if they grow
# linearly. With heads of 128 values, training steps did not become faster, so these heads are not
# supported (benchmarks/results/kernels/h100_short_documents.json).
SHORT = 768
MAX_FLASH_HEAD_DIM = 256
# Head sizes for which FlashAttention-4 is used. Smaller heads have not been measured.
FA4_HEAD_DIMS = range(64, MAX_FLASH_HEAD_DIM + 1)
# Head sizes for which cuDNN is used. On an H200, it was always faster than `varlen` with these, but
# with heads of 96 values it took up to 2.8 times as long for documents of up to 2,000 tokens. With
# heads of 256 values, its gradients of queries were wrong by a third.
CUDNN_HEAD_DIMS = (64, 128)
# Major compute capabilities for which FlashAttention-4 and cuDNN are used: 9 (Hopper) and 10
# (data-centre Blackwell). The speed was measured on Hopper only.
FLASH_GENERATIONS = (9, 10)
# `flash_backward_in_parts` computes dk and dv in parts to save memory traffic. It does so only if
# the mean number of tokens of a document, times the number of query heads that share a KV head, is
# at most LONG. Above this limit, the matrix products of FlashAttention-4 take so long that memory
# traffic does not matter. Unused entries of cu_seqlens are counted as documents, because the host
# does not know which entries are unused. For example, 4 documents are counted as 15 documents,
# because cu_seqlens has at least 16 entries.
LONG = 8192
# The largest number of query heads per KV head for which `flash_backward_in_parts` computes dk and
# dv in parts. It calls the kernel once for each query head of a KV head, and more than four calls
# have not been measured.
WIDE = 4
# True if torch's kernel has the flag `enable_gqa`. torch 2.13 needs this flag if there are fewer KV
# heads than query heads. torch 2.11 has no such flag.
VARLEN_HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters


# ── The choice of a backend ──


class Choice(NamedTuple):
    """An attention backend and the reason for it, for the audit."""

    name: str  # transformers' `attn_implementation`
    reason: str


def require(requested: Attention, device_type: str, head_dim: int, dtype: torch.dtype) -> None:
    """Raise InputError if the requested attention backend cannot run. "auto" can always run."""
    if refusal := refusal_of(requested, device_type, head_dim, dtype):
        raise InputError(refusal)


def refusal_of(
    requested: Attention,
    device_type: str,
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Return the message for a requested backend that cannot run, or None if it can run.

    See `choose` for `capability`.
    """
    if requested == "auto":
        return None
    obstacle = _obstacle(_kind_of(requested), device_type, head_dim, dtype, capability)
    if obstacle is None:
        return None
    return (
        f"model.attention: {requested} cannot be used here: {requested} {obstacle}; "
        "set model.attention: auto"
    )


def choose(
    requested: Attention,
    device_type: str,
    head_dim: int,
    dtype: torch.dtype,
    mean_length: float,
    capability: tuple[int, int] | None = None,
) -> Choice:
    """Return the attention backend for a device, a head size, a compute dtype and documents.

    Return the requested backend, which `require` has checked. If `requested` is "auto", return the
    fastest backend that can run. The parity check at the start of a run tests the results of the
    backend.

    mean_length: mean over all tokens of the length of the token's document.
    capability: the CUDA compute capability of a GPU that this machine does not have. It is assumed
        that the machine of this GPU has all packages of requirements-cuda.txt.
    """
    if requested != "auto":
        return Choice(f"packed_{_kind_of(requested)}", "requested")
    kinds = FASTEST_FIRST
    reasons = ["fastest that runs here"]
    # Our Triton kernels were measured to be the fastest in this case.
    if (
        device_type == "cuda"
        and head_dim == 64
        and mean_length <= SHORT
        and (capability or torch.cuda.get_device_capability())[0] == 9
    ):
        kinds = ("triton", *FASTEST_FIRST)
        reasons = ["fastest that runs here for short documents"]
    for kind in kinds:
        obstacle = _obstacle(kind, device_type, head_dim, dtype, capability)
        if obstacle is None:
            break
        reasons.append(f"{'flash_attn' if kind == 'fa4' else kind} {obstacle}")
    return Choice(f"packed_{kind}", "; ".join(reasons))


def _kind_of(requested: Attention) -> str:
    """Return the kind of the backend that a recipe requests."""
    return "fa4" if requested == "flash_attn" else requested


def _obstacle(
    kind: str,
    device_type: str,
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Return the reason why a backend cannot run, with a remedy if there is one.

    Example: "needs a CPU, and the device is cuda". The caller puts the name of the backend before
    this text. Return None if the backend can run. See `choose` for `capability`.
    """
    if kind in ("sdpa", "documents"):
        needs_cpu = kind == "documents" and device_type != "cpu"
        return f"needs a CPU, and the device is {device_type}" if needs_cpu else None
    if device_type != "cuda":
        return f"needs a CUDA device, and the device is {device_type}"
    generation, minor = capability or torch.cuda.get_device_capability()
    gpu = f"the GPU is sm_{generation}{minor}"
    computed = str(dtype).removeprefix("torch.")
    heads = f"the model's heads have {head_dim}"
    # Map each reason to a value that is true if the reason applies.
    reasons = {
        f"needs an Ampere GPU (sm_80) or newer, and {gpu}": generation < 8,
        f"needs BF16, and the run computes in {computed} (set precision: bf16)": (
            dtype not in (torch.bfloat16, torch.float16)
        ),
        f"needs heads of 16, 32 or 64 values, and {heads}": (
            kind == "triton" and head_dim not in TRITON_HEAD_DIMS
        ),
        f"needs a head dimension that is a multiple of 8 and at most {MAX_FLASH_HEAD_DIM}, and "
        f"the model's head dimension is {head_dim}": (
            kind != "triton" and (head_dim > MAX_FLASH_HEAD_DIM or head_dim % 8)
        ),
        f"needs an sm_90 or sm_100 GPU, and {gpu}": (
            kind in ("fa4", "cudnn") and generation not in FLASH_GENERATIONS
        ),
        f"needs heads of 64 or 128 values, and {heads}": (
            kind == "cudnn" and head_dim not in CUDNN_HEAD_DIMS
        ),
        # On Hopper, the workspace of the deterministic backward grows with the square of T.
        "has no deterministic backward (set deterministic: false)": (
            kind == "cudnn" and torch.are_deterministic_algorithms_enabled()
        ),
        f"has no kernel that was measured on this GPU for a head dimension of {head_dim}": (
            kind == "fa4"
            and (head_dim not in FA4_HEAD_DIMS or (generation == 10 and 128 < head_dim < 256))
        ),
    }
    obstacle = next((reason for reason, applies in reasons.items() if applies), None)
    # This check is the last one, because the imports take seconds.
    if obstacle is None and capability is None:
        obstacle = _missing_package(kind)
    return obstacle


def _missing_package(kind: str) -> str | None:
    """Return the package of a backend that cannot be imported, as `_obstacle`."""
    if kind == "cudnn" and (missing := transformer_engine.missing()):
        return f"needs Transformer Engine: {missing}"
    if kind == "fa4":
        try:
            _flash()
        except (ImportError, OSError, AttributeError) as error:
            return f"needs the package flash-attn-4 (pip install -r requirements-cuda.txt): {error}"
    return None


def check_documents(model: PreTrainedModel) -> None:
    """Raise InputError if the model has parts that mix the tokens of packed documents.

    This holds for the attention functions of this project, and for those of transformers, which
    separate documents by their positions or by the arguments of FlashAttention.

    model: the model, on the meta device or not.
    """
    config: Any = model.config
    # The kind of each layer, or None if all layers are of one kind. For example, all layers of
    # Mistral have the same sliding window.
    layer_types = getattr(config, "layer_types", None)
    supported = {"full_attention", "sliding_attention", "mlp", "moe"}
    unsupported = sorted({*(layer_types or ())} - supported)
    other = "choose another model"
    reasons = {
        f"has tokens that attend to later tokens; {other}": config.is_encoder_decoder
        or any(getattr(module, "is_causal", None) is False for module in model.modules()),
        f"has layers other than attention ({', '.join(unsupported) or 'recurrent'}); they need "
        f"kernels that reset their state at each document; {other}": (
            unsupported or (model._is_stateful and layer_types is None)
        ),
        # A model that does not use the registry ignores the attention function that is chosen, and
        # tokens attend to other documents.
        "does not use transformers' attention registry, which keeps documents apart; "
        f"{other}": not model._supports_attention_backend,
    }
    _refuse(model, reasons)


def _refuse(model: PreTrainedModel, reasons: Mapping[str, Any]) -> None:
    """Raise InputError with the first reason whose value is true."""
    for reason, applies in reasons.items():
        if applies:
            raise InputError(f"model: {type(model).__name__} {reason}")


def check(model: PreTrainedModel, length: int) -> None:
    """Raise InputError if packed attention does not support the model.

    The message names the unsupported part of the model.

    Args:
        model: The model, on the meta device or not.
        length: Pack length in tokens.
    """
    check_documents(model)
    config: Any = model.config
    text_config = config.get_text_config()
    sinks = [parameter for parameter, _ in model.named_parameters() if "sink" in parameter]
    cap = getattr(config, "attn_logit_softcapping", None)
    heads = getattr(text_config, "num_attention_heads", None)
    kv = getattr(text_config, "num_key_value_heads", None)
    longest = longest_rotated(text_config)
    other = "choose another model"
    # Map each reason for a rejection to a value that is true if this reason applies. All reasons
    # are formatted for every model, so formatting must not fail without `sinks` or without a `cap`.
    reasons = {
        f"has attention sinks ({', '.join(sinks[:1])}); they need kernels with a sink in "
        f"the softmax; {other}": sinks,
        f"has latent keys; they need kernels for keys wider than values; {other}": (
            getattr(config, "kv_lora_rank", None)
        ),
        f"caps its scores at {cap}, which no kernel here computes; {other}, or train from scratch "
        "without the cap (`model.config.attn_logit_softcapping: null`)": cap,
        f"has attention scores that torch's own attention does not compute; {other}": (
            not model._supports_sdpa and not hasattr(config, "attn_logit_softcapping")
        ),
        f"has `num_attention_heads: {heads}`, which is not a multiple of `num_key_value_heads: "
        f"{kv}`; change one of them in `model.config`": heads and kv and heads % kv,
        **{
            f"has {key} {getattr(config, key, None)}, but packed attention does not compute "
            f"dropout; set `model.config.{key}: 0.0` (dropout elsewhere, such as resid_pdrop and "
            "embd_pdrop of GPT-2, has keys of its own)": getattr(config, key, None)
            for key in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
        },
        f"has a longrope or dynamic rotation, which a document of more than {longest} tokens would "
        f"change for all documents in its batch; set `data.length` to {longest} or less": (
            longest is not None and length > longest
        ),
    }
    _refuse(model, reasons)


def admit_packed_sdpa(config: PretrainedConfig) -> None:
    """Allow transformers to build the model of `config` with `packed_sdpa`.

    transformers rejects names that contain "sdpa" for model classes whose attention scores can be
    capped. Here these classes are allowed, and `check` rejects models whose scores are capped.
    """
    for classes in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        model_class: Any = classes[type(config)]
        model_class._supports_sdpa = True


def longest_rotated(config: PretrainedConfig) -> int | None:
    """Return the maximum document length that does not change the rotation frequencies.

    With longrope or dynamic rotation, one longer document changes the frequencies for all documents
    of a batch. Return None if the frequencies do not depend on the document length.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") not in ("longrope", "dynamic"):
        return None
    return parameters.get("original_max_position_embeddings") or config.max_position_embeddings


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


def _registered(kernel: Kernel) -> Kernel:
    """Register an attention function that calls `kernel`, under the name of `kernel`.

    Return `kernel` itself, which maps q, k and v [T, heads, D] to the output [T, heads, D]. The
    registered function gets q, k and v as [1, heads, T, D] from a layer of transformers and changes
    their layout. It casts queries and keys to the dtype of v, because queries and keys may be FP32
    after a rotation with FP32 factors.
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
        packed = Packed(cu_seqlens, max_seqlen, documents, scale, window)
        return kernel(q, k, v, packed)[None], None

    AttentionInterface.register(kernel.__name__, attention)
    return kernel


@_registered
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

    mask = packed.documents
    if packed.window is not None:
        mask = mask.triu(1 - packed.window)
    output = F.scaled_dot_product_attention(
        by_pack(query), by_pack(key), by_pack(value), attn_mask=mask, scale=packed.scale
    )
    return output.transpose(1, 2).flatten(0, 1)


@_registered
# Not compiled, because a graph would be valid only for the document lengths of one microbatch.
@torch.compiler.disable
def packed_documents(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Compute attention by torch's CPU kernel, one document at a time.

    The work grows with the squares of the document lengths. With a mask, the kernel would compute
    complete packs instead. The kernel has no sliding window, so a layer with a window is computed
    by `packed_sdpa` with a mask.
    """
    if packed.window is not None:
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


@_registered
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


@_registered
def packed_fa4(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Compute attention by FlashAttention-4, in BF16 or FP16.

    A layer with a sliding window is computed by `packed_varlen`.
    """
    return _full_attention(flash_attention, query, key, value, packed)


@_registered
def packed_cudnn(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Compute attention by cuDNN's kernels for variable lengths, in BF16 or FP16.

    A layer with a sliding window is computed by `packed_varlen`.
    """
    return _full_attention(cudnn_attention, query, key, value, packed)


@_registered
def packed_triton(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Compute attention by our Triton kernels, in BF16 or FP16.

    A layer with a sliding window is computed by `packed_varlen`.
    """
    return _full_attention(triton_attention, query, key, value, packed)


def _full_attention(operator: Any, q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """Call `operator`, or `packed_varlen` if the layer has a sliding window."""
    if packed.window is not None:
        return packed_varlen(q, k, v, packed)
    return operator(q, k, v, packed.documents, packed.max_seqlen, packed.scale)[0]


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
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [T, H, D], and the logarithms of the softmax sums, FP32 [H, T].

    `ends` are cu_seqlens and `longest` is the pack length. Backward needs the logarithms.
    """
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
        ends: The argument of `flash_forward`.
        longest: The argument of `flash_forward`.
        scale: The argument of `flash_forward`.
    """
    options = _documents(ends, longest)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    backward = _flash()._flash_attn_bwd
    heads = k.shape[1]
    group = q.shape[1] // heads
    computes_parts = 1 < group <= WIDE and group * len(q) <= LONG * (len(ends) - 1)
    if not computes_parts:
        dq, dk, dv, *_ = backward(q, k, v, output, d_output, log_sums, scale, True, **options)
        return dq, dk, dv
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (t.new_empty(len(t), heads, group, t.shape[2]) for t in (k, v))
    grouped = [t.unflatten(1, (heads, group)) for t in (q, output, d_output, dq)]
    for member in range(group):
        member_q, member_output, member_d_output, member_dq = (t[:, :, member] for t in grouped)
        member_sums = log_sums.unflatten(0, (heads, group))[:, member]
        results = {"dq": member_dq, "dk": dk[:, :, member], "dv": dv[:, :, member]}
        backward(
            member_q,
            k,
            v,
            member_output,
            member_d_output,
            member_sums,
            scale,
            True,
            **results,
            **options,
        )
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
    """Return dq [T, H, D], and dk and dv [T, KV, D].

    If `flash_backward_in_parts` returns parts, the parts are summed in FP32 and rounded once.
    """
    dq, *parts = flash_backward_in_parts(d_output, q, k, v, output, log_sums, ends, longest, scale)
    dk, dv = (part.sum(2) if part.dim() == 4 else part for part in parts)
    return dq, dk, dv


@cache
def _flash() -> ModuleType:
    """Import FlashAttention-4 and return its module with the kernels."""
    # Load Transformer Engine before FlashAttention-4. If Transformer Engine were loaded afterwards,
    # it would load parts of another cuDNN and fail.
    transformer_engine.missing()
    with warnings.catch_warnings(action="ignore"):
        from flash_attn.cute import interface
    # While FlashAttention-4 compiles a kernel, its compiler warns of deprecated functions that
    # FlashAttention-4 calls, hundreds of times.
    warnings.filterwarnings("ignore", module=r"(cutlass|flash_attn\.cute)(\.|$)")
    return interface


def _documents(ends: Tensor, longest: int) -> dict[str, Any]:
    """Return the keyword arguments of FlashAttention-4 that describe the documents."""
    return {
        "cu_seqlens_q": ends,
        "cu_seqlens_k": ends,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


# ── cuDNN's kernels, through Transformer Engine ──
#
# The functions have the arguments of the functions for FlashAttention-4. cuDNN rounds the number of
# documents up to a power of two, or to a multiple of 512, and plans once for each. Its backward
# adds to dQ in an order that may differ from run to run.


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the results of `flash_forward`."""
    kernels = _cudnn()
    output, (log_sums, _) = kernels.fused_attn_fwd(
        True,
        longest,
        longest,
        ends,
        ends,
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        q.dtype,
        kernels.FusedAttnBackend["F16_arbitrary_seqlen"],
        **_layout(ends, scale),
    )
    return output, log_sums.squeeze(2).t().contiguous()


def cudnn_backward(
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
    """Return the results of `flash_backward`."""
    kernels = _cudnn()
    # The state of a random number generator, which only dropout reads.
    unused = ends.new_zeros(2, dtype=torch.int64)
    dq, dk, dv, *_ = kernels.fused_attn_bwd(
        longest,
        longest,
        ends,
        ends,
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        output,
        d_output.contiguous(),
        q.dtype,
        [log_sums.t().unsqueeze(2).contiguous(), unused],
        kernels.FusedAttnBackend["F16_arbitrary_seqlen"],
        do_format="thd",
        dqkv_layout="thd_thd_thd",
        **_layout(ends, scale),
    )
    return dq, dk, dv


def _cudnn() -> ModuleType:
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    return fused_attn


def _layout(ends: Tensor, scale: float) -> dict[str, Any]:
    """Return the keyword arguments of cuDNN's kernels: causal attention, documents side by side."""
    return {
        "qkv_layout": "thd_thd_thd",  # tokens, heads, head dimension
        "o_format": "thd",
        "attn_mask_type": "padding_causal",
        "window_size": (-1, 0),
        "cu_seqlens_q_padded": ends,
        "cu_seqlens_kv_padded": ends,
        "attn_scale": scale,
        "cuda_graph": torch.cuda.is_current_stream_capturing(),
    }


# ── Our Triton kernels ──
#
# The functions have the arguments of the functions for FlashAttention-4, but `bounds` is the result
# of `document_bounds`. They import the kernels when they are called, because Triton runs on few
# platforms. The kernels do not need `longest`.


def triton_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float
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
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `flash_backward`."""
    from pretrain.model.attention_kernel import attend_backward

    return attend_backward(d_output, q, k, v, output, log_sums, bounds, scale)


# ── Attention kernels as operators of torch ──
#
# torch.compile does not trace the code of an operator, so the compiled graph does not depend on the
# number of documents.


def _operator(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """Register `forward` and `backward` as operators of torch. Return the differentiable operator.

    The arguments are as in `flash_forward` and `flash_backward`, or as in `triton_forward` and
    `triton_backward`.
    """
    operator = torch.library.custom_op(f"pretrain::{name}", forward, mutates_args=())
    gradient = torch.library.custom_op(f"pretrain::{name}_backward", backward, mutates_args=())

    @operator.register_fake
    def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)

    @gradient.register_fake
    def _(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, documents, *ctx.numbers = inputs
        ctx.save_for_backward(q, k, v, *output, documents)
        ctx.set_materialize_grads(False)  # the log-sums have no gradient

    def differentiate(ctx: Any, d_output: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        return *gradient(d_output, *ctx.saved_tensors, *ctx.numbers), None, None, None

    operator.register_autograd(differentiate, setup_context=save)
    return operator


flash_attention = _operator("flash_attention", flash_forward, flash_backward)
cudnn_attention = _operator("cudnn_attention", cudnn_forward, cudnn_backward)
triton_attention = _operator("triton_attention", triton_forward, triton_backward)


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
    "packed_fa4": AttentionKernels(flash_forward, flash_backward_in_parts),
    "packed_cudnn": AttentionKernels(cudnn_forward, cudnn_backward),
    "packed_triton": AttentionKernels(triton_forward, triton_backward),
}
