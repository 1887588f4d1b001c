"""Fused decoder layers: which are fused in what, and that they compute what transformers' own do, on the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pretrain.model.fused.arithmetic import Arithmetic, Implementation
from pretrain.model.gradients import attach_main_gradients
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import choose_arithmetic, fuse, wrap_layers
from pretrain.precision.product import PrecisionContext
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings
from pretrain.settings.recipe import LossSettings, ModelSettings
from tests.pretrain.model.fused.fused_models import (
    ARCHITECTURES,
    build,
    inputs,
    losses_and_gradients,
)


@pytest.fixture(params=ARCHITECTURES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A small model of each architecture that is fused."""
    return dict(ARCHITECTURES[request.param])


def packed(
    hf: PreTrainedModel, *, fused: bool = True, dtype: torch.dtype = torch.float32
) -> PackedLanguageModel:
    whole = PackedLanguageModel(
        hf, "packed_sdpa", LossSettings(chunk=64), PrecisionContext(None, dtype)
    ).train()
    if fused:
        whole.fused = fuse(decoder_layers(hf), {}, Arithmetic(whole.context))
        assert not whole.fused.left_out
    return whole


def one_pass(whole: PackedLanguageModel) -> tuple[float, dict[str, Tensor]]:
    losses, gradients = losses_and_gradients(whole, microbatches=1)
    return losses[0], gradients


# ── Which ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "activation"),
        ({"mlp_bias": True}, "bias"),
        ({"model_type": "olmo2"}, "Olmo2"),
    ],
)
def test_a_layer_that_cannot_be_fused_is_left_as_it_is_and_says_why(
    changes: dict[str, Any], reason: str
) -> None:
    hf = build(
        ARCHITECTURES["llama"]
        | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
        | changes
    )
    before = [layer.forward for layer in decoder_layers(hf).values()]
    fused = fuse(decoder_layers(hf), {}, Arithmetic(PrecisionContext(None, torch.float32)))
    assert not fused.layers and all(reason in why for why in fused.left_out.values())
    assert [layer.forward for layer in decoder_layers(hf).values()] == before


@pytest.mark.parametrize(
    ("setting", "device", "dtype", "implementation"),
    [
        ("auto", "cuda", torch.bfloat16, Implementation.KERNELS),
        ("on", "cuda", torch.bfloat16, Implementation.KERNELS),
        ("auto", "cuda", torch.float32, None),
        ("on", "cuda", torch.float32, Implementation.FORMULAS),
        ("auto", "cpu", torch.bfloat16, None),
        ("on", "cpu", torch.bfloat16, Implementation.FORMULAS),
    ],
)
def test_bf16_on_a_gpu_is_fused_by_kernels_and_all_else_on_demand(
    setting: Any, device: str, dtype: torch.dtype, implementation: Implementation | None
) -> None:
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    active = ActivePrecision(name, PRECISIONS[name], "torch", LowPrecisionSettings())
    arithmetic, _ = choose_arithmetic(setting, active, device, PrecisionContext(None, dtype))
    assert (arithmetic and arithmetic.implementation) == implementation


# ── What they compute ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("flash_attention_4_on_a_cpu")
@pytest.mark.parametrize("name", ["llama", "qwen3"])  # nothing normed; heads normed
def test_rotation_and_attention_in_one_are_what_they_are_apart(name: str) -> None:
    apart, in_one = (
        packed(build(ARCHITECTURES[name], backend=b)) for b in ("packed_sdpa", "packed_fa4")
    )
    (loss, gradients), (whole_loss, whole) = one_pass(apart), one_pass(in_one)
    assert whole_loss == pytest.approx(loss, rel=1e-6)
    largest = max(gradient.norm() for gradient in gradients.values())
    for parameter, gradient in gradients.items():
        assert (whole[parameter] - gradient).norm() <= 2e-6 * largest + 1e-6 * gradient.norm(), (
            parameter
        )
    with torch.no_grad():
        assert in_one(**inputs()).item() / 1000 == pytest.approx(loss, rel=1e-6)
    keeping = packed(build(ARCHITECTURES[name], backend="packed_fa4"))
    keeping.fused.arithmetic.keeps_rotated = True
    kept_loss, kept = one_pass(keeping)
    assert kept_loss == whole_loss and all(
        torch.equal(gradient, whole[parameter]) for parameter, gradient in kept.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_the_main_gradients_of_products_are_the_unfused_models(
    config: dict[str, Any], dtype: torch.dtype
) -> None:
    """Two microbatches, the second on the working copies of the first: the sum of both, in FP32."""
    whole, plain = packed(build(config), dtype=dtype), packed(build(config), fused=False)
    attach_main_gradients(whole, torch.float32, whole.fused.stacks)
    wrap_layers(whole, ModelSettings(config=config), cast_to=dtype, compile_layers=False)
    (losses, gradients), (plain_losses, plain_gradients) = (
        losses_and_gradients(whole),
        losses_and_gradients(plain),
    )
    close = 1e-5 if dtype == torch.float32 else 0.06
    assert losses == pytest.approx(plain_losses, rel=close)
    assert all(parameter.grad is None for parameter in whole.parameters())
    largest = max(gradient.norm() for gradient in plain_gradients.values())
    for name, gradient in plain_gradients.items():
        assert (gradients[name] - gradient).norm() <= close * (gradient.norm() + 0.01 * largest), (
            name
        )


# ── The model around them ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_packed_documents_a_layer_is_transformers_own(config: dict[str, Any]) -> None:
    """Generation has a cache and no packs."""
    texts = []
    for fused in (True, False):
        hf = build(config)
        packed(hf, fused=fused)
        hf.eval().set_attn_implementation("sdpa")
        texts.append(
            hf.generate(
                torch.tensor([[3, 5, 7]]), max_new_tokens=6, do_sample=False, pad_token_id=0
            )
        )
    assert torch.equal(*texts)
