"""A phase with `forward: bf16` has BF16 forwards, quantized gradients and shared state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.precision.product import LinearState, PrecisionContext
from pretrain.precision.selection import make_engines, missing_on, select_precision
from pretrain.precision.settings import PLAIN_FORWARD, LowPrecisionSettings
from tests.pretrain.conftest import QUANTIZED
from tests.pretrain.precision.test_emulation import IN, OUT, operands, run


def linear_in_both_phases(precision: str) -> list[LinearState]:
    """Return a layer of one model in a precision and in its phase with a BF16 forward."""
    settings = LowPrecisionSettings(backend="emulation")
    names = [precision, f"{precision}{PLAIN_FORWARD}"]
    actives = [select_precision(name, settings, missing_on("cpu")) for name in names]
    engines = make_engines(actives, torch.device("cpu"))
    assert list(engines) == names
    linears = []
    for engine in engines.values():
        context = PrecisionContext(engine, torch.bfloat16, engines=list(engines.values()))
        linears.append(LinearState("layer", context))
        linears[-1].add(engine, IN, OUT)
    return linears


def second_microbatch(linear: LinearState, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return output and gradients of a second microbatch.

    The first one sets the scales of delayed scaling.
    """
    linear.context.forget()
    for _ in range(2):
        torch.manual_seed(1)  # for stochastic rounding
        with linear.context.forward(training=True):
            results = run(linear, *tensors)
    return results


@pytest.mark.parametrize("precision", QUANTIZED)
def test_gradients_and_histories_equal_those_of_the_quantized_phase(precision: str) -> None:
    results = []
    states = []
    for linear in linear_in_both_phases(precision):
        results.append(second_microbatch(linear, *operands()))
        states.append(linear.context.copied_state())
    (quantized_y, *quantized_gradients), (y, *gradients) = results
    assert torch.equal(y, F.linear(*operands()[:3]))
    assert not torch.equal(quantized_y, y)
    assert all(map(torch.equal, gradients, quantized_gradients))
    assert all(map(torch.equal, *states)), "the phases share their histories"
    assert len(states[0]) == (4 if precision == "delayed" else 0), "a checkpoint stores them once"


# Without delayed scaling, whose scales would differ too.
@pytest.mark.parametrize("precision", [name for name in QUANTIZED if name != "delayed"])
def test_backward_uses_the_cached_weight_and_forward_the_current_one(precision: str) -> None:
    """The first microbatch of a step quantizes the weight. Evaluation leaves the cache alone."""
    _, linear = linear_in_both_phases(precision)
    x, weight, _, grad = operands()
    results = []
    for factor, first in ((1.0, True), (0.5, False)):
        torch.manual_seed(0)
        with linear.context.forward(training=True):
            results.append(run(linear, x, factor * weight, None, grad, first))
        with torch.no_grad(), linear.context.forward(training=True):
            evaluated = linear(x, 2 * weight)
        assert torch.equal(evaluated, F.linear(x, 2 * weight))
    (y, *gradients), (later_y, *later_gradients) = results
    assert all(map(torch.equal, gradients, later_gradients))
    assert torch.equal(later_y, F.linear(x, 0.5 * weight))
    assert not torch.equal(y, later_y)
