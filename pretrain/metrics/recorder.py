"""Times whole steps, waiting for data included, and makes each step's line of `metrics.jsonl`.

A step reads its last figure from the device after the optimizer's update, so its wall-clock time covers all of its work.
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

    # the model's floating-point operations; None leaves `tflops` and both utilisations out
    flops: ModelFlops | None
    # dense BF16 peak of one device; None where the device is not known: then no utilisation
    peak_tflops: float | None
    device: torch.device
    pack_length: int  # tokens of a pack
    world_size: int = 1  # devices that share each step
    clock: Callable[[], float] = time.perf_counter
    # of this process, which compiles again after every resume
    _steps_here: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)
    _recompiles: int = field(default=0, init=False)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the block, a whole step from asking for its data to its optimizer update, and count the graphs compiled in it."""
        graphs, begin = compiled_graphs(), self.clock()
        yield
        self._seconds = self.clock() - begin
        self._steps_here += 1
        self._recompiles = compiled_graphs() - graphs if self._steps_here > WARM_UP_STEPS else 0

    def finish(
        self, *, data_wait_ms: float, step_tokens: int, sum_squared_lengths: int, **figures: Any
    ) -> dict[str, Any]:
        """The metrics object of the step that `step()` timed last: its `figures` as they are, and what they make of its time.
        docs/tracking.md has every key. step_tokens and sum_squared_lengths (of documents) are of its batch over all ranks."""
        record = figures | {
            "step_ms": self._seconds * 1e3,
            "data_wait_ms": data_wait_ms,
            "tokens_per_second": step_tokens / self._seconds,
            "samples_per_second": step_tokens / self._seconds / self.pack_length,
        }
        if self.flops is not None:
            flops = self.flops.step(step_tokens, sum_squared_lengths)
            record["flops_per_token"], record["calculation_method"] = (
                flops / step_tokens,
                ours.__name__,
            )
            record["tflops"] = flops / self._seconds / self.world_size / TERA
            if self.peak_tflops is not None:
                record["peak_tflops"] = self.peak_tflops
                record["mfu_bf16_peak"] = record["tflops"] / self.peak_tflops
                by_nanogpt = (
                    nanogpt(self.flops, self.pack_length)
                    * record["tokens_per_second"]
                    / self.world_size
                    / TERA
                )
                record["mfu_nanogpt"] = by_nanogpt / self.peak_tflops
        return record | memory_figures(self.device) | {"recompiles": self._recompiles}


def memory_figures(device: torch.device) -> dict[str, float]:
    """GiB of this process: `memory_gib`, on a CUDA device the most that torch has allocated, elsewhere what is resident now; and
    on a CUDA device what torch has allocated now and reserved from the driver."""
    if device.type != "cuda":
        return {"memory_gib": psutil.Process().memory_info().rss / GIB}
    cuda = torch.cuda
    figures = {
        "": cuda.max_memory_allocated,
        "allocated_": cuda.memory_allocated,
        "reserved_": cuda.memory_reserved,
    }
    return {f"memory_{which}gib": measure(device) / GIB for which, measure in figures.items()}


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process. Importing dynamo costs a second, and without it there are none."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def layer_of(name: str, layers: Collection[str]) -> str:
    """The one of `layers` that the parameter `name` is a part of; of any other parameter its own module."""
    return next(
        (layer for layer in layers if name.startswith(f"{layer}.")), name.rpartition(".")[0]
    )


@torch.no_grad()
def gradient_statistics(
    model: nn.Module, layers: Collection[str], accelerator: Accelerator
) -> dict[str, float]:
    """`grad_mean/<layer>` and `grad_std/<layer>` of the step's whole gradient, before clipping; collective.

    `layers`: the names of modules whose parameters count together; of any other parameter its own module is the layer. Values are
    added up in FP32, and the sums of parameters and shards in FP64. The deviation is that of all values, not of a sample.
    """
    # of each parameter its sum, that of its squares, and its size
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if (gradient := gradient_of(parameter)) is not None:
            values = local_part(gradient)
            total, norm = (
                values.sum(dtype=torch.float32).double(),
                torch.linalg.vector_norm(values, dtype=torch.float32).double(),
            )
            rows[layer_of(name, layers)].append(
                torch.stack([total, norm.square(), torch.full_like(total, values.numel())])
            )
    table = accelerator.reduce(
        torch.stack([torch.stack(each).sum(0) for each in rows.values()]), reduction="sum"
    ).tolist()
    figures = {}
    # which count alike what several ranks hold
    for layer, (total, squares, number) in zip(rows, table, strict=True):
        mean = total / number
        deviation = math.sqrt(max(squares / number - mean**2, 0.0))
        figures |= {f"grad_mean/{layer}": mean, f"grad_std/{layer}": deviation}
    return figures
