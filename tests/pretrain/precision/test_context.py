"""What a model's precision remembers of passes that are not training's, and of steps that were skipped."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from pretrain.precision.emulation import EmulationBackend
from pretrain.precision.product import PrecisionContext
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings

SIZE = 32


class OneLinear:
    """A linear under delayed scaling, and what a step of it does."""

    def __init__(self) -> None:
        settings = LowPrecisionSettings(amax_history_len=8).resolved("delayed")
        backend = EmulationBackend(ActivePrecision("delayed", PRECISIONS["delayed"], "emulation", settings), torch.device("cpu"))
        self.context = PrecisionContext(backend, torch.bfloat16)
        self.product = backend.product("linear", SIZE, SIZE, bias=False)
        generator = torch.Generator().manual_seed(0)
        self.weight, self.x = (torch.randn(SIZE, SIZE, generator=generator).bfloat16() for _ in range(2))

    def step(self, factor: float = 1.0, *, fails: bool = False) -> Tensor:
        """Forward and backward; the gradient of the input."""
        x, weight = (self.x * factor).requires_grad_(), nn.Parameter(self.weight)
        with self.context.forward(training=True):
            y = self.context.multiply(self.product, x, weight, None)
        if fails:
            x.register_hook(run_out_of_memory)
        y.sum().backward()
        return x.grad

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.context.backend.state().items()}


def run_out_of_memory(_: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.fixture
def linear() -> OneLinear:
    return OneLinear()


@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_that_is_not_training_s_leaves_no_trace_even_if_it_is_broken_off(linear: OneLinear, fails: bool) -> None:
    untouched = OneLinear()
    for each in (linear, untouched):
        each.step()
    with suppress(torch.OutOfMemoryError), linear.context.preserving_state():
        linear.step(1000.0, fails=fails)
    for _ in range(2):
        assert torch.equal(linear.step(), untouched.step())
        after, expected = linear.state(), untouched.state()
        assert all(torch.equal(after[name], expected[name]) for name in expected)


@pytest.mark.parametrize("giant", [1e24, torch.inf, torch.nan])
def test_a_step_that_is_left_out_leaves_no_trace(linear: OneLinear, giant: float) -> None:
    untouched = OneLinear()
    for each in (linear, untouched):
        each.step()
    for _ in range(2):  # of which the second copies into the first one's tensors
        linear.context.keep_state()
        linear.step(giant)
        linear.context.go_back()
    for _ in range(2):
        assert torch.equal(linear.step(), untouched.step())
        after, expected = linear.state(), untouched.state()
        assert all(torch.equal(after[name], expected[name]) for name in expected)
