"""Attention with capped scores (Gemma 2) or with sinks (gpt-oss).

The scores of a query are s = scale q k^T. With a cap, cap tanh(s / cap) replaces s. A sink is a
parameter of each query head. It is an additional score in softmax, without a key and a value:

    p = exp(s) / (exp(sink) + sum exp(s))

Layers of transformers pass the cap and the sinks to the attention function. `Scores.attend`
computes the formula in torch, on any device. On a GPU, the function that `flash_scores` returns
computes it with the kernels of FlashAttention-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

# Attention implementations that compute capped scores and sinks.
_IMPLEMENTATIONS = ("packed_fa4", "packed_documents", "packed_sdpa")
# Supported types of models with sinks. The tests compare them with transformers.
WITH_SINKS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa")
# Name of the change of scores in messages.
SINKS = "attention sinks"


def admit_packed_sdpa(config: PretrainedConfig) -> None:
    """Allow transformers to build the model of `config` with `packed_sdpa`.

    transformers rejects names that contain "sdpa" for model classes whose attention scores can be
    capped or have sinks. `packed_sdpa` computes both.
    """
    for classes in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        model_class: Any = classes[type(config)]
        model_class._supports_sdpa = True


class Scores(NamedTuple):
    """Changes of the scores of a layer. A cap of 0.0 means that there is no cap."""

    cap: float
    sinks: Tensor | None  # [heads]

    @classmethod
    def of(cls, cap: float | None, sinks: Tensor | None) -> Scores | None:
        """Return the changes that a layer passes to its attention, or None if there are none."""
        return None if cap is None and sinks is None else cls(cap or 0.0, sinks)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Return the output [packs, heads, T, D], computed in FP32 and rounded to the dtype of v.

        q, k and v are [packs, heads, T, D]. `mask` [packs, 1, T, T] is True if a query attends to a
        key.
        """
        scores = q.float() @ k.float().mT * scale
        if self.cap:
            scores = (scores / self.cap).tanh() * self.cap
        scores = scores.masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        p = scores.softmax(-1)[..., : k.shape[-2]]
        return (p @ v.float()).to(v.dtype)


def sink_in(model: PreTrainedModel) -> str | None:
    """Return the name of a parameter that is a sink, or None if the model has no sinks."""
    return next((name for name, _ in model.named_parameters() if "sink" in name), None)


def changed_scores(model: PreTrainedModel) -> str:
    """Return the change of the model's scores in words, or "" if they are not changed."""
    if sink_in(model):
        return SINKS
    return "capped scores" if _cap_in(model.config) else ""


def _cap_in(config: Any) -> float | None:
    """Return the cap of scores, or None. Models ignore a key that their class does not declare."""
    has_cap = hasattr(type(config), "attn_logit_softcapping")
    return config.attn_logit_softcapping if has_cap else None


def unsupported_cap(config: Any) -> str | None:
    """Return the reason why scores cannot be capped as the configuration says, or None."""
    cap = _cap_in(config)
    if cap is None or 0 < cap < math.inf:
        return None
    return f"has `attn_logit_softcapping: {cap}`, which must be a positive number or null"


def scores_obstacle(name: str, case: Any) -> str | None:
    """Return the reason why an attention implementation cannot compute changed scores, or None.

    name: the implementation's name in transformers.
    case: a `pretrain.model.attention_backends.Case` with changed scores.
    """
    if name not in _IMPLEMENTATIONS:
        return f"does not compute {case.changed_scores} (set model.attention: auto)"
    if case.device_type != "cuda" or case.gpu[0] == 9 or case.head_dim <= 128:
        return None
    return f"has no backward of {case.changed_scores} for heads of more than 128 values on this GPU"


def no_kernel_message(changed: str, reason: str) -> str:
    """Return the error message for a GPU without kernels for changed scores.

    changed: the change of the scores in words.
    reason: the reason why flash_attn cannot run.
    """
    return (
        f"model: on a GPU, only FlashAttention-4 computes {changed}, but flash_attn {reason}. If "
        "documents are short, set `model.attention: sdpa`, which keeps the scores of all layers in "
        "memory"
    )


# ── FlashAttention-4, with or without a sliding window ──

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_seqlens, int max_seqlen, float scale, "
    "float cap, int window"
)
_GRADIENTS = "Tensor, Tensor, Tensor, Tensor"


def flash_scores(flash: Callable[[], Any]) -> Callable[[Tensor, Tensor, Tensor, Any], Tensor]:
    """Register an operator of torch for changed scores, and return a function that calls it.

    The function takes q, k and v [T, heads, D] and a `Packed`, and returns the output. The
    arguments of the operator are q, k, v, the sinks or None, cu_seqlens, the pack length, the
    scale, the cap or 0.0, and the sliding window or 0. It returns the output, and the logarithms of
    the softmax sums [heads, T].

    flash: function that returns the module with the kernels of FlashAttention-4.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *layout: Any) -> Any:
        options = {"learnable_sink": sinks, "return_lse": True, **_options(*layout)}
        return flash()._flash_attn_fwd(q, k, v, **options)[:2]

    def backward(d_output: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v and the sinks. Without sinks, the last one is empty."""
        output, log_sums, q, k, v, sinks, *layout = inputs
        options = {"learnable_sink": sinks, **_options(*layout)}
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        gradients = flash()._flash_attn_bwd(q, k, v, output, d_output, log_sums, **options)
        return gradients if sinks is not None else (*gradients, q.new_empty(0))

    name = "pretrain::packed_fa4_scores"
    schema = f"({_INPUTS}) -> (Tensor, Tensor)"
    operator = torch.library.custom_op(name, forward, mutates_args=(), schema=schema)
    schema = f"(Tensor d_output, Tensor output, Tensor log_sums, {_INPUTS}) -> ({_GRADIENTS})"
    gradient = torch.library.custom_op(f"{name}_backward", backward, mutates_args=(), schema=schema)

    @operator.register_fake
    def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)

    @gradient.register_fake
    def _(*inputs: Any) -> tuple[Tensor, ...]:
        # q, k, v and the sinks follow three other tensors.
        *states, sinks = inputs[3:7]
        with_sinks = states[0].new_empty(0) if sinks is None else sinks
        # A gradient has the same strides as its tensor. q, k and v may be transposed views.
        return tuple(map(torch.empty_like, (*states, with_sinks)))

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*output, *inputs[:5])
        ctx.numbers = inputs[5:]
        ctx.set_materialize_grads(False)  # the log-sums have no gradient

    def differentiate(ctx: Any, d_output: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        *states, d_sinks = gradient(d_output, *ctx.saved_tensors, *ctx.numbers)
        return *states, d_sinks if ctx.needs_input_grad[3] else None, *(None,) * 5

    operator.register_autograd(differentiate, setup_context=save)

    def attend(q: Tensor, k: Tensor, v: Tensor, packed: Any) -> Tensor:
        cap, sinks = packed.scores
        numbers = (packed.max_seqlen, packed.scale, cap, packed.window or 0)
        return cast(Tensor, operator(q, k, v, sinks, packed.cu_seqlens, *numbers)[0])

    return attend


def _options(
    cu_seqlens: Tensor, max_seqlen: int, scale: float, cap: float, window: int
) -> dict[str, Any]:
    """Return keyword arguments of FlashAttention-4."""
    return {
        "softmax_scale": scale,
        "causal": True,
        "softcap": cap,
        "window_size_left": window - 1 if window else None,
        **flash_documents(cu_seqlens, max_seqlen),
    }


def flash_documents(cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Any]:
    """Return the keyword arguments of FlashAttention-4 that describe the documents."""
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
    }
