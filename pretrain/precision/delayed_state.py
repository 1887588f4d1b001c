"""Delayed scaling's memory: the amaxes of recent microbatches and the scales made of them, for every quantized tensor of a model.

The sequence is Transformer Engine's (FP8GlobalStateManager of its pytorch/quantization.py); docs/precision.md tells it. The
histories of a model's hundreds of tensors are columns of one matrix, so that an update is a handful of kernels and one reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from foundation.overrides import overridden
from pretrain.precision.formats.definition import Role
from pretrain.precision.quantizers.tensor import update_scale
from pretrain.precision.settings import ActivePrecision

# Columns of a module, as Transformer Engine lays them out. Outputs and input gradients are not quantized.
SLOTS = {"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")}
# Of each operand: its direction and its slot there.
PLACES: dict[Role, tuple[str, int]] = {
    "input": ("forward", 0),
    "weight": ("forward", 1),
    "grad_output": ("backward", 0),
}


def of_operand(
    state: Mapping[str, Tensor], module: str, role: Role, key: Literal["amax_history", "scale"]
) -> Tensor:
    """One operand's history [length], or its scale, a scalar, out of a backend's `state`."""
    direction, slot = PLACES[role]
    return state[f"fp8/{module}/{direction}/{key}"][..., slot]


class DelayedState:
    """The state of all products of one model. Products register first; the first use lays the matrices out."""

    def __init__(self, active: ActivePrecision, device: torch.device) -> None:
        self._active, self._device = active, device
        self._modules: list[str] = []
        # By direction: amaxes [length, columns], of which row 0 is that of the step under way, and scales [columns].
        self._histories: dict[str, tuple[Tensor, Tensor]] = {}
        # The scales of the forward under way, or of the last one; nobody writes into this tensor.
        self.forward_scales: Tensor | None = None
        self._depth = 0
        self._recording = True
        self._backward_ran = False
        self._end_expected = False

    def register(self, module: str) -> int:
        """The number of a further module, before the first forward."""
        self._modules.append(module)
        return len(self._modules) - 1

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Enter this around each forward of the model. Of nested ones the outermost alone counts. Only forwards that train change
        histories."""
        if self._depth == 0:
            self._finish_backward()  # of one that ran inside a forward only, or that was broken off
            self.forward_scales = self._history("forward")[1].clone()
        with overridden(self, _depth=self._depth + 1):
            yield
        if self._depth == 0 and torch.is_grad_enabled():
            self._update("forward")
        # what evaluation noted, the next training step would take for its own
        elif self._depth == 0:
            self._history("forward")[0][0].zero_()

    def recompute(self, forward_scales: Tensor) -> AbstractContextManager[None]:
        """Put this around a layer that backward computes again: with the scales it had, noting no amax a second time."""
        return overridden(self, forward_scales=forward_scales, _recording=False)

    def scale(self, module: int, role: Role) -> Tensor:
        """The FP32 scalar that quantizes the operand now."""
        scales = self._history("backward")[1] if role == "grad_output" else self.forward_scales
        return scales[_column(module, role)]

    def record(self, module: int, role: Role, amax: Tensor) -> None:
        """Note the FP32 scalar `amax` of an operand that was just quantized; of several in one step the largest counts."""
        if role == "grad_output":
            # The gradients' scales are updated when the backward under way ends: the engine calls back, as it does for FSDP.
            # The LM head's chunks run their backward inside the forward; the model's backward ends the step for them.
            self._backward_ran = True
            if self._depth == 0 and not self._end_expected:
                torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
                self._end_expected = True
        elif not self._recording:
            return
        newest = self._history(PLACES[role][0])[0][0, _column(module, role)]
        torch.maximum(newest, amax, out=newest)

    def state(self) -> dict[str, Tensor]:
        """Live views by name: `fp8/<module>/<direction>/amax_history` [length, slots] and `.../scale` [slots], FP32. They change
        as a training forward ends and as its backward ends."""
        return {
            f"fp8/{module}/{direction}/{key}": of_all[
                ..., number * len(slots) : (number + 1) * len(slots)
            ]
            for direction, slots in SLOTS.items()
            for number, module in enumerate(self._modules)
            for key, of_all in zip(("amax_history", "scale"), self._history(direction), strict=True)
        }

    def forget_pass(self) -> None:
        """Forgets a pass that was broken off: its backward will not come."""
        self.forward_scales, self._backward_ran, self._end_expected = None, False, False

    def _finish_backward(self) -> None:
        self._end_expected = False
        if self._backward_ran:
            self._update("backward")
            self._backward_ran = False

    @torch.no_grad()
    def _update(self, direction: str) -> None:
        """End a step of the history. Every rank must call it at the same point: it reduces over the default process group."""
        (amax_history, scale), settings = self._history(direction), self._active.settings
        if dist.is_initialized():
            dist.all_reduce(amax_history[0], op=dist.ReduceOp.MAX)
        maximum = self._active.precision.grid(settings, SLOTS[direction][0]).maximum
        updated = update_scale(
            amax_history, scale, maximum, settings.margin, settings.amax_compute_algo
        )
        for live, new in zip((amax_history, scale), updated, strict=True):
            live.copy_(new)  # in place: checkpoints hold views

    def _history(self, direction: str) -> tuple[Tensor, Tensor]:
        if direction not in self._histories:
            columns, length = (
                len(self._modules) * len(SLOTS[direction]),
                self._active.settings.amax_history_len,
            )
            zeros = torch.zeros(length, columns, device=self._device)
            self._histories[direction] = zeros, torch.ones(columns, device=self._device)
        return self._histories[direction]


def _column(module: int, role: Role) -> int:
    direction, slot = PLACES[role]
    return module * len(SLOTS[direction]) + slot
