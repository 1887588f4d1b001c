"""The update in pieces with the state in host memory, compared with the update of all parameters.

The streams of a GPU are replaced by queues of which a random one goes on. tests/gpu has the tests
with a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.optimizer import adamw
from pretrain.optimizer.adamw import ExactAdamW, Hyperparameters, ParameterTensors, build_optimizer
from pretrain.optimizer.exact_weights import split
from pretrain.optimizer.offload import OFFLOADED, SLOTS, update_in_pieces
from pretrain.settings.recipe import OptimizerSettings

# Number of values in a piece. The third shape has more pieces than there are slots.
VALUES = 100
SHAPES = ((17,), (33, 3), (10, VALUES), (1,), (7, 43))
COEFFICIENT = torch.tensor(0.3)


class Stream:
    """Queue of operations that runs only in `Streams.synchronize`."""

    def __init__(self, device: Any = None) -> None:
        self.operations: list[Callable[[], bool]] = []
        STREAMS.append(self)

    def run(self, operation: Callable[[], object]) -> None:
        def run_at_once() -> bool:
            operation()
            return True

        self.operations.append(run_at_once)

    def record_event(self) -> list[bool]:
        event: list[bool] = []
        self.run(partial(event.append, True))
        return event

    def wait_event(self, event: list[bool]) -> None:
        self.operations.append(lambda: bool(event))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


STREAMS: list[Stream] = []


class Streams(TorchDispatchMode):
    """Stand-in for torch.cuda in which copies wait in the queue of the current stream."""

    Stream = Stream

    def __init__(self, seed: int) -> None:
        super().__init__()
        STREAMS.clear()
        self.random = random.Random(seed)
        self.current = Stream()
        self.synchronizes = False

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = partial(function, *args, **(kwargs or {}))
        if self.synchronizes or function is not torch.ops.aten._foreach_copy_.default:
            return call()
        return self.current.run(call)

    def synchronize(self, device: torch.device) -> None:
        self.synchronizes = True
        while waiting := [stream for stream in STREAMS if stream.operations]:
            stream = self.random.choice(waiting)
            if stream.operations[0]():
                stream.operations.pop(0)


def drawn(weights: torch.dtype, exact: bool, moment: torch.dtype) -> list[ParameterTensors]:
    """Return random weights and gradients of each shape, with zero moments."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for shape in SHAPES:
        master, gradient = torch.randn(2, *shape, generator=generator).unbind()
        weight, remainder = split(master) if exact else (master.to(weights), None)
        moments = (torch.zeros(shape, dtype=moment) for _ in range(2))
        tensors.append(ParameterTensors(weight, remainder, gradient.to(weights), *moments))
    return tensors


@pytest.mark.parametrize("offload", ["moments", "state"])
@pytest.mark.parametrize(
    ("weights", "exact", "moment"),
    [
        (torch.float32, False, torch.float32),
        (torch.bfloat16, True, torch.float32),
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.bfloat16),
    ],
)
def test_an_update_in_pieces_has_the_bits_of_one_update(
    offload: str,
    weights: torch.dtype,
    exact: bool,
    moment: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once = drawn(weights, exact, moment)
    in_pieces = drawn(weights, exact, moment)
    sizes = []
    for step in range(1, 9):
        hyper = Hyperparameters(3e-3, 0.1, 0.9, 0.95, 1e-8, step)
        streams = Streams(seed=step)
        monkeypatch.setattr(torch, "get_device_module", lambda device, streams=streams: streams)

        def update(piece: Any, streams: Streams = streams) -> Tensor:
            """Queue the update of a piece as a kernel."""
            lost = torch.zeros((), dtype=torch.int64)
            sizes.append(piece[0].weight.numel())
            streams.current.run(lambda: lost.copy_(adamw._update_all([piece], COEFFICIENT)))
            return lost

        pieces = adamw._cut([(tensors, hyper) for tensors in in_pieces], VALUES)
        with streams:
            lost = update_in_pieces(pieces, OFFLOADED[offload], update)
        expected = adamw._update_all([(tensors, hyper) for tensors in at_once], COEFFICIENT)
        assert lost == expected
        for actual, tensors in zip(in_pieces, at_once, strict=True):
            assert all(
                a is b is None or torch.equal(a, b) for a, b in zip(actual, tensors, strict=True)
            )
    assert max(sizes) == VALUES and len(sizes) > 8 * SLOTS


def test_on_a_cpu_the_state_is_where_it_is_without_offloading() -> None:
    layers = [nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer, offload in zip(layers, ("none", "state"), strict=True):
        optimizer = build_optimizer(layer, OptimizerSettings(offload=offload), exact=True)
        assert isinstance(optimizer, ExactAdamW)
        optimizer.materialise()
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        assert set(optimizer.state[layer.weight]) == {"step", *OFFLOADED["state"]}
        assert not optimizer.state[layer.weight]["exp_avg"].is_pinned()
    assert torch.equal(layers[0].weight, layers[1].weight)
