"""Measure the rates that the GPUs of this machine sustain, see `CardRates`.

A GPU in use reaches its power limit after a fraction of a second, and then lowers its clock. So
GEMMs are measured for seconds without a pause. A measurement takes at most 2 GiB of a GPU's memory.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.utils.benchmark import Timer

from foundation.errors import one_line
from pretrain.metrics.card_rates import CardRates
from pretrain.precision.gemm import TorchGemm
from pretrain.precision.product import PrecisionContext
from pretrain.precision.selection import make_engines, missing_on, select_precision
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings

# Tokens, in_features and out_features of the linear layer whose GEMMs are timed. Models with 2 to
# 10 billion parameters have such layers. Each GEMM takes longer than its launch.
SHAPE = (8192, 4096, 8192)
# Sizes of messages in bytes. A layer of Qwen3-1.7B has 100 MB of BF16 weights.
MESSAGES = (10**7, 10**8, 10**9)
# Number of timed operations on messages of one size.
ROUNDS = 20


def measure_rates() -> CardRates:
    """Measure all visible GPUs of this machine at the same time. Return the rates of the first one.

    This takes about a minute. Each GPU has a child process, so that this process holds no memory of
    a GPU. Raises ProcessRaisedException or ProcessExitedException of torch.multiprocessing if a
    measurement fails.
    """
    count = torch.cuda.device_count()
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="rates-") as folder:
        multiprocessing.spawn(_measure_gpu, (count, f"file://{folder}/ranks", results), count)
    return results.get()


def _measure_gpu(rank: int, count: int, address: str, results: Any) -> None:
    """Measure the GPU with the index `rank` of `count` GPUs. The first one puts its CardRates.

    The processes of the GPUs find each other at `address`.
    """
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    rates = CardRates(
        device=torch.cuda.get_device_name(),
        gemm=gemm_rates(device),
        bandwidth=copy_rate(device),
        launch=launch_seconds(device),
        nccl={},
    )
    if count > 1:
        torch.cuda.empty_cache()
        # torch 2.13 renames two functions. Older versions do not have the new names.
        warnings.simplefilter("ignore", FutureWarning)
        distributed.init_process_group(
            "nccl", address, rank=rank, world_size=count, device_id=device
        )
        rates.nccl.update(collective_rates(device))
        distributed.destroy_process_group()
    if rank == 0:
        results.put(rates)


def gemm_rates(
    device: torch.device, shape: tuple[int, int, int] = SHAPE, seconds: float = 1.0
) -> dict[str, float]:
    """Return `gemm_rate` of BF16 and of each quantized precision that the device computes.

    A precision whose GEMMs fail has no rate. Its error is printed.
    """
    rates = {}
    emulating = LowPrecisionSettings(on_unsupported="emulate")
    for name, precision in PRECISIONS.items():
        active = select_precision(name, emulating, missing_on(device.type))
        if active.engine != "emulation" and precision.compute_dtype == "bfloat16":
            try:
                rates[name] = gemm_rate(active, device, shape, seconds)
            except RuntimeError as error:
                print(f"{name}: the GEMMs failed: {one_line(error)}", file=sys.stderr)
    return rates


def gemm_rate(
    active: ActivePrecision, device: torch.device, shape: tuple[int, int, int], seconds: float
) -> float:
    """Return the FLOP/s of the three GEMMs of a linear layer, computed as in training.

    The operands are quantized before the measurement.

    active: a precision whose activations are BF16, and the engine of its GEMMs.
    shape: tokens, in_features and out_features.
    seconds: time for each GEMM, see `sustained_seconds`.
    """
    tokens, inputs, outputs = shape
    random = partial(torch.randn, dtype=torch.bfloat16, device=device)
    (engine,) = make_engines([active], device).values()
    gemm = engine.gemm("rates", inputs, outputs) if engine else TorchGemm("rates")
    # Without gradients, Transformer Engine does not update the histories of delayed scaling.
    with torch.no_grad(), PrecisionContext(engine, torch.bfloat16).forward(training=True):
        gemm.begin(random(tokens, inputs))
        x = gemm.quantize("input", random(tokens, inputs))
        (saved_x,) = gemm.restore(*gemm.save(gemm.quantize("input", random(tokens, inputs))))
        weight = gemm.quantize("weight", random(outputs, inputs))
        dy = gemm.quantize("grad_output", random(tokens, outputs))
        total = torch.empty(outputs, inputs, device=device)
        products = (
            partial(gemm.matmul, "forward", x, weight, torch.bfloat16),
            partial(gemm.matmul, "dgrad", dy, weight, torch.bfloat16),
            partial(gemm.accumulate, total, dy, saved_x, overwrite=True),
        )
        total_seconds = sum(sustained_seconds(product, seconds) for product in products)
        gemm.end()
    return 6 * tokens * inputs * outputs / total_seconds


def copy_rate(device: torch.device, size: int = 2**28, seconds: float = 0.5) -> float:
    """Return the bytes/s of copying `size` bytes, counted as bytes read plus bytes written.

    `size` must be larger than the caches of the device.
    """
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / sustained_seconds(lambda: target.copy_(source), seconds)


def launch_seconds(device: torch.device, seconds: float = 0.5) -> float:
    """Return the seconds of one launch, measured with many kernels that add two numbers.

    Such a kernel takes less time than its launch, so the device waits for the host.
    """
    number = torch.zeros(1, device=device)
    return sustained_seconds(lambda: number.add_(number), seconds)


def collective_rates(device: torch.device, sizes: Sequence[int] = MESSAGES) -> dict[str, float]:
    """Return the bus bandwidth of operations of the process group, see `CardRates.nccl`.

    All processes of the group must call this function. `sizes` are the sizes of messages in bytes.
    nccl-tests defines the bus bandwidth: doc/PERFORMANCE.md in its repository.
    """
    processes = distributed.get_world_size()
    rates = {}
    for size in sizes:
        part = torch.zeros(size // 4 // processes, device=device)
        message = part.repeat(processes)
        operations = {
            "all_gather": partial(distributed.all_gather_into_tensor, message, part),
            "reduce_scatter": partial(distributed.reduce_scatter_tensor, part, message),
            "all_reduce": partial(distributed.all_reduce, message),
        }
        for name, operation in operations.items():
            sent = size * (processes - 1) / processes * (2 if name == "all_reduce" else 1)
            # Every process calls the operation equally often, in the warm-up too.
            timer = Timer("operation()", globals={"operation": operation})
            rates[f"{name} {size}"] = sent / timer.timeit(ROUNDS).mean
    return rates


def sustained_seconds(run: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of a call of `run`, over calls for `seconds` after a warm-up.

    The calls are timed in blocks, each long enough that the pauses between blocks do not matter.
    """
    # The first call may compile a kernel, or search for the fastest one.
    run()
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).median
