"""The state of delayed scaling in the emulation.

The state consists of the amaxes (largest absolute values) of past microbatches, and of the scales
that are computed from them. The order of the updates is the same as in Transformer Engine
(FP8GlobalStateManager in pytorch/quantization.py). docs/developers/extending.md describes this
order. The histories of all layers of a model are in one tensor, so an update needs only a few
kernels and one reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from foundation.overrides import overridden
from pretrain.precision.formats.definition import QuantizedPrecision, Role
from pretrain.precision.quantizers.tensor import update_scale

# Prefix of the names in `GemmEngine.state`. It separates them from the names of the optimizer's
# tensors in a checkpoint.
PREFIX = "fp8/"
Direction = Literal["forward", "backward"]
# Map each direction to the slots in the amax history of a linear layer, in Transformer Engine's
# order. Each slot has the name of a tensor. The slots "output" and "grad_input" stay unused,
# because these tensors are not quantized.
SLOTS: dict[Direction, tuple[str, ...]] = {
    "forward": ("input", "weight", "output"),
    "backward": ("grad_output", "grad_input"),
}
# Map each operand to its direction and to the index of its slot in SLOTS.
PLACES: dict[Role, tuple[Direction, int]] = {
    "input": ("forward", 0),
    "weight": ("forward", 1),
    "grad_output": ("backward", 0),
}


def state_of_operand(
    state: Mapping[str, Tensor], module: str, role: Role, key: Literal["amax_history", "scale"]
) -> Tensor:
    """Return the amax history [length] or the scale (a scalar) of one operand.

    `state` is the result of `GemmEngine.state`. `module` is the name of the linear layer.
    """
    direction, slot = PLACES[role]
    return state[f"{PREFIX}{module}/{direction}/{key}"][..., slot]


class DirectionState(NamedTuple):
    """The histories and scales of all operands of one direction, in FP32.

    Each slot of a layer belongs to one operand. Row 0 of the histories contains the amaxes of the
    current microbatch.
    """

    amax_history: Tensor  # [length, layers, slots]
    scale: Tensor  # [layers, slots]


class DelayedState:
    """The histories and scales of all linear layers of one model.

    Each layer must be registered before the first forward.
    """

    def __init__(self, precision: QuantizedPrecision, device: torch.device) -> None:
        self._precision = precision
        self._device = device
        self._modules: list[str] = []
        self._states: dict[Direction, DirectionState] = {}
        # The scales of the current forward, or of the latest forward if no forward is running. The
        # tensor is replaced, never modified, because recomputed layers use it again.
        self.forward_scales = torch.empty(0)
        self._in_forward = False
        # False while backward recomputes a layer. The original forward has recorded its amaxes.
        self._recording = True
        # True if gradients have been recorded since their scales were updated.
        self._backward_ran = False
        # True if autograd will call `_update_after_backward` when the running backward ends.
        self._callback_is_queued = False

    def register(self, module: str) -> int:
        """Add a layer. Return its index, which `scale` and `record` accept as `module`."""
        self._modules.append(module)
        return len(self._modules) - 1

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Return a context for a forward of the model.

        If gradients are enabled, the histories and scales are updated when the context is left.
        Otherwise the amaxes of the forward are dropped.
        """
        # Usually the callback of the previous backward has done this already. There are two other
        # cases: the backward failed, or only the LM head ran a backward (see `record`).
        self._update_after_backward()
        self.forward_scales = self._state_of("forward").scale.clone()
        with overridden(self, _in_forward=True):
            yield
        if torch.is_grad_enabled():
            self._update("forward")
        else:
            # The next training step must not use the amaxes of an evaluation.
            self._state_of("forward").amax_history[0].zero_()

    @contextmanager
    def recomputing(
        self, again: Callable[[], AbstractContextManager[None]], forward_scales: Tensor
    ) -> Iterator[None]:
        """Return a context for the recomputation of a layer in backward, inside of `again()`.

        Inside, operands are quantized with `forward_scales`, the scales of the original forward,
        and no amax is recorded.
        """
        with again(), overridden(self, forward_scales=forward_scales, _recording=False):
            yield

    def scale(self, module: int, role: Role) -> Tensor:
        """Return the current scale of an operand, an FP32 scalar."""
        direction, slot = PLACES[role]
        if direction == "backward":
            return self._state_of(direction).scale[module, slot]
        return self.forward_scales[module, slot]

    def record(self, module: int, role: Role, amax: Tensor) -> None:
        """Record the amax of an operand, an FP32 scalar.

        If an operand is recorded several times in a microbatch, the history keeps the largest amax.
        """
        if role == "grad_output":
            # Like FSDP, queue a callback that autograd runs when the current backward ends. The
            # callback updates the scales of gradients. The LM head computes in chunks, whose
            # backward runs inside of the forward. The chunks queue no callback, because the
            # callback of the model's backward uses their amaxes too.
            self._backward_ran = True
            if not self._in_forward and not self._callback_is_queued:
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._update_after_backward)
                self._callback_is_queued = True
        elif not self._recording:
            return
        direction, slot = PLACES[role]
        newest = self._state_of(direction).amax_history[0, module, slot]
        torch.maximum(newest, amax, out=newest)

    def state(self) -> dict[str, Tensor]:
        """Return a dict that maps names to FP32 tensors, which are views of the state.

        For each layer and direction, `fp8/<module>/<direction>/amax_history` is [length, slots],
        and `fp8/<module>/<direction>/scale` is [slots]. The scales change when a training forward
        ends and when its backward ends. Row 0 of a history changes with each recorded amax.
        """
        tensors = {}
        for direction in SLOTS:
            state = self._state_of(direction)
            for index, module in enumerate(self._modules):
                prefix = f"{PREFIX}{module}/{direction}"
                tensors[f"{prefix}/amax_history"] = state.amax_history[:, index]
                tensors[f"{prefix}/scale"] = state.scale[index]
        return tensors

    def drop_pass(self) -> None:
        """Reset the flags of a pass that failed, so that nothing waits for its backward."""
        self._backward_ran = False
        self._callback_is_queued = False

    def _update_after_backward(self) -> None:
        """Update the scales of gradients if a backward has run since the last update."""
        self._callback_is_queued = False
        if self._backward_ran:
            self._update("backward")
            self._backward_ran = False

    @torch.no_grad()
    def _update(self, direction: Direction) -> None:
        """Move the amaxes of the current microbatch into the history, and compute new scales.

        If torch.distributed is initialized, all processes must call this method together, because
        they use the largest amax of all processes.
        """
        state = self._state_of(direction)
        if dist.is_initialized():
            dist.all_reduce(state.amax_history[0], op=dist.ReduceOp.MAX)
        grid = self._precision.grid("input" if direction == "forward" else "grad_output")
        settings = self._precision.settings
        updated = update_scale(*state, grid.maximum, settings.margin, settings.amax_compute_algo)
        for live, new in zip(state, updated, strict=True):
            live.copy_(new)  # in place, because `state` returns views of the tensor

    def _state_of(self, direction: Direction) -> DirectionState:
        """Return the state of a direction. The first call allocates it for all layers."""
        if direction not in self._states:
            shape = len(self._modules), len(SLOTS[direction])
            self._states[direction] = DirectionState(
                torch.zeros(self._precision.settings.amax_history_len, *shape, device=self._device),
                torch.ones(shape, device=self._device),
            )
        return self._states[direction]
