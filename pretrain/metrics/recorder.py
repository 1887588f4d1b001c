"""Time the steps of a run and create their records for `metrics.jsonl`.

The time of a step includes the wait for its data. After the optimizer's update, each step reads a
number from the device. The host therefore waits for the device, and the wall-clock time covers all
work of the step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from foundation.units import GIB, TERA
from pretrain.metrics.flops import ModelFlops, flops_of_nanogpt
from pretrain.metrics.run_record import WARM_UP_STEPS


@dataclass(kw_only=True)
class Recorder:
    """Measure duration, throughput, MFU, memory and recompilations of the steps of one process."""

    # FLOPs of the model. If None, records have neither TFLOP/s nor MFU.
    flops: ModelFlops | None
    # Dense BF16 peak of one device in TFLOP/s. If None, records have no MFU.
    peak_tflops: float | None
    device: torch.device
    # Number of tokens per pack.
    pack_length: int
    # Number of devices that compute each step together.
    world_size: int = 1
    # Function that returns the time in seconds.
    clock: Callable[[], float] = time.perf_counter
    # Number of steps since this process started. The steps before a resume are not included,
    # because the resumed process compiles the model again.
    _steps_in_process: int = field(default=0, init=False)
    # Duration of the last step.
    _seconds: float = field(default=0.0, init=False)
    # Number of graphs that were compiled in the last step, or 0 if it was a warm-up step.
    _recompiles: int = field(default=0, init=False)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager that times one step and counts the graphs that the step compiles.

        The caller's `with` statement must contain the whole step, from the request for its data to
        the optimizer's update.
        """
        graphs = compiled_graphs()
        begin = self.clock()
        yield
        self._seconds = self.clock() - begin
        self._steps_in_process += 1
        is_warm_up = self._steps_in_process <= WARM_UP_STEPS
        self._recompiles = 0 if is_warm_up else compiled_graphs() - graphs

    def finish(
        self, *, data_wait_ms: float, step_tokens: int, sum_squared_lengths: int, **metrics: Any
    ) -> dict[str, Any]:
        """Return the record of the last step that `step()` has timed.

        docs/training.md explains the keys of a record.

        Args:
            data_wait_ms: Time that the step has spent waiting for data, in milliseconds.
            step_tokens: Number of tokens of the step over all ranks.
            sum_squared_lengths: Sum of the squared lengths of the step's documents over all ranks.
            metrics: Further values, which are added to the record unchanged.
        """
        record = metrics | {
            "step_ms": self._seconds * 1e3,
            "data_wait_ms": data_wait_ms,
            "tokens_per_second": step_tokens / self._seconds,
            "samples_per_second": step_tokens / self._seconds / self.pack_length,
        }
        if self.flops is not None:
            flops = self.flops.step(step_tokens, sum_squared_lengths)
            record |= {
                "flops_per_token": flops / step_tokens,
                "calculation_method": "ours",
                "tflops": flops / self._seconds / self.world_size / TERA,
            }
            if self.peak_tflops is not None:
                flops_per_second = (
                    flops_of_nanogpt(self.flops, self.pack_length) * record["tokens_per_second"]
                )
                record |= {
                    "peak_tflops": self.peak_tflops,
                    "mfu_bf16_peak": record["tflops"] / self.peak_tflops,
                    "mfu_nanogpt": flops_per_second / self.world_size / TERA / self.peak_tflops,
                }
        return record | memory_metrics(self.device) | {"recompiles": self._recompiles}


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the memory of this process in GiB, and its memory retries.

    On a CUDA device, `memory_gib` is the peak of torch's allocations, without the memory of CUDA
    graphs. `memory_allocated_gib` is the memory that torch's tensors occupy at the time of the
    call. `memory_reserved_gib` is the memory that torch has reserved from the driver, with that of
    CUDA graphs. `memory_retries` is the number of times that an allocation failed until torch had
    returned its cache to the driver. On other devices the only key is `memory_gib`, the resident
    memory of the process.
    """
    if device.type != "cuda":
        return {"memory_gib": psutil.Process().memory_info().rss / GIB}
    # Read all statistics at once, because torch collects all statistics in each call.
    statistics = torch.cuda.memory_stats(device)
    return {
        "memory_gib": statistics["allocated_bytes.all.peak"] / GIB,
        "memory_allocated_gib": statistics["allocated_bytes.all.current"] / GIB,
        "memory_reserved_gib": statistics["reserved_bytes.all.current"] / GIB,
        "memory_retries": statistics["num_alloc_retries"],
    }


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has compiled in this process."""
    # Dynamo is not imported here, because the import takes a second. If Dynamo has not been
    # imported elsewhere, no graph has been compiled.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0
