"""Which layers are fused in what, and what a fused model stands: weights of two kinds, copies, conversions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pretrain.model import huggingface as model
from pretrain.model.fused import layers as choice
from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.fused.stacked import By
from pretrain.model.gradients import attach_main_gradients
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import fuse, wrap_layers
from pretrain.precision.linear import PrecisionContext
from pretrain.precision.product import PlainProduct
from pretrain.precision.registry import PRECISIONS
from pretrain.precision.scope import LINEARS, Decision
from pretrain.precision.settings import ActivePrecision, LowPrecisionSettings
from pretrain.settings.recipe import LossSettings, ModelSettings
from tests.pretrain.model.fused.fused_models import ARCHITECTURES, build, inputs


def packed(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> PackedLanguageModel:
    whole = PackedLanguageModel(build(config), "packed_sdpa", LossSettings(chunk=64), PrecisionContext(None, dtype)).train()
    whole.fused = fuse(decoder_layers(whole.hf), {}, Arithmetic(whole.context))
    assert not whole.fused.left_out
    return whole


# ── Decisions ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Named:
    """A backend that notes what it is asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def product(self, name: str, in_features: int, out_features: int, *, bias: bool) -> PlainProduct:
        self.names.add(name)
        return PlainProduct(name)


def decided(hf: nn.Module, reasons: dict[str, str | None]) -> dict[str, Decision]:
    """For each linear, the reason that `reasons` has under a part of its name; None, low precision, where it has none."""
    linears = [name for name, module in hf.named_modules() if isinstance(module, LINEARS)]
    found = {name: next((why for part, why in reasons.items() if part in name), None) for name in linears}
    return {name: Decision(name, "bf16" if why else "delayed", why) for name, why in found.items()}


@pytest.mark.parametrize(
    ("reasons", "fused_layers", "said"),
    [
        ({}, {0, 1}, "2 of 2 layers"),
        ({"lm_head": "scope linear leaves the LM head out"}, {0, 1}, "2 of 2 layers"),
        ({"layers.1.": "keep_bf16_layers"}, {0, 1}, "2 of 2 layers"),
        ({"layers.0.mlp.down_proj": "keep_bf16: down_proj", "o_proj": "keep_bf16: o_proj"}, {0, 1}, "2 of 2 layers"),
        ({"layers.0.mlp": "odd", "layers.0.": "odder"}, {0, 1}, "2 of 2 layers"),
        (
            {"layers.0.mlp.up_proj": "odd"},
            {1},
            "1 of 2 layers; 1 not: gate_proj, up_proj are one product when fused, and would compute in different precisions",
        ),
    ],
)
def test_a_fused_layer_has_products_of_different_precisions_but_none_of_two(
    reasons: dict[str, str | None], fused_layers: set[int], said: str
) -> None:
    hf, backend = build(ARCHITECTURES["llama"]), Named()
    decisions = decided(hf, reasons)
    fused = fuse(decoder_layers(hf), {backend: decisions}, Arithmetic(PrecisionContext(None, torch.float32)))
    assert {int(name.rpartition(".")[2]) for name in fused.layers} == fused_layers
    assert fused.describe() == said
    low = [member for member in fused.members if decisions[member].reason is None]
    assert backend.names == {fused.members[member].name for member in low}
    assert fused.low_precision_weights(backend) == sum(hf.get_submodule(member).weight.numel() for member in low)
    assert fused.low_precision_weights(None) == 0


@pytest.mark.parametrize(
    ("setting", "device", "dtype", "triton", "by_kernels"),
    [
        ("auto", "cuda", torch.bfloat16, True, True),
        ("on", "cuda", torch.bfloat16, True, True),
        ("auto", "cuda", torch.bfloat16, False, None),
        ("on", "cuda", torch.bfloat16, False, False),
        ("auto", "cuda", torch.float32, True, None),
        ("on", "cuda", torch.float32, True, False),
        ("auto", "cpu", torch.bfloat16, True, None),
        ("auto", "mps", torch.bfloat16, True, None),
    ],
)
def test_bf16_on_a_gpu_is_fused_by_kernels_and_all_else_on_demand(
    setting: Any, device: str, dtype: torch.dtype, triton: bool, by_kernels: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "HAS_TRITON", triton)
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    active = ActivePrecision(name, PRECISIONS[name], "torch", LowPrecisionSettings())
    arithmetic, why_not = choice.choose_arithmetic(setting, active, device, PrecisionContext(None, dtype))
    assert why_not.startswith("nothing: ") if by_kernels is None else arithmetic.by == (By.KERNELS if by_kernels else By.FORMULAS)


# ── Weights ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def two_microbatches(whole: PackedLanguageModel) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    for index in range(2):
        whole.context.first_microbatch = index == 0
        loss = whole(**inputs(seed=index))
        loss.backward()
        losses.append(loss.item())
    return losses, {name: parameter.main_grad for name, parameter in whole.hf.named_parameters()}


def test_fp32_weights_compute_what_their_bf16_roundings_do_bit_for_bit(config: dict[str, Any]) -> None:
    """Every parameter is rounded before it is computed with, norms and biases too; all gradients are FP32 sums in both."""
    wide, rounded = packed(config, torch.bfloat16), packed(config, torch.bfloat16)
    model.round_weights(rounded.hf, torch.bfloat16)
    assert any(
        not torch.equal(w, r.float()) for w, r in zip(wide.parameters(), rounded.parameters(), strict=True) if w.dim() == 1
    )
    for whole in (wide, rounded):
        attach_main_gradients(whole, torch.float32, whole.fused.stacks)
    settings = ModelSettings(config=config)
    wrap_layers(wide, settings, cast_to=torch.bfloat16, compile_layers=False)
    (losses, gradients), (others, other_gradients) = two_microbatches(wide), two_microbatches(rounded)
    assert losses == others
    for name, gradient in gradients.items():
        assert torch.equal(gradient, other_gradients[name]), name


# ── Copies and conversions ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_that_was_moved_computes_the_same(config: dict[str, Any]) -> None:
    """Parameters that no longer lie together are put together in each use."""
    whole = packed(config)
    before = whole(**inputs()).item()
    address = whole.fused.products[0].weights.weights[0].data_ptr()
    whole.to("cpu", torch.float32)
    assert whole.fused.products[0].weights.weights[0].data_ptr() == address, "nothing was to be done"
    rotary = {name: buffer.clone() for name, buffer in whole.hf.named_buffers()}
    whole.double().float()
    for name, buffer in whole.hf.named_buffers():
        buffer.copy_(rotary[name])
    assert whole(**inputs()).item() == before
