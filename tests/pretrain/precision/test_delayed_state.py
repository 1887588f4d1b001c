"""Histories and scales of delayed scaling agree with a plain loop over steps."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from foundation.overrides import overridden
from pretrain.precision.emulation import EmulationEngine
from pretrain.precision.product import LinearState
from pretrain.precision.quantizers import E4M3, E5M2, tensor
from tests.pretrain.conftest import context_of, emulation_of, linear_of
from tests.pretrain.precision.quantizers.test_tensor import one_column

TOKENS, SIZE = 32, 16


def output(linear: LinearState, x: Tensor, weight: Tensor, *, first: bool) -> Tensor:
    """Return the layer's output in the first microbatch of a step, or in a later one."""
    with overridden(linear.context, first_microbatch=first):
        return linear(x, weight)


class PlainHistory:
    """The amaxes of one tensor, the newest in `[0]`, and its scale.

    Updates follow the rule of TE's delayed_scaling.cu, without tensor operations.
    """

    def __init__(self, length: int, *rule: Any) -> None:
        self.amaxes = [0.0] * length
        self.scale = 1.0
        self.rule = rule

    def note(self, values: Tensor) -> None:
        self.amaxes[0] = max(self.amaxes[0], values.abs().max().item())

    def update(self) -> None:
        self.amaxes, self.scale = one_column(self.amaxes, self.scale, *self.rule)


def amax_histories(emulation: EmulationEngine, name: str) -> list[tuple[list[float], float]]:
    """Return history and scale of input, weight and grad_output of the product called `name`."""
    state = emulation.state()
    columns = [(f"fp8/{name}/forward", 0), (f"fp8/{name}/forward", 1), (f"fp8/{name}/backward", 0)]
    return [
        (state[f"{key}/amax_history"][:, slot].tolist(), state[f"{key}/scale"][slot].item())
        for key, slot in columns
    ]


@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
@pytest.mark.parametrize(
    ("length", "margin", "algorithm"),
    [(4, 0, "max"), (4, 2, "most_recent"), (1, 1, "max"), (2, 0, "max")],
)
def test_histories_and_scales_equal_those_of_a_plain_loop(
    fp8_format: str, length: int, margin: int, algorithm: str
) -> None:
    options = {"fp8_format": fp8_format, "margin": margin, "amax_history_len": length}
    emulation = emulation_of("delayed", **options, amax_compute_algo=algorithm)
    linear = linear_of(emulation, SIZE, SIZE)
    emulation.gemm("idle", SIZE, SIZE)
    gradient_grid = E5M2 if fp8_format == "HYBRID" else E4M3
    plain_x, plain_w = (PlainHistory(length, 448.0, margin, algorithm) for _ in range(2))
    plain_g = PlainHistory(length, gradient_grid.maximum, margin, algorithm)

    torch.manual_seed(0)
    weight = torch.randn(SIZE, SIZE).bfloat16()
    for microbatch in range(12):  # steps of three microbatches
        first = microbatch % 3 == 0
        if first:
            weight = weight * 1.5
            quantized_w = tensor.quantize(weight, torch.tensor(plain_w.scale), E4M3).dequantize()
            plain_w.note(weight)
        x = (torch.randn(TOKENS, SIZE) * 3.0 ** (microbatch % 5)).bfloat16().requires_grad_()
        grad = (torch.randn(TOKENS, SIZE) * 0.1 ** (microbatch % 4)).bfloat16()
        if microbatch == 7:
            grad[0, 0] = math.inf
        with emulation.forward():
            y = output(linear, x, weight, first=first)
        y.backward(grad)

        quantized_x = tensor.quantize(x.detach(), torch.tensor(plain_x.scale), E4M3).dequantize()
        quantized_g = tensor.quantize(grad, torch.tensor(plain_g.scale), gradient_grid).dequantize()
        for actual, expected in (
            (y, quantized_x @ quantized_w.t()),
            (x.grad, quantized_g @ quantized_w),
        ):
            torch.testing.assert_close(actual, expected.bfloat16(), rtol=2**-7, atol=1e-3)

        plain_x.note(x.detach())
        plain_g.note(grad)
        for history in (plain_x, plain_w, plain_g):
            history.update()
        expected = [(history.amaxes, history.scale) for history in (plain_x, plain_w, plain_g)]
        assert amax_histories(emulation, "layer") == expected
    assert amax_histories(emulation, "idle") == [([0.0] * length, 1.0)] * 3


def test_calls_in_one_forward_count_once_with_their_largest_value() -> None:
    """The LM head is called once per chunk of tokens, with its backward inside the forward."""
    emulation = emulation_of("delayed", amax_history_len=3)
    head, layer = (linear_of(emulation, SIZE, SIZE, name=name) for name in ("head", "layer"))
    weight = torch.eye(SIZE).bfloat16()
    x = torch.ones(TOKENS, SIZE).bfloat16().requires_grad_()
    for _ in range(2):
        with emulation.forward():
            y = output(layer, x, weight, first=True)
            for number, size in enumerate((2.0, 4.0, 3.0)):
                chunk = (size * y.detach()).requires_grad_()
                logits = output(head, chunk, weight, first=number == 0)
                logits.backward(torch.full_like(logits, size / 2))
        # The amax is recorded, although the model's backward has not run yet.
        assert amax_histories(emulation, "head")[2][0][0] == 2.0
        y.backward(torch.ones_like(y))
    assert amax_histories(emulation, "head")[0] == ([0.0, 4.0, 4.0], 448 / 4)
    assert amax_histories(emulation, "head")[2] == ([0.0, 2.0, 2.0], 57344 / 2)
    assert amax_histories(emulation, "layer")[2] == ([0.0, 1.0, 1.0], 57344.0)


def test_gradient_scales_are_constant_until_the_backward_ends() -> None:
    emulation = emulation_of("delayed")
    linear = linear_of(emulation, SIZE, SIZE)
    scales = []
    x = torch.ones(TOKENS, SIZE).bfloat16().requires_grad_()
    x.register_hook(lambda _: scales.append(amax_histories(emulation, "layer")[2][1]))
    with emulation.forward():
        y = output(linear, x, torch.eye(SIZE).bfloat16(), first=True)
        y = output(linear, y, x[:SIZE], first=False)
    y.sum().backward()
    assert scales == [1.0] and amax_histories(emulation, "layer")[2][1] == 57344.0


def test_an_evaluation_leaves_no_amax_for_the_next_step() -> None:
    emulation = emulation_of("delayed", amax_history_len=2)
    linear = linear_of(emulation, SIZE, SIZE)
    x = torch.full((TOKENS, SIZE), 100.0).bfloat16()
    with torch.no_grad(), emulation.forward():
        output(linear, x, torch.eye(SIZE).bfloat16(), first=True)
    assert amax_histories(emulation, "layer") == [([0.0, 0.0], 1.0)] * 3


def run_out_of_memory(_: Tensor) -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("factor", [1000.0, 1e24, math.inf, math.nan])
def test_a_pass_outside_of_training_keeps_the_state(factor: float, fails: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(SIZE, SIZE).bfloat16()
    values = torch.randn(TOKENS, SIZE).bfloat16()

    def step(linear: LinearState, factor: float = 1.0, *, fails: bool = False) -> Tensor:
        x = (values * factor).requires_grad_()
        with linear.context.forward(training=True):
            y = linear(x, weight.clone().requires_grad_())
        if fails:
            x.register_hook(run_out_of_memory)
        y.sum().backward()
        return x.grad

    runs = []
    for passes in (2, 0):
        engine = emulation_of("delayed", amax_history_len=8)
        context = context_of(engine)
        linear = LinearState("layer", context)
        linear.create_gemm(SIZE, SIZE)
        step(linear)
        for _ in range(passes):
            with suppress(torch.OutOfMemoryError), context.preserving_state():
                step(linear, factor, fails=fails)
        runs.append([step(linear), step(linear), *context.state().values()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
