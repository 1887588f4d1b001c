"""Run microbatches as CUDA graphs, so that the GPU does not wait for the host to start kernels.

A graph contains all kernels of the forward and the backward of one microbatch, and the host
launches them by one call. The kernels, their order and their operands are the same as without
graphs, so the results are the same bit for bit.

Graphs need memory for the activations of a second microbatch, because the memory of steps without
graphs stays reserved. On one machine, `model.cuda_graphs: auto` uses graphs if this memory is free
on every GPU (`SPARE`).

A graph reads and writes fixed addresses. A microbatch is copied to the buffers of its graph.
Parameters, main gradients, histories and scales never move. A newly quantized weight overwrites the
weight of the previous step (`Gemm.overwrites_weight`). A graph is captured when a microbatch first
needs it. Each engine has one graph for each length of `cu_seqlens`. The first microbatch of a step
needs separate graphs, because it quantizes the weights.

With several processes, graphs contain the exchange of amaxes of delayed scaling. With DDP, the last
microbatch of a step has separate graphs, which contain the sums of gradients over ranks. With
FSDP2, the first microbatch, which gathers weights, and the last one, which reduces gradients, run
without graphs. NCCL requires that all processes capture a collective together, and that all of them
replay it. So they decide together whether to use graphs, and their microbatches have `cu_seqlens`
of the same length (`BatchStream.step`).

Steps with `StepWatch.observes_passes` run without graphs, because observers are called between
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from foundation import units
from foundation.errors import InputError, one_line
from packing.batch import Microbatch
from pretrain.model.distributed import largest_over_ranks, raise_on_all_ranks
from pretrain.model.gradients import RankSums
from pretrain.model.packed import (
    TENSORS,
    PackedLanguageModel,
    compute_microbatch,
    inputs_of,
)
from pretrain.precision.gemm import Gemm

# With `auto`, the share of the GPU's memory that must stay free beside the graphs. Three things may
# need memory later: the kernel arguments of all graphs, which torch does not count; fragmentation,
# because each capture frees memory that the next observed step reserves again; and observers that
# have not been due yet.
SPARE = 0.1


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

    The kernels do not run during the capture. Each run of the graph overwrites the result.

    pool: the memory pool of the earlier graphs, or None if this is the first graph.
    """
    graph = torch.cuda.CUDAGraph()
    # If the capture fails, `torch.cuda.graph` does not restore the previous stream, so the first
    # context restores it. Other threads may use CUDA during the capture. One of these threads pins
    # the memory of batches.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool, capture_error_mode="thread_local"),
    ):
        return graph, function()


class CapturedMicrobatch(NamedTuple):
    """A graph, and the tensors at fixed addresses that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    # Result of the graph.
    loss: Tensor
    # Microbatch that the graph reads.
    batch: Microbatch
    # Factor of the loss in backward, an FP32 scalar that the graph reads.
    scale: Tensor


@dataclass
class MicrobatchGraphs:
    """The CUDA graphs of a model, and the decision whether its steps use them."""

    # The setting `model.cuda_graphs`. With `auto`, a decision replaces it by "on" or "off" with a
    # reason.
    status: str
    # Function that is called with each decision.
    report: Callable[[str], None]
    # Map the key that `_captured_for` computes for a microbatch to its graph.
    captured: dict[Any, CapturedMicrobatch] = field(default_factory=dict)
    # The Gemms whose cached weights are read by graphs: all Gemms of the model from the first
    # capture on.
    captured_gemms: Sequence[Gemm] = ()

    def compute(
        self,
        model: PackedLanguageModel,
        accelerator: Accelerator,
        batch: Microbatch,
        scale: float,
        rank_sums: RankSums | None = None,
    ) -> Tensor:
        """Return the result of `compute_microbatch`, computed by a graph if graphs are on.

        With `auto`, this method decides whether graphs are on, before their first capture. The next
        call may overwrite the result. Do not call this method in observed steps. Raises InputError
        if the recipe has `cuda_graphs: on` and the memory does not suffice or a capture fails.
        Raises the error of a captured graph with `auto` too, because the other ranks have already
        started their graphs.
        """
        if not self.status.startswith("off"):
            try:
                if not self.captured:
                    self._decide_by_memory(accelerator)
                captured = self._captured_for(model, accelerator, batch, rank_sums)
            except InputError as refusal:
                if self.status == "on":
                    raise impossible(str(refusal)) from refusal
                self.drop()
                self.status = f"off: {refusal}"
                self.report(self.status)
            else:
                for name in TENSORS:
                    getattr(captured.batch, name).copy_(getattr(batch, name), non_blocking=True)
                captured.scale.fill_(scale)
                captured.graph.replay()
                return captured.loss
        return compute_microbatch(model, accelerator, batch, scale, rank_sums)

    def drop(self) -> None:
        """Drop all graphs, and free their memory.

        From now on, `Gemm.drop_weight` frees the weights that the graphs have read.

        Call this before the precision changes. Otherwise the graphs and the quantized weights of
        the previous precision would stay in memory. If graphs are on, `compute` measures the memory
        again and captures new graphs. Before the first capture, this method does nothing, because
        a step takes 0.2 s longer after its memory was returned to the driver.
        """
        if self.captured or self.captured_gemms:
            self.captured.clear()
            for gemm in self.captured_gemms:
                gemm.overwrites_weight = False
            self.captured_gemms = ()
            torch.cuda.empty_cache()

    def _decide_by_memory(self, accelerator: Accelerator) -> None:
        """Raise InputError if graphs do not fit into memory. If they fit, turn `auto` on.

        The activations of a microbatch are the peak of earlier steps minus the present memory. If
        ranks differ, the least available memory and the largest activations decide.
        """
        free, total = torch.cuda.mem_get_info()
        reserve = 0 if self.status == "on" else int(SPARE * total)
        # The smallest number of all ranks is minus the largest negative number.
        available = -largest_over_ranks(accelerator, reserve - free)
        activations = largest_over_ranks(
            accelerator, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        )
        figures = (
            f"{units.memory(max(available, 0) / units.GIB)} are available, and the "
            f"activations of a second microbatch take {units.memory(activations / units.GIB)}"
        )
        if available < activations:
            raise InputError(figures)
        if self.status != "on":
            self.status = f"on: {figures}"
            self.report(self.status)

    def _captured_for(
        self,
        model: PackedLanguageModel,
        accelerator: Accelerator,
        batch: Microbatch,
        rank_sums: RankSums | None,
    ) -> CapturedMicrobatch:
        """Return the graph for a microbatch. Capture the graph if it does not exist.

        If the capture fails on some rank, raise InputError with its message on all ranks.
        """
        context = model.context
        sums_over_ranks = rank_sums is not None
        key = (context.engine, context.first_microbatch, batch.cu_seqlens.shape, sums_over_ranks)
        if key not in self.captured:
            self.captured_gemms = model.gemms
            for gemm in self.captured_gemms:
                gemm.overwrites_weight = True
            self.captured[key] = raise_on_all_ranks(
                lambda: self._capture(model, accelerator, batch, rank_sums)
            )
        return self.captured[key]

    def _capture(
        self,
        model: PackedLanguageModel,
        accelerator: Accelerator,
        batch: Microbatch,
        rank_sums: RankSums | None,
    ) -> CapturedMicrobatch:
        """Capture and return the graph of a microbatch.

        Raises InputError if the capture fails.
        """
        try:
            fixed_batch = replace(batch, **inputs_of(batch, accelerator.device))
            # `compute` sets this scalar before each replay.
            scale = torch.empty((), device=accelerator.device)
            compute = partial(compute_microbatch, model, accelerator, fixed_batch, scale, rank_sums)
            # All graphs share the memory pool of the first one.
            pool = next((earlier.graph.pool() for earlier in self.captured.values()), None)
            graph, loss = capture(compute, pool)
        except RuntimeError as error:
            raise InputError(one_line(error)) from error
        return CapturedMicrobatch(graph, loss, fixed_batch, scale)
