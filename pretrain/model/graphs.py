"""Run microbatches as CUDA graphs, for models whose kernels run faster than the host starts them.

A graph contains all kernels of the forward and the backward of one microbatch, and the host
launches them by one call. The kernels, their order and their operands are the same as without
graphs, so the results are the same bit for bit.

A graph reads and writes fixed addresses. A microbatch is copied to the buffers of its graph.
Parameters, main gradients, histories and scales never move. A newly quantized weight overwrites the
weight of the previous step (`Gemm.overwrites`). A graph is captured when a microbatch first needs
it. Each engine has one graph for each length of `cu_seqlens`. The first microbatch of a step needs
separate graphs, because it quantizes the weights.

Steps with `StepWatch.observes_passes` run without graphs, because observers are called between
kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from foundation.errors import InputError
from foundation.reading import one_line
from packing.batch import Microbatch
from pretrain.model.packed import (
    TENSORS,
    PackedLanguageModel,
    compute_microbatch,
    inputs_of,
)
from pretrain.precision.gemm import Gemm

# With `auto`, the number of steps that are timed before the decision.
TIMED = 3
# With `auto`, graphs are used if the host waits only briefly at the end of a step: for less than
# this fraction of the time that the host needs to launch a microbatch.
HOST_BOUND = 0.25


def impossible(obstacle: str) -> InputError:
    """Return the error for `model.cuda_graphs: on` in a run that has an obstacle to graphs."""
    return InputError(
        f"`model.cuda_graphs: on` is impossible in this run: {obstacle}; set "
        "`model.cuda_graphs: auto`"
    )


def capture(
    function: Callable[[], Tensor], pool: Any | None
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return a graph of the kernels of `function`, and the result of `function`.

    The kernels do not run during the capture. Each run of the graph overwrites the result. The
    first capture raises OutOfMemoryError if the free memory is less than the memory that a step
    without graphs has used. Graphs need their own memory, because the memory of a step without
    graphs stays reserved for observed steps.

    pool: the memory pool of the earlier graphs, or None if this is the first graph.
    """
    graph = torch.cuda.CUDAGraph()
    if pool is None and torch.cuda.mem_get_info()[0] < (
        torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    ):
        raise torch.OutOfMemoryError("the activations of a second microbatch do not fit")
    # If the capture fails, `torch.cuda.graph` does not restore the previous stream, so the first
    # context restores it. Other threads may use CUDA during the capture. One of these threads pins
    # the memory of batches.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool, capture_error_mode="thread_local"),
    ):
        return graph, function()


@dataclass
class MicrobatchGraphs:
    """The CUDA graphs of a model, and the decision whether its steps use them."""

    # The setting `model.cuda_graphs`. `_decide` replaces it by "on" or "off" with a reason.
    status: str
    # Function that is called with each decision.
    report: Callable[[str], None]
    # The function `capture`, or a function with the same arguments.
    record: Callable[..., tuple[Any, Tensor]] = capture
    # For each timed step, the time that the host waits for the device, divided by the time that the
    # host needs to launch a microbatch.
    waits: list[float] = field(default_factory=list)
    # Map the key that `_replay` computes for a microbatch to the graph, the loss of the graph, the
    # buffers of the microbatch, and the buffer of the factor of the loss.
    captured: dict[Any, tuple[Any, Tensor, Microbatch, Tensor]] = field(default_factory=dict)

    def compute(
        self, model: PackedLanguageModel, accelerator: Accelerator, batch: Microbatch, scale: float
    ) -> Tensor:
        """Return the result of `compute_microbatch`, computed by a graph if graphs are on.

        The next call may overwrite the result. Do not call this method in observed steps. Raises
        InputError if the recipe has `cuda_graphs: on` and a capture fails.
        """
        if self.status.startswith("on"):
            try:
                return self._replay(model, accelerator, batch, scale)
            except RuntimeError as error:
                obstacle = f"their capture failed ({one_line(error)})"
                if self.status == "on":
                    raise impossible(obstacle) from error
                self._decide(f"off: {obstacle}")
        before = time.perf_counter()
        loss = compute_microbatch(model, accelerator, batch, scale)
        self.launched = time.perf_counter()
        self.launch_time = self.launched - before
        return loss

    def end_step(self) -> None:
        """With `auto`, record the host's waiting time in this step, and decide after TIMED steps.

        Call this method after `compute`, when the host has waited for the gradients of the step.
        """
        if self.status == "auto":
            self.waits.append((time.perf_counter() - self.launched) / self.launch_time)
        if self.status == "auto" and len(self.waits) == TIMED:
            wait = sorted(self.waits)[TIMED // 2]
            self._decide(
                f"{'on' if wait < HOST_BOUND else 'off'}: at the end of a step, the host waits "
                f"{wait:.2f} times as long as it needs to launch a microbatch"
            )

    def _decide(self, status: str) -> None:
        """Change and report `status`."""
        self.captured.clear()
        self.status = status
        self.report(status)

    def _replay(
        self, model: PackedLanguageModel, accelerator: Accelerator, batch: Microbatch, scale: float
    ) -> Tensor:
        """Run the graph of a microbatch. Capture it first if it does not exist."""
        key = (model.context.backend, model.context.first_microbatch, batch.cu_seqlens.shape)
        if key not in self.captured:
            Gemm.overwrites = True
            fixed = replace(batch, **inputs_of(batch, accelerator.device))
            factor = torch.empty((), device=accelerator.device)
            recorded = self.record(
                lambda: compute_microbatch(model, accelerator, fixed, factor),
                next((graph.pool() for graph, *_ in self.captured.values()), None),
            )
            self.captured[key] = (*recorded, fixed, factor)
        graph, loss, fixed, factor = self.captured[key]
        for name in TENSORS:
            getattr(fixed, name).copy_(getattr(batch, name), non_blocking=True)
        factor.fill_(scale)
        graph.replay()
        return loss
