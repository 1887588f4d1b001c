"""Engines and contexts of tests of training, an Accelerator, and attention on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pretrain.model import attention
from pretrain.precision.emulation import EmulationEngine
from pretrain.precision.gemm import GemmEngine, TorchGemm
from pretrain.precision.product import LinearPass, LinearState, PrecisionContext
from pretrain.precision.settings import (
    PRECISIONS,
    ActivePrecision,
    LowPrecisionSettings,
    configured,
)

QUANTIZED = [name for name, precision in PRECISIONS.items() if precision.quantized]
# Quantized precisions that Transformer Engine computes on some GPU.
ON_TE = [name for name in QUANTIZED if PRECISIONS[name].te_available]


def active_in(precision: str, engine: str = "emulation", **fp8_config: Any) -> ActivePrecision:
    """Return the precision as `selection` returns it for a run."""
    used = configured(precision, LowPrecisionSettings(**fp8_config))
    return ActivePrecision(precision, used, engine)


def to_nearest(precision: str) -> dict[str, bool]:
    """Return the option that turns stochastic rounding off, if the precision has it."""
    return dict.fromkeys(
        {"disable_stochastic_rounding"} & PRECISIONS[precision].options.keys(), True
    )


def active_everywhere(
    precision: str, engine: str, keep: tuple[str, ...] = (), scope: str = "linear+head"
) -> ActivePrecision:
    """Return a precision for all layers, without stochastic rounding."""
    every = {"scope": scope, "keep_bf16_layers": {"last": 0}, "keep_bf16": keep}
    return active_in(precision, engine, **every, **to_nearest(precision))


def emulation_of(precision: str, **fp8_config: Any) -> EmulationEngine:
    """Return the engine that emulates `precision` on the CPU."""
    return EmulationEngine(active_in(precision, **fp8_config), torch.device("cpu"))


def context_of(
    engine: GemmEngine, dtype: torch.dtype = torch.bfloat16, **state: Any
) -> PrecisionContext:
    """Return the context of a model that computes in the precision of `engine`."""
    active = ActivePrecision(engine.precision.name, engine.precision, "emulation")
    return PrecisionContext(dtype, {active.name: engine}, active, **state)


def linear_of(
    engine: GemmEngine,
    in_features: int,
    out_features: int,
    *,
    name: str = "layer",
    bias: bool = False,
) -> LinearState:
    """Return a linear layer that `engine` computes, with a context in which a forward is under way.

    The caller enters the engine's own `forward` where delayed scaling needs it.
    """
    linear = LinearState(name, context_of(engine, low_precision=True))
    linear.create_gemm(in_features, out_features, bias=bias)
    return linear


def call_of(name: str, ends: Tensor | None = None) -> LinearPass:
    """Return a pass of the linear `name`, as probes get it. `ends` are those of experts."""
    context = PrecisionContext(torch.bfloat16)
    return LinearPass(TorchGemm(name), context, differentiable=True, ends=ends)


def llama(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> PreTrainedModel:
    """Return a plain transformers model with random weights, in training mode."""
    torch.manual_seed(0)
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    settings = AutoConfig.for_model("llama", **(config | changes))
    return AutoModelForCausalLM.from_config(settings).to(dtype).train()


def batch_of(rows: int = 2, tokens: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Return random tokens for `llama`, which are their own labels."""
    ids = torch.randint(64, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


@contextmanager
def on_a(device: str) -> Iterator[Accelerator]:
    """Yield a new Accelerator on `device`, "cpu" or "cuda".

    accelerate keeps its state in the process. The state is reset before and after.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=device == "cpu", mixed_precision="no")
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with on_a("cpu") as accelerator:
        yield accelerator


def attention_of(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention probabilities [heads, T, T] and the output [T, heads, D].

    A query attends to its document up to itself. q has the shape [T, heads, D]. k and v may have
    fewer heads, as in grouped-query attention.
    """
    k, v = (states.repeat_interleave(q.shape[1] // states.shape[1], dim=1) for states in (k, v))
    mask = attention.document_mask(cu_seqlens, len(q), len(q))[0]
    scores = scale * torch.einsum("thd,shd->hts", q, k)
    p = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return p, torch.einsum("hts,shd->thd", p, v).contiguous()


def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    d_output: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> list[Tensor]:
    """Check `output`, and return the gradients of q, k and v."""
    p, expected = attention_of(q, k, v, cu_seqlens, scale)
    assert torch.equal(output, expected)
    heads = k.shape[1]
    group = q.shape[1] // heads
    k, v = (states.repeat_interleave(group, dim=1) for states in (k, v))
    d_p = torch.einsum("thd,shd->hts", d_output, v)
    d_s = scale * p * (d_p - (d_output * output).sum(-1).T[:, :, None])
    dk = torch.einsum("hts,thd->shd", d_s, q)
    dv = torch.einsum("hts,thd->shd", p, d_output)
    # Query heads of a group share a head of k and v.
    dk, dv = (gradient.unflatten(1, (heads, group)).sum(2) for gradient in (dk, dv))
    dq = torch.einsum("hts,shd->thd", d_s, k)
    return [gradient.contiguous() for gradient in (dq, dk, dv)]


RESULTS = ("output", "dq", "dk", "dv")


def attend_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_output: Tensor,
    scale: float,
    window: int | None = None,
) -> dict[str, Tensor]:
    """Return `RESULTS` and the log-sums [heads, T] of causal attention in one document, in FP64."""
    leaves = [states.double().requires_grad_() for states in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    query, key, value = (
        states.repeat_interleave(repeats, 1).transpose(0, 1)
        for states, repeats in zip(leaves, (1, group, group), strict=True)
    )
    place = torch.arange(len(q), device=q.device)
    distance = place[:, None] - place
    is_hidden = (distance < 0) | (distance >= (window or len(q)))
    scores = (scale * query @ key.transpose(1, 2)).masked_fill(is_hidden, -torch.inf)
    output = (scores.softmax(-1) @ value).transpose(0, 1)
    gradients = torch.autograd.grad(output, leaves, d_output.double())
    results = dict(zip(RESULTS, (output.detach(), *gradients), strict=True))
    return results | {"log_sums": scores.logsumexp(-1).detach()}


@pytest.fixture
def flash_attention_4_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the two functions of FlashAttention-4 by formulas with the same interface.

    Tests may change the returned functions.
    """

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        softmax_scale: float,
        causal: bool,
        return_lse: bool,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        _, output = attention_of(q, k, v, cu_seqlens_q, softmax_scale)
        return output, q.new_zeros(q.shape[1], len(q), dtype=torch.float32)

    def backward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        scale: float,
        causal: bool,
        *,
        cu_seqlens_q: Tensor,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        assert lse.shape == (q.shape[1], len(q))
        gradients = attention_gradients(q, k, v, out, dout, cu_seqlens_q, scale)
        buffers = [options.get(name) for name in ("dq", "dk", "dv")]
        return tuple(
            gradient if into is None else into.copy_(gradient)
            for gradient, into in zip(gradients, buffers, strict=True)
        )

    kernels = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setattr(attention, "flash_kernels", lambda: kernels)
    return kernels


@pytest.fixture
def cudnn_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace Transformer Engine's two functions of cuDNN by formulas with the same interface."""
    keys = ("attn_scale", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    common = {"attn_mask_type": "padding_causal", "window_size": (-1, 0), "cuda_graph": False}
    common |= {"qkv_layout": "thd_thd_thd", "o_format": "thd"}

    def check(
        options: dict[str, Any], ends: Tensor, dtype: torch.dtype, kind: str, q: Tensor, **more: str
    ) -> float:
        """Check the arguments of both functions, and return the scale.

        `more` are the options that only one of them has.
        """
        scale, of_q, of_kv = (options.pop(name) for name in keys)
        assert of_q is of_kv is ends and kind == "kernel" and dtype == q.dtype
        assert options == common | more
        return scale

    def forward(
        is_training: bool,
        longest_q: int,
        longest_k: int,
        ends: Tensor,
        ends_k: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dtype: torch.dtype,
        kind: str,
        **options: Any,
    ) -> tuple[Tensor, list[Tensor | None]]:
        scale = check(options, ends, dtype, kind, q)
        assert is_training and longest_q == longest_k and ends is ends_k
        _, output = attention_of(q, k, v, ends, scale)
        log_sums = torch.arange(len(q) * q.shape[1], dtype=torch.float32)
        return output, [log_sums.view(len(q), q.shape[1], 1), None]

    def backward(
        longest_q: int,
        longest_k: int,
        ends: Tensor,
        ends_k: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        d_output: Tensor,
        dtype: torch.dtype,
        saved: list[Tensor],
        kind: str,
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        scale = check(options, ends, dtype, kind, q, do_format="thd", dqkv_layout="thd_thd_thd")
        log_sums, random_state = saved
        assert random_state.dtype == torch.int64 and random_state.shape == (2,)
        assert log_sums.flatten().tolist() == list(range(len(q) * q.shape[1]))
        return *attention_gradients(q, k, v, output, d_output, ends, scale), None

    kernels = SimpleNamespace(
        fused_attn_fwd=forward,
        fused_attn_bwd=backward,
        FusedAttnBackend={"F16_arbitrary_seqlen": "kernel"},
    )
    monkeypatch.setattr(attention, "_cudnn", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
