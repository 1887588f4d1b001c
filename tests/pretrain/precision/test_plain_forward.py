"""A phase with `forward: bf16`: a forward that is BF16's to the bit, gradients that are the quantized product's, one state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.precision.product import PrecisionContext, Product
from pretrain.precision.selection import make_backends, missing_on, select_precision
from pretrain.precision.settings import PLAIN_FORWARD, LowPrecisionSettings
from tests.pretrain.conftest import QUANTIZED
from tests.pretrain.precision.test_emulation import IN, OUT, operands, run


def both(name: str, **options: object) -> list[tuple[PrecisionContext, Product]]:
    """The same linear in a precision and in its phase with a BF16 forward, of one model."""
    settings = LowPrecisionSettings(backend="emulation", **options)
    actives = [
        select_precision(each, settings, missing_on("cpu"))
        for each in (name, f"{name}{PLAIN_FORWARD}")
    ]
    backends = make_backends(actives, torch.device("cpu"))
    assert list(backends) == [active.precision.name for active in actives]
    contexts = [
        PrecisionContext(backend, torch.bfloat16, backends=list(backends.values()))
        for backend in backends.values()
    ]
    return [(context, context.backend.product("layer", IN, OUT, bias=True)) for context in contexts]


def taught(context: PrecisionContext, product: Product, *tensors: Tensor) -> tuple[Tensor, ...]:
    """A microbatch's output and gradients, after one that delayed scaling has learnt from."""
    context.forget()
    for _ in range(2):
        torch.manual_seed(1)  # of stochastic rounding
        with context.forward(training=True):
            results = run(product, *tensors)
    return results


@pytest.mark.parametrize("name", QUANTIZED)
def test_gradients_and_histories_have_the_bits_of_the_phase_without_it(name: str) -> None:
    quantized, plain_forward = both(name)
    results, states = [], []
    for context, product in (quantized, plain_forward):
        results.append(taught(context, product, *operands()))
        states.append(context.copied_state())
    (y, *gradients), (other, *others) = results
    assert torch.equal(other, F.linear(*operands()[:3]))
    assert not torch.equal(y, other) and all(
        torch.equal(one, two) for one, two in zip(gradients, others, strict=True)
    )
    assert all(torch.equal(one, two) for one, two in zip(*states, strict=True)), (
        "histories go on from one phase in the other"
    )
    assert len(states[0]) == (4 if name == "delayed" else 0), "and a checkpoint has them once"


# whose scales would differ too
@pytest.mark.parametrize("name", [name for name in QUANTIZED if name != "delayed"])
def test_a_weight_is_quantized_in_a_steps_first_microbatch_and_evaluation_leaves_that_alone(
    name: str,
) -> None:
    _, (context, product) = both(name)
    x, weight, _, grad = operands()
    results = []
    for factor, first in ((1.0, True), (0.5, False)):
        torch.manual_seed(0)
        with context.forward(training=True):
            results.append(run(product, x, factor * weight, None, grad, first))
        with torch.no_grad(), context.forward(training=True):
            evaluated = product(x, 2 * weight, None, context)
        assert torch.equal(evaluated, F.linear(x, 2 * weight))
    (y, *gradients), (later, *others) = results
    assert all(torch.equal(one, two) for one, two in zip(gradients, others, strict=True))
    assert torch.equal(later, F.linear(x, 0.5 * weight)) and not torch.equal(y, later), (
        "the forward has the weight of now"
    )
