"""Faults that need several processes, in each of them: started by `accelerate launch`, prints who found what as JSON.

ACCELERATE_USE_CPU=true accelerate launch --config_file accelerate_configs/ddp.yaml -m tests.multi.broken_ranks fp32 current
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pretrain.model.distributed import make_accelerator
from tests.pretrain.verify.small_runs import SmallRun, build_run

ROOT = Path(__file__).resolve().parents[2]


def nothing(run: SmallRun) -> None:
    pass


def gradient_of_a_rank_lost(run: SmallRun) -> None:
    if run.accelerator.process_index == 1:
        change_loss(run, lambda loss: loss.detach() + loss * 0)


def averaged_over_ranks(run: SmallRun) -> None:
    """What DDP and FSDP2 do where the loss is not scaled up by their number."""
    change_loss(run, lambda loss: loss.detach() + (loss - loss.detach()) / run.accelerator.num_processes)


def change_loss(run: SmallRun, change: Callable[[Tensor], Tensor]) -> None:
    run.packed.register_forward_hook(lambda module, args, loss: change(loss))


FAULTS = {
    "nothing": nothing,
    "a rank's gradient is lost": gradient_of_a_rank_lost,
    "the loss is averaged over ranks": averaged_over_ranks,
}


def start(topology: str, *precisions: str) -> dict[str, dict[str, list[str]]]:
    """What two processes found: by fault and precision, the failures that parity names."""
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", f"accelerate_configs/{topology}.yaml"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    environment = clean | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, "-m", "tests.multi.broken_ranks", *precisions]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")] or [done.stdout + done.stderr]
    assert done.returncode == 0, line
    return json.loads(line.removeprefix("FOUND "))


def main() -> None:
    torch.set_num_threads(1)
    accelerator = make_accelerator()
    found: dict[str, dict[str, list[str]]] = {}
    for precision in sys.argv[1:]:
        for what, make in FAULTS.items():
            run = build_run(accelerator, precision, layers=1)
            make(run)
            found.setdefault(what, {})[precision] = run.parity().failures
    if accelerator.is_main_process:
        print("FOUND " + json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
