"""Compare Transformer Engine's GEMMs on a GPU with the emulation.

Tests cover outputs, gradients, scales and cached weights over microbatches, recomputation and
restored state. The tests of the quantizers compare the quantized operands bit for bit.
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
TOKENS = 512
IN = 256
OUT = 384
# Relative errors. Both engines multiply the same operands and round to BF16. Tensor cores sum in
# another order, which sometimes changes a rounding. The forward of per-tensor scaling also sums in
# fewer bits.
SPLIT_ACCUMULATION = 2e-3
FAST_ACCUMULATION = 1e-2


@pytest.fixture(params=QUANTIZED)
def recipe(request: pytest.FixtureRequest) -> str:
    return needs(request.param)


@pytest.fixture
def delayed() -> str:
    return needs("delayed")


def make(engine_class: type[Any], name: str, **options: Any) -> GemmEngine:
    engine = "transformer_engine" if engine_class is TransformerEngine else "emulation"
    return engine_class(active_in(name, engine, **options), DEVICE)


def operands(seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draw an input [TOKENS, IN] with outliers and an output's gradient [TOKENS, OUT], in BF16."""
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
    """Return the output and the gradients of one forward and backward."""
    x = x.clone().requires_grad_()
    inputs = [x, weight] if bias is None else [x, weight, bias]
    context = linear.context
    with context.engine.forward(), overridden(context, first_microbatch=first):
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
    """Return the names of tensors that are not bit-equal."""
    assert actual.keys() == expected.keys(), (sorted(actual), sorted(expected))
    return [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_equal_the_emulation(recipe: str, bias: bool) -> None:
    """Only the order of sums differs."""
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
            results, expected = (
                microbatch(linear, x, gradient, weight, rest[0] if rest else None, first)
                for linear in linears
            )
            for key, value in results.items():
                error = relative_error(value, expected[key])
                assert error < limits.get(key, SPLIT_ACCUMULATION), (step, first, key, error)
            assert relative_error(results["y"], F.linear(x, weight, *rest)) > limits["y"], (
                "the operands were not quantized"
            )
        with torch.no_grad():
            weight.mul_(1.1)


def test_a_weight_is_quantized_once_a_step_and_not_by_evaluation(recipe: str) -> None:
    weight, _ = parameters()
    # The test doubles the weight. Without a margin, delayed scaling would clip it.
    engine = make(TransformerEngine, recipe, **({"margin": 1} if recipe == "delayed" else {}))
    linear = linear_of(engine, IN, OUT)
    x, _ = operands(1)

    def output(first: bool, grad: bool = True) -> Tensor:
        linear.context.first_microbatch = first
        with torch.set_grad_enabled(grad), engine.forward():
            return linear(x, weight).detach()

    output(True)  # This call computes delayed scaling's first scales.
    before = output(True)
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(output(False), before)
    evaluated = output(True, grad=False)
    assert relative_error(evaluated, before) > 0.5
    assert torch.equal(output(False), before), (
        "a forward without gradients replaced the step's quantized weight"
    )
    assert relative_error(output(True), 2 * before) < 0.05


@pytest.mark.parametrize(
    "options", [{}, {"amax_compute_algo": "most_recent"}, {"margin": 2, "fp8_format": "E4M3"}]
)
def test_delayed_histories_and_scales_equal_the_emulations_bits(
    delayed: str, options: dict[str, Any]
) -> None:
    weight, bias = parameters()
    states = []
    for engine_class in (TransformerEngine, EmulationEngine):
        engine = make(engine_class, delayed, amax_history_len=3, **options)
        linears = [linear_of(engine, IN, OUT, name=name, bias=True) for name in ("p", "q")]
        snapshots = []
        for number in range(5):  # The history has three entries.
            x, gradient = operands(number, scale=2.0**-number)
            with engine.forward():
                for linear in linears:
                    linear.context.first_microbatch = number % 2 == 0
                y = sum(linear(x, weight, bias) for linear in linears)
            snapshots.append(snapshot(engine))
            y.backward(gradient)
            snapshots.append(snapshot(engine))
        states.append(snapshots)
    for index, (state, emulated) in enumerate(zip(*states, strict=True)):
        when = f"{'backward' if index % 2 else 'forward'} of microbatch {index // 2}"
        assert not differing(state, emulated), (when, state, emulated)


@pytest.mark.parametrize("giant", [1e24, torch.inf])
def test_a_skipped_step_does_not_change_the_state(delayed: str, giant: float) -> None:
    weight, bias = parameters()
    results = []
    for skips_a_step in (True, False):
        engine = make(TransformerEngine, delayed, amax_history_len=5)
        linear = linear_of(engine, IN, OUT, bias=True)
        for number in range(3):
            microbatch(linear, *operands(number), weight, bias, True)
        if skips_a_step:
            before = linear.context.copied_state()
            x, gradient = operands(5)
            microbatch(linear, x, gradient * giant, weight, bias, True)
            linear.context.go_back(before)
        results.append(microbatch(linear, *operands(7), weight, bias, True) | snapshot(engine))
    assert not differing(*results)


class Layers:
    """Two layers of two linears with an activation between them, checkpointed or not."""

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
        """Train one step of two microbatches. Returns the outputs and the updated weights."""
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
        """Train three steps. Returns the results of `step` and the state, by name."""
        values = [
            value for number in range(3) for value in self.step(number, checkpointed=checkpointed)
        ]
        return {f"value {i}": value for i, value in enumerate(values)} | snapshot(self.engine)


def test_recomputing_a_layer_changes_nothing_bit_for_bit(recipe: str) -> None:
    plain = Layers(recipe).run(checkpointed=False)
    layers = Layers(recipe)
    checkpointed = layers.run(checkpointed=True)
    assert layers.recomputations == 3 * 2 * 2
    # NVFP4 rounds gradients stochastically, so only the first step's outputs are the same.
    if recipe == "nvfp4":
        plain, checkpointed = (
            {name: results[name] for name in ("value 0", "value 1")}
            for results in (plain, checkpointed)
        )
    assert not differing(checkpointed, plain)


def test_reset_restores_the_state_before_the_first_forward(recipe: str) -> None:
    if recipe == "nvfp4":
        pytest.skip("rounds gradients stochastically")
    expected = Layers(recipe).run(checkpointed=True)
    layers = Layers(recipe)
    fresh = [tuple(weight.detach().clone() for weight in pair) for pair in layers.weights]
    layers.step(8, checkpointed=True)
    # A step that runs out of memory has a forward without a backward.
    with layers.engine.forward():
        layers.engine.checkpoint(
            layers.layer, operands(9)[0].requires_grad_(), 0, True, again=layers.recomputing
        )
    layers.engine.reset()
    for pair, values in zip(layers.weights, fresh, strict=True):
        for weight, value in zip(pair, values, strict=True):
            weight.data.copy_(value)
    assert not differing(layers.run(checkpointed=True), expected)
