"""Compare Transformer Engine's GEMMs on a GPU with the emulation.

Tests cover outputs, gradients, scales and cached weights over microbatches. The tests of the
quantizers compare the quantized operands bit for bit.
"""

from __future__ import annotations

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


def parameters() -> list[Tensor]:
    """Draw a weight [OUT, IN] and a bias [OUT], in BF16."""
    generator = torch.Generator(DEVICE).manual_seed(99)
    weight = torch.randn(OUT, IN, device=DEVICE, generator=generator) * 0.05
    bias = torch.randn(OUT, device=DEVICE, generator=generator)
    return [value.bfloat16().requires_grad_() for value in (weight, bias)]


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_equal_the_emulation(recipe: str, bias: bool) -> None:
    """Only the order of sums differs."""
    options = {"disable_stochastic_rounding": True} if recipe == "nvfp4" else {}
    weight, *rest = parameters()[: 1 + bias]
    limits = {"y": FAST_ACCUMULATION if recipe in ("delayed", "current") else SPLIT_ACCUMULATION}
    linears = [
        linear_of(make(engine_class, recipe, **options), IN, OUT, bias=bias)
        for engine_class in (TransformerEngine, EmulationEngine)
    ]

    def microbatch(linear: LinearState) -> dict[str, Tensor]:
        """Return the output and the gradients of one forward and backward."""
        leaves = [x.clone().requires_grad_(), weight, *rest]
        with linear.context.engine.forward(), overridden(linear.context, first_microbatch=first):
            y = linear(*leaves)
        for leaf in leaves:
            leaf.grad = None
        y.backward(gradient)
        results = (y.detach(), *(leaf.grad for leaf in leaves))
        return dict(zip(("y", "dx", "dw", "db"), results, strict=False))

    for step in range(2):
        for first in (True, False, False):
            x, gradient = operands(step * 2 + first)
            results, expected = map(microbatch, linears)
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
def test_delayed_histories_and_scales_equal_the_emulations_bits(options: dict[str, Any]) -> None:
    weight, bias = parameters()
    states = []
    for engine_class in (TransformerEngine, EmulationEngine):
        engine = make(engine_class, needs("delayed"), amax_history_len=3, **options)
        linears = [linear_of(engine, IN, OUT, name=name, bias=True) for name in ("p", "q")]
        snapshots = {}
        for number in range(5):  # The history has three entries.
            x, gradient = operands(number, scale=2.0**-number)
            with engine.forward():
                for linear in linears:
                    linear.context.first_microbatch = number % 2 == 0
                y = sum(linear(x, weight, bias) for linear in linears)
            for when in ("forward", "backward"):
                if when == "backward":
                    y.backward(gradient)
                for name, tensor in engine.state().items():
                    snapshots[f"{name} after {when} {number}"] = tensor.clone()
        states.append(snapshots)
    by_library, emulated = states
    assert by_library.keys() == emulated.keys()
    different = [name for name in emulated if not torch.equal(by_library[name], emulated[name])]
    assert different == []
