"""Transformer Engine's products on a GPU: against the emulation, through microbatches, recomputation and restored state.

That its quantized operands are the emulation's bit for bit is tested with the quantizers; here it is outputs, gradients, scales
and who owns what.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foundation.overrides import overridden
from pretrain.precision.emulation import EmulationEngine
from pretrain.precision.gemm import GemmEngine
from pretrain.precision.product import LinearState
from pretrain.precision.transformer_engine import TransformerEngine
from tests.gpu.conftest import needs, relative_error
from tests.pretrain.conftest import QUANTIZED, active_in, linear_of

DEVICE = torch.device("cuda")
TOKENS, IN, OUT = 512, 256, 384
# Both sides round the same operands' products to BF16. Tensor cores add up in another order, which decides a rounding now and
# then; the forward of per-tensor scaling adds up in fewer bits as well.
SPLIT_ACCUMULATION, FAST_ACCUMULATION = 2e-3, 1e-2


@pytest.fixture(params=QUANTIZED)
def recipe(request: pytest.FixtureRequest) -> str:
    return needs(request.param)


@pytest.fixture
def delayed() -> str:
    return needs("delayed")


def make(engine_class: type[Any], name: str, **options: Any) -> GemmEngine:
    by = "transformer_engine" if engine_class is TransformerEngine else "emulation"
    return engine_class(active_in(name, by, **options), DEVICE)


def operands(seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Input [TOKENS, IN] and gradient of the output [TOKENS, OUT], BF16, with the outliers that activations have."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x, gradient = (
        torch.randn(TOKENS, size, device=DEVICE, generator=generator) * scale for size in (IN, OUT)
    )
    x[:, 3] *= 30
    return x.bfloat16(), (gradient * 1e-3).bfloat16()


def parameters(bias: bool = True) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(99)
    weight = torch.randn(OUT, IN, device=DEVICE, generator=generator) * 0.05
    values = [weight, torch.randn(OUT, device=DEVICE, generator=generator)] if bias else [weight]
    return [value.bfloat16().requires_grad_() for value in values]


def microbatch(
    linear: LinearState,
    x: Tensor,
    gradient: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    first: bool,
) -> dict[str, Tensor]:
    """Return output and gradients of one forward and backward."""
    x = x.clone().requires_grad_()
    inputs = [x, weight] if bias is None else [x, weight, bias]
    context = linear.context
    with context.backend.forward(), overridden(context, first_microbatch=first):
        y = linear(*inputs)
    for tensor in inputs:
        tensor.grad = None
    y.backward(gradient)
    return {"y": y.detach()} | dict(
        zip(("dx", "dw", "db"), [tensor.grad.clone() for tensor in inputs], strict=False)
    )


def snapshot(engine: GemmEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.state().items()}


def differing(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of what is not bit-equal."""
    assert actual.keys() == expected.keys(), (sorted(actual), sorted(expected))
    return [name for name, other in expected.items() if not torch.equal(actual[name], other)]


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_the_emulations_but_for_the_order_of_additions(
    recipe: str, bias: bool
) -> None:
    options = {"disable_stochastic_rounding": True} if recipe == "nvfp4" else {}
    weight, *rest = parameters(bias)
    limits = {"y": FAST_ACCUMULATION if recipe in ("delayed", "current") else SPLIT_ACCUMULATION}
    linears = [
        linear_of(make(engine_class, recipe, **options), IN, OUT, bias=bias)
        for engine_class in (TransformerEngine, EmulationEngine)
    ]
    for step in range(2):
        for first in (True, False, False):
            x, gradient = operands(step * 2 + first)
            ours, emulated = (
                microbatch(linear, x, gradient, weight, rest[0] if rest else None, first)
                for linear in linears
            )
            for key, value in ours.items():
                error = relative_error(value, emulated[key])
                assert error < limits.get(key, SPLIT_ACCUMULATION), (step, first, key, error)
            assert relative_error(ours["y"], F.linear(x, weight, *rest)) > limits["y"], (
                "as if nothing were quantized"
            )
        with torch.no_grad():
            weight.mul_(1.1)


def test_a_weight_is_quantized_once_a_step_and_evaluation_leaves_the_copy_alone(
    recipe: str,
) -> None:
    weight, _ = parameters()
    # Room for a weight of twice the size: delayed scaling would clip it otherwise.
    engine = make(TransformerEngine, recipe, **({"margin": 1} if recipe == "delayed" else {}))
    linear = linear_of(engine, IN, OUT)
    x, _ = operands(1)

    def output(first: bool, grad: bool = True) -> Tensor:
        linear.context.first_microbatch = first
        with torch.set_grad_enabled(grad), engine.forward():
            return linear(x, weight).detach()

    output(True)  # makes delayed scaling's first scales
    before = output(True)
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(output(False), before)
    evaluated = output(True, grad=False)
    assert relative_error(evaluated, before) > 0.5
    assert torch.equal(output(False), before), (
        "a forward without gradients has replaced the step's quantized weight"
    )
    assert relative_error(output(True), 2 * before) < 0.05


@pytest.mark.parametrize(
    "options", [{}, {"amax_compute_algo": "most_recent"}, {"margin": 2, "fp8_format": "E4M3"}]
)
def test_delayed_histories_and_scales_are_the_emulations_bit_for_bit(
    delayed: str, options: dict[str, Any]
) -> None:
    weight, bias = parameters()
    states = []
    for engine_class in (TransformerEngine, EmulationEngine):
        engine = make(engine_class, delayed, amax_history_len=3, **options)
        linears = [linear_of(engine, IN, OUT, name=name, bias=True) for name in ("p", "q")]
        seen = []
        for number in range(5):  # more than the history is long
            x, gradient = operands(number, scale=2.0**-number)
            with engine.forward():
                for linear in linears:
                    linear.context.first_microbatch = number % 2 == 0
                y = sum(linear(x, weight, bias) for linear in linears)
            seen.append(snapshot(engine))
            y.backward(gradient)
            seen.append(snapshot(engine))
        states.append(seen)
    for moment, (ours, emulated) in enumerate(zip(*states, strict=True)):
        when = f"{'backward' if moment % 2 else 'forward'} of microbatch {moment // 2}"
        assert not differing(ours, emulated), (when, ours, emulated)


@pytest.mark.parametrize("giant", [1e24, torch.inf])
def test_a_step_that_is_left_out_leaves_no_trace(delayed: str, giant: float) -> None:
    weight, bias = parameters()
    results = []
    for left_out in (True, False):
        engine = make(TransformerEngine, delayed, amax_history_len=5)
        linear = linear_of(engine, IN, OUT, bias=True)
        linear.context.backends = [engine]
        for number in range(3):
            microbatch(linear, *operands(number), weight, bias, True)
        if left_out:
            before = linear.context.copied_state()
            x, gradient = operands(5)
            microbatch(linear, x, gradient * giant, weight, bias, True)
            linear.context.go_back(before)
        results.append(microbatch(linear, *operands(7), weight, bias, True) | snapshot(engine))
    assert not differing(*results)


class Layers:
    """Two layers of two products with something between them, checkpointed or not."""

    def __init__(self, name: str) -> None:
        options = {"amax_history_len": 3} if name == "delayed" else {}
        self.engine = make(TransformerEngine, name, **options)
        self.linears = [
            (
                linear_of(self.engine, IN, OUT, name=f"{index}.up"),
                linear_of(self.engine, OUT, IN, name=f"{index}.down"),
            )
            for index in range(2)
        ]
        weight, _ = parameters()
        self.weights = [
            (weight.detach().clone().requires_grad_(), weight.detach().T.clone().requires_grad_())
            for _ in range(2)
        ]
        self.recomputations = 0

    def layer(self, x: Tensor, index: int, first: bool) -> Tensor:
        up, down = self.linears[index]
        wide, narrow = self.weights[index]
        up.context.first_microbatch = down.context.first_microbatch = first
        hidden = F.silu(up(x, wide)) * 0.5
        return x + 1.5 * down(hidden, narrow)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        self.recomputations += 1
        yield

    def step(self, number: int, *, checkpointed: bool) -> list[Tensor]:
        outputs = []
        for first in (True, False):
            x = operands(2 * number + first)[0].requires_grad_()
            with self.engine.forward():
                for index in range(2):
                    if checkpointed:
                        x = self.engine.checkpoint(
                            self.layer, x, index, first, again=self.recomputing
                        )
                    else:
                        x = self.layer(x, index, first)
            (x.float().square().sum() / TOKENS).backward()
            outputs.append(x.detach())
        with torch.no_grad():
            for weight in (weight for pair in self.weights for weight in pair):
                weight -= 1e-4 * weight.grad
                weight.grad = None
        return [*outputs, *(weight.detach().clone() for pair in self.weights for weight in pair)]

    def run(self, *, checkpointed: bool) -> dict[str, Tensor]:
        found = [
            value for number in range(3) for value in self.step(number, checkpointed=checkpointed)
        ]
        return {f"value {i}": value for i, value in enumerate(found)} | snapshot(self.engine)


def test_recomputing_a_layer_changes_nothing_bit_for_bit(recipe: str) -> None:
    plain = Layers(recipe).run(checkpointed=False)
    layers = Layers(recipe)
    checkpointed = layers.run(checkpointed=True)
    assert layers.recomputations == 3 * 2 * 2
    # rounds gradients at random, so only the first step's outputs can be the same
    if recipe == "nvfp4":
        plain, checkpointed = (
            {name: found[name] for name in ("value 0", "value 1")}
            for found in (plain, checkpointed)
        )
    assert not differing(checkpointed, plain)


def test_after_a_reset_everything_is_as_before_the_first_forward(recipe: str) -> None:
    if recipe == "nvfp4":
        pytest.skip("rounds gradients stochastically")
    expected = Layers(recipe).run(checkpointed=True)
    layers = Layers(recipe)
    fresh = [tuple(weight.detach().clone() for weight in pair) for pair in layers.weights]
    layers.step(8, checkpointed=True)
    # as a step that runs out of memory: forward done, backward never
    with layers.engine.forward():
        layers.engine.checkpoint(layers.layer, operands(9)[0].requires_grad_(), 0, True)
    layers.engine.reset()
    for pair, values in zip(layers.weights, fresh, strict=True):
        for weight, value in zip(pair, values, strict=True):
            weight.data.copy_(value)
    assert not differing(layers.run(checkpointed=True), expected)
