"""A fused layer with products of different precision is the unfused layer with the same linears in low precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from foundation.attributes import holding
from pretrain.model.fused.arithmetic import Arithmetic, StackedProduct, StackedWeight
from pretrain.model.gradients import attach_main_gradients
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import convert, fuse, low_precision_weights
from pretrain.precision.linear import Backend, PrecisionContext
from pretrain.precision.registry import PRECISIONS
from pretrain.precision.scope import decide, is_called
from pretrain.precision.settings import ActivePrecision, LowPrecisionSettings
from pretrain.settings.recipe import LossSettings
from tests.pretrain.model.fused.fused_models import ARCHITECTURES, build, inputs


def rounded(x: Tensor) -> Tensor:
    """Each value to four significant bits, so that rows that are stacked round as they do alone."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((16 * mantissa).round() / 16, exponent)


class RoundedProducts(torch.autograd.Function):
    """x w^T of rounded operands, in forward and in backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rounded(x), rounded(weight))
        return rounded(x) @ rounded(weight).t()

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return rounded(dy) @ weight, rounded(dy).t() @ x


class RoundingBackend:
    """As much of a `Backend` as a forward and backward ask for."""

    def product(self, name: str, in_features: int, out_features: int, *, bias: bool) -> Callable[..., Tensor]:
        return lambda x, weight, bias, *, first_microbatch, context=None: (
            RoundedProducts.apply(x, weight) + (0 if bias is None else bias)
        )

    def forward(self) -> Any:
        return nullcontext()

    def state(self) -> dict[str, Tensor]:
        return {}


class RoundingProduct(StackedProduct):
    low = False  # of the forward under way, and of its backward

    def begin(self, x: Tensor) -> None:
        context = self._arithmetic.context
        self.low = context.low_precision and context.backend in self.computed_low_by

    def operand(self, x: Tensor) -> Tensor:
        return rounded(x) if self.low else x

    gradient_operand = operand

    def _matrix(self, *, refresh: bool) -> Tensor:
        matrix = super()._matrix(refresh=refresh)
        return rounded(matrix) if self.low else matrix


class RoundingArithmetic(Arithmetic):
    """What is in front of a product writes that product's operand."""

    def product(self, name: str, members: tuple[str, ...], weights: StackedWeight, *, low_precision: Sequence[Backend] = ()):
        product = RoundingProduct(name, members, weights, self)
        product.computed_low_by = tuple(low_precision)
        return product

    def norm(self, x: Tensor, norm: Any, product: StackedProduct, *residual: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, statistics = super().norm(x, norm, product, *residual)
        return product.operand(y), statistics

    def activate(self, hidden: Tensor, gate_up: StackedProduct, down: StackedProduct) -> tuple[Tensor, None]:
        activated, kept = super().activate(hidden, gate_up, down)
        return down.operand(activated), kept

    def activate_backward(self, *given: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        d_hidden, activated, biases = super().activate_backward(*given)
        gate_up, down = given[-2:]
        return gate_up.gradient_operand(d_hidden), down.operand(activated), biases


def assembled(architecture: str, patterns: Sequence[str], *, fused: bool) -> PackedLanguageModel:
    hf, low = build(ARCHITECTURES[architecture]), RoundingBackend()
    context = PrecisionContext(low, torch.float32)
    packed = PackedLanguageModel(hf, "packed_sdpa", LossSettings(chunk=64), context).train()
    settings = LowPrecisionSettings(keep_bf16=tuple(patterns)).resolved("current")
    active = ActivePrecision("current", PRECISIONS["current"], "emulation", settings)
    layers = decoder_layers(hf)
    decisions = decide(hf, list(layers.values()), active)
    if fused:
        packed.fused = fuse(layers, {low: decisions}, RoundingArithmetic(context))
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
