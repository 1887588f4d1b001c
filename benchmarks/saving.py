"""Measure how long a checkpoint stops the training, and how long it takes to be on the disk.

    python -m benchmarks.saving --gb 20 --folder /scratch --out FILE
    torchrun --nproc-per-node 4 -m benchmarks.saving --gb 20 ...     # replicas share the writing

The tensors are as with `weights: bf16_exact`, 12 bytes per parameter, in matrices of 2048 x 6144.
While a checkpoint is written, a loop computes like a training: GEMMs on the device with Python in
between. A thread that holds the interpreter lock would slow down this loop.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from benchmarks.machine import measured_on
from foundation.files import write_json
from pretrain.checkpoint.checkpoint import Checkpoints, bytes_needed

SHAPE = (2048, 6144)
# BF16 weight, 16 remainder bits, two FP32 moments.
BYTES_A_PARAMETER = 12


def main() -> None:
    """Run the command."""
    arguments = parse_arguments()
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world_size > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model, optimizer = tensors(arguments.gb, device)
    folder = Path(tempfile.mkdtemp(prefix="saving-", dir=arguments.folder)) if rank == 0 else Path()
    if world_size > 1:
        shared = [str(folder)]
        torch.distributed.broadcast_object_list(shared)
        folder = Path(shared[0])
    try:
        measured = measure(
            Checkpoints(folder / "checkpoints", keep=1), model, optimizer, device, arguments.saves
        )
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if world_size > 1:
        torch.distributed.destroy_process_group()
    if rank != 0:
        return
    report = {
        **measured_on(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "processes": world_size,
        # A value above the number of cores means that other processes were running.
        "load_average": os.getloadavg()[0],
        "gb": bytes_needed(model | optimizer) / 1e9,
        **measured,
    }
    write_json(arguments.out, report)
    print(json.dumps({key: report[key] for key in ("gb", *measured)}, indent=1))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=2.0, help="size of a checkpoint in 1e9 bytes")
    parser.add_argument("--saves", type=int, default=3, help="number of measured saves")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder on the disk to measure",
    )
    parser.add_argument("--out", type=Path, required=True, help="result file to write")
    return parser.parse_args()


def tensors(gb: float, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a model and an optimizer state with about `gb` times 1e9 bytes together."""
    count = max(1, round(gb * 1e9 / BYTES_A_PARAMETER / (SHAPE[0] * SHAPE[1])))
    model = {
        f"layers.{n}.weight": torch.full(SHAPE, n, dtype=torch.bfloat16, device=device)
        for n in range(count)
    }
    optimizer = {
        f"{key}/{name}": torch.full(SHAPE, 0.5, device=device)
        for key in ("exp_avg", "exp_avg_sq")
        for name in model
    }
    optimizer |= {
        f"remainder/{name}": torch.zeros(SHAPE, dtype=torch.int16, device=device) for name in model
    }
    return model, optimizer


def measure(
    checkpoints: Checkpoints,
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    device: torch.device,
    saves: int,
) -> dict[str, Any]:
    """Return medians of the seconds of a save, and of the milliseconds of a step.

    Seconds of a save: until the training continues, and until the checkpoint is on the disk.
    Milliseconds of a step: without a save, and while a checkpoint is written.
    """
    work = step_on(device)
    checkpoints.save(1, model, optimizer, {})
    undisturbed = [work() for _ in range(30)]
    stop_seconds = []
    durable_seconds = []
    disturbed = []
    for step in range(2, 3 + saves):
        began = time.perf_counter()
        checkpoints.save(step, model, optimizer, {}, behind=True)
        stop_seconds.append(time.perf_counter() - began)
        while not checkpoints._pending.completed.done():
            disturbed.append(work())
        durable_seconds.append(time.perf_counter() - began)
        checkpoints.wait()
    return {
        "training_stops_seconds": statistics.median(stop_seconds[1:]),
        "durable_seconds": statistics.median(durable_seconds[1:]),
        "step_ms_alone": statistics.median(undisturbed) * 1e3,
        "step_ms_while_writing": statistics.median(disturbed) * 1e3,
    }


def step_on(device: torch.device) -> Callable[[], float]:
    """Return a function that computes for about 10 ms, on the device and in Python.

    The function returns the seconds that it took.
    """
    if device.type == "cuda":
        products = 20
        matrix = torch.ones(4096, 4096, device=device, dtype=torch.bfloat16)
    else:
        products = 4
        matrix = torch.ones(512, 512, device=device)

    def step() -> float:
        began = time.perf_counter()
        for _ in range(products):
            matrix @ matrix
        sum(number * number for number in range(20_000))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return step


if __name__ == "__main__":
    main()
