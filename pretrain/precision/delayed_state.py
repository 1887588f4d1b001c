"""The state of delayed scaling: amaxes of past microbatches, and the scales that follow from them.

The sequence of updates is Transformer Engine's (FP8GlobalStateManager in pytorch/quantization.py);
docs/precision.md describes it. The histories of all tensors of a model are columns of one matrix,
so an update is a few kernels and one reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from foundation.overrides import overridden
from pretrain.precision.formats.definition import OptionValues, Role
from pretrain.precision.quantizers.tensor import update_scale
from pretrain.precision.settings import ActivePrecision

Direction = Literal["forward", "backward"]
# Columns of a linear layer in Transformer Engine's order. Outputs and the gradients of inputs are
# not quantized.
SLOTS: dict[Direction, tuple[str, ...]] = {
    "forward": ("input", "weight", "output"),
    "backward": ("grad_output", "grad_input"),
}
# Direction and slot of each operand.
PLACES: dict[Role, tuple[Direction, int]] = {
    "input": ("forward", 0),
    "weight": ("forward", 1),
    "grad_output": ("backward", 0),
}


def of_operand(
    state: Mapping[str, Tensor], module: str, role: Role, key: Literal["amax_history", "scale"]
) -> Tensor:
    """Return one operand's history [length], or its scale, a scalar, from `GemmEngine.state`."""
    direction, slot = PLACES[role]
    return state[f"fp8/{module}/{direction}/{key}"][..., slot]


class History(NamedTuple):
    """The state of all operands of one direction, FP32. Row 0 has the amaxes of this step."""

    amax_history: Tensor  # [length, columns]
    scale: Tensor  # [columns]


class DelayedState:
    """The state of all linear layers of one model. Layers register before the first forward."""

    def __init__(self, active: ActivePrecision, device: torch.device) -> None:
        self._precision = active.quantized_precision
        self._settings: OptionValues = active.settings
        self._device = device
        self._modules: list[str] = []
        self._histories: dict[Direction, History] = {}
        # Scales of the current forward, or of the last one. This tensor is never changed.
        self.forward_scales = torch.empty(0)
        self._in_forward = False
        self._recording = True
        self._backward_ran = False
        self._end_expected = False

    def register(self, module: str) -> int:
        """Return the number of a new layer."""
        self._modules.append(module)
        return len(self._modules) - 1

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Enclose a forward of the model. Only forwards with gradients change histories."""
        # A backward that ran inside of a forward only, or that failed.
        self._finish_backward()
        self.forward_scales = self._history("forward").scale.clone()
        with overridden(self, _in_forward=True):
            yield
        if torch.is_grad_enabled():
            self._update("forward")
        else:
            # The next training step must not use the amaxes of an evaluation.
            self._history("forward").amax_history[0].zero_()

    def recompute(self, forward_scales: Tensor) -> AbstractContextManager[None]:
        """Enclose a layer that backward recomputes. Use its scales again and record no amax."""
        return overridden(self, forward_scales=forward_scales, _recording=False)

    def scale(self, module: int, role: Role) -> Tensor:
        """Return the current scale of an operand, a FP32 scalar."""
        if role == "grad_output":
            return self._history("backward").scale[_column(module, role)]
        return self.forward_scales[_column(module, role)]

    def record(self, module: int, role: Role, amax: Tensor) -> None:
        """Record the amax of an operand, a FP32 scalar. The largest one of a step counts."""
        if role == "grad_output":
            # The scales of gradients are updated when the current backward ends: autograd calls
            # back, as for FSDP. Chunks of the LM head run their backward inside of the forward, and
            # the backward of the model ends the step for them.
            self._backward_ran = True
            if not self._in_forward and not self._end_expected:
                torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
                self._end_expected = True
        elif not self._recording:
            return
        direction, _ = PLACES[role]
        newest = self._history(direction).amax_history[0, _column(module, role)]
        torch.maximum(newest, amax, out=newest)

    def state(self) -> dict[str, Tensor]:
        """Return live views by name, FP32.

        The names are `fp8/<module>/<direction>/amax_history`, [length, slots], and `.../scale`,
        [slots]. They change when a training forward ends and when its backward ends.
        """
        return {
            f"fp8/{module}/{direction}/{key}": tensor[
                ..., number * len(slots) : (number + 1) * len(slots)
            ]
            for direction, slots in SLOTS.items()
            for number, module in enumerate(self._modules)
            for key, tensor in self._history(direction)._asdict().items()
        }

    def forget_pass(self) -> None:
        """Forget a pass that failed: its backward will not end."""
        self._backward_ran = False
        self._end_expected = False

    def _finish_backward(self) -> None:
        self._end_expected = False
        if self._backward_ran:
            self._update("backward")
            self._backward_ran = False

    @torch.no_grad()
    def _update(self, direction: Direction) -> None:
        """End a step of the history. Collective over the default process group."""
        history = self._history(direction)
        if dist.is_initialized():
            dist.all_reduce(history.amax_history[0], op=dist.ReduceOp.MAX)
        grid = self._precision.grid(
            self._settings, "input" if direction == "forward" else "grad_output"
        )
        updated = update_scale(
            *history, grid.maximum, self._settings.margin, self._settings.amax_compute_algo
        )
        for live, new in zip(history, updated, strict=True):
            live.copy_(new)  # in place, because checkpoints hold views

    def _history(self, direction: Direction) -> History:
        if direction not in self._histories:
            columns = len(self._modules) * len(SLOTS[direction])
            self._histories[direction] = History(
                torch.zeros(self._settings.amax_history_len, columns, device=self._device),
                torch.ones(columns, device=self._device),
            )
        return self._histories[direction]


def _column(module: int, role: Role) -> int:
    direction, slot = PLACES[role]
    return module * len(SLOTS[direction]) + slot
