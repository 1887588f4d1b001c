"""Time the steps of a run and create their records for `metrics.jsonl`.

The time of a step includes waiting for its data. A step reads its last number from the device after
the optimizer's update, so its wall-clock time covers all of its work.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import nn

from foundation.units import GIB, TERA
from pretrain.metrics.flops import ModelFlops, nanogpt, ours
from pretrain.metrics.run_record import WARM_UP_STEPS
from pretrain.model.gradients import gradient_of, local_part


@dataclass(kw_only=True)
class Recorder:
    """Measures the steps of one process."""

    # FLOPs of the model. With None, records have neither `tflops` nor MFU.
    flops: ModelFlops | None
    # Dense BF16 peak of one device. With None, records have no MFU.
    peak_tflops: float | None
    device: torch.device
    # Tokens per pack.
    pack_length: int
    # Number of devices that share each step.
    world_size: int = 1
    clock: Callable[[], float] = time.perf_counter
    # Steps of this process, which compiles again after every resume.
    _steps_in_process: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)
    _recompiles: int = field(default=0, init=False)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step and count the graphs compiled in it.

        The block must contain everything from requesting the data to the optimizer's update.
        """
        graphs = compiled_graphs()
        begin = self.clock()
        yield
        self._seconds = self.clock() - begin
        self._steps_in_process += 1
        is_warm_up = self._steps_in_process <= WARM_UP_STEPS
        self._recompiles = 0 if is_warm_up else compiled_graphs() - graphs

    def finish(
        self, *, data_wait_ms: float, step_tokens: int, sum_squared_lengths: int, **figures: Any
    ) -> dict[str, Any]:
        """Return the record of the step that `step()` timed last. docs/tracking.md has every key.

        Args:
            data_wait_ms: Milliseconds of the step that were spent waiting for data.
            step_tokens: Tokens of the step over all ranks.
            sum_squared_lengths: Sum of the squared document lengths over all ranks.
            figures: Other values, which are recorded unchanged.
        """
        record = figures | {
            "step_ms": self._seconds * 1e3,
            "data_wait_ms": data_wait_ms,
            "tokens_per_second": step_tokens / self._seconds,
            "samples_per_second": step_tokens / self._seconds / self.pack_length,
        }
        if self.flops is not None:
            flops = self.flops.step(step_tokens, sum_squared_lengths)
            record |= {
                "flops_per_token": flops / step_tokens,
                "calculation_method": ours.__name__,
                "tflops": flops / self._seconds / self.world_size / TERA,
            }
            if self.peak_tflops is not None:
                nanogpt_flops = nanogpt(self.flops, self.pack_length) * record["tokens_per_second"]
                nanogpt_tflops = nanogpt_flops / self.world_size / TERA
                record |= {
                    "peak_tflops": self.peak_tflops,
                    "mfu_bf16_peak": record["tflops"] / self.peak_tflops,
                    "mfu_nanogpt": nanogpt_tflops / self.peak_tflops,
                }
        return record | memory_figures(self.device) | {"recompiles": self._recompiles}


def memory_figures(device: torch.device) -> dict[str, float]:
    """Return the memory of this process in GiB.

    `memory_gib` is the peak of torch's allocations on a CUDA device, and the resident memory
    elsewhere. On a CUDA device there are also the memory that torch has allocated now and the
    memory that it has reserved from the driver.
    """
    if device.type != "cuda":
        return {"memory_gib": psutil.Process().memory_info().rss / GIB}
    return {
        "memory_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "memory_allocated_gib": torch.cuda.memory_allocated(device) / GIB,
        "memory_reserved_gib": torch.cuda.memory_reserved(device) / GIB,
    }


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has compiled in this process."""
    # Do not import dynamo, which takes a second. If nothing has imported it, there are no graphs.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def layer_of(name: str, layers: Collection[str]) -> str:
    """Return the layer among `layers` that contains the parameter `name`, else its module."""
    module = name.rpartition(".")[0]
    return next((layer for layer in layers if name.startswith(f"{layer}.")), module)


@torch.no_grad()
def gradient_statistics(
    model: nn.Module, layers: Collection[str], accelerator: Accelerator
) -> dict[str, float]:
    """Return `grad_mean/<layer>` and `grad_std/<layer>` of the unclipped gradient. Collective.

    `layers` are names of modules whose parameters count together. A parameter outside of them
    counts for its own module. Values are summed in FP32, and the sums of parameters and shards in
    FP64. The standard deviation is the population's, not a sample estimate.
    """
    # For each parameter: sum, sum of squares, number of values.
    sums: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        gradient = gradient_of(parameter)
        if gradient is not None:
            values = local_part(gradient)
            total = values.sum(dtype=torch.float32).double()
            norm = torch.linalg.vector_norm(values, dtype=torch.float32).double()
            size = torch.full_like(total, values.numel())
            sums[layer_of(name, layers)].append(torch.stack([total, norm.square(), size]))
    by_layer = torch.stack([torch.stack(parameters).sum(0) for parameters in sums.values()])
    # Values that several ranks hold are counted once per rank in all three sums, so means and
    # deviations stay the same.
    table = accelerator.reduce(by_layer, reduction="sum").tolist()
    figures: dict[str, float] = {}
    for layer, (total, squares, number) in zip(sums, table, strict=True):
        mean = total / number
        deviation = math.sqrt(max(squares / number - mean**2, 0.0))
        figures |= {f"grad_mean/{layer}": mean, f"grad_std/{layer}": deviation}
    return figures
