"""A fused layer with products of different precision is the unfused layer with the same linears in low precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from foundation.attributes import holding
from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.gradients import attach_main_gradients
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import convert, fuse, low_precision_weights
from pretrain.precision.formats.definition import Role
from pretrain.precision.linear import PrecisionContext
from pretrain.precision.product import PlainProduct
from pretrain.precision.registry import PRECISIONS
from pretrain.precision.scope import decide, is_called
from pretrain.precision.settings import ActivePrecision, LowPrecisionSettings
from pretrain.settings.recipe import LossSettings
from tests.pretrain.model.fused.fused_models import ARCHITECTURES, build, inputs


def rounded(x: Tensor) -> Tensor:
    """Each value to four significant bits, so that rows that are stacked round as they do alone."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((16 * mantissa).round() / 16, exponent)


class RoundingProduct(PlainProduct):
    """x w^T of rounded operands, in forward and in backward."""

    def operand(self, role: Role, x: Tensor, *rest: Any, **options: Any) -> Tensor:
        return rounded(x)

    def weight_operands(self, matrix: Callable[[], Tensor], **options: bool) -> tuple[Tensor, Tensor]:
        return super().weight_operands(lambda: rounded(matrix()))


class RoundingBackend:
    """As much of a `Backend` as a forward and backward ask for."""

    def product(self, name: str, in_features: int, out_features: int, *, bias: bool) -> RoundingProduct:
        return RoundingProduct(name)

    def forward(self) -> Any:
        return nullcontext()

    def state(self) -> dict[str, Tensor]:
        return {}


def assembled(architecture: str, patterns: Sequence[str], *, fused: bool) -> PackedLanguageModel:
    hf, low = build(ARCHITECTURES[architecture]), RoundingBackend()
    context = PrecisionContext(low, torch.float32)
    packed = PackedLanguageModel(hf, "packed_sdpa", LossSettings(chunk=64), context).train()
    settings = LowPrecisionSettings(keep_bf16=tuple(patterns)).resolved("current")
    active = ActivePrecision("current", PRECISIONS["current"], "emulation", settings)
    layers = decoder_layers(hf)
    decisions = decide(hf, list(layers.values()), active)
    if fused:
        packed.fused = fuse(layers, {low: decisions}, Arithmetic(context))
        assert not packed.fused.left_out
    convert(hf, decisions, context, packed.fused)
    attach_main_gradients(packed, torch.float32, packed.fused.stacks if fused else ())
    kept = {name for name in decisions if any(is_called(name, pattern) for pattern in patterns)}
    in_low = [name for name, decision in decisions.items() if decision.reason is None]
    assert kept and kept.isdisjoint(in_low)
    assert low_precision_weights(packed) == sum(hf.get_parameter(f"{name}.weight").numel() for name in in_low)
    return packed


def computed(packed: PackedLanguageModel) -> tuple[Tensor, dict[str, Tensor]]:
    packed.zero_grad()
    for parameter in packed.parameters():
        parameter.main_grad.zero_()
    loss = packed(**inputs()) / 128
    loss.backward()
    return loss.detach(), {name: parameter.main_grad.clone() for name, parameter in packed.hf.named_parameters()}


@contextmanager
def in_bf16(packed: PackedLanguageModel) -> Iterator[None]:
    """Another precision's turn, which quantizes nothing."""
    with holding(packed.context, backend=None):
        assert low_precision_weights(packed) == 0
        yield


@pytest.mark.parametrize(
    ("architecture", "patterns"),
    [
        ("qwen3", ["down_proj"]),
        ("llama", ["layers.0.*", "o_proj"]),
        ("qwen2", ["mlp.gate_proj", "up_proj", "layers.1.self_attn.[qkv]_proj"]),
    ],
)
def test_it_is_the_unfused_layer_with_the_same_linears_in_low_precision(architecture: str, patterns: list[str]) -> None:
    fused, plain = (assembled(architecture, patterns, fused=each) for each in (True, False))
    (loss, gradients), (plain_loss, plain_gradients) = computed(fused), computed(plain)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-4, atol=0)
    for name, gradient in gradients.items():  # a value next to the middle of two codes may round to the other
        assert (gradient - plain_gradients[name]).norm() < 0.02 * plain_gradients[name].norm() + 1e-6, name
    with in_bf16(fused), in_bf16(plain):
        (other_loss, others), (plain_loss, plain_gradients) = computed(fused), computed(plain)
    torch.testing.assert_close(other_loss, plain_loss, rtol=1e-5, atol=0)
    for name, gradient in others.items():
        torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-3, atol=1e-5)
    changed = [name for name, gradient in gradients.items() if (gradient - others[name]).norm() > 0.005 * others[name].norm()]
    assert changed, "low precision was in use before"
