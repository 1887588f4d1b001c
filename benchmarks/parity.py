"""What parity finds in a recipe, and what it costs: the beginning of step 0 beside plain transformers, a few times over.

    python -m benchmarks.parity --out benchmarks/results/h200_parity_cost_bf16.json precision=bf16

The model is assembled as the launcher does it, and has run two microbatches when the clock starts: their kernels' compilation is
a cost of training, whoever comes first. What is timed is all that `parity: on` adds before the first step.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.machine import measured_on, write
from pretrain.model.distributed import make_accelerator
from pretrain.model.packed import forward_backward
from pretrain.optimizer.adamw import clear_gradients
from pretrain.plan.preflight import prepare_job
from pretrain.run.assembly import assemble
from pretrain.run.parity import MICROBATCH, compare_step_0
from pretrain.settings.config import load_recipe
from pretrain.settings.launch_environment import with_precision


def main() -> None:
    arguments = parse_arguments()
    accelerator = make_accelerator()
    job = prepare_job(with_precision(load_recipe(arguments.recipe, arguments.overrides), os.environ), accelerator)
    if job.plan.microbatch is None:
        raise SystemExit("benchmarks.parity: set `batch.microbatch`, which a run would search for")
    assembly = assemble(job, accelerator)
    step = job.batches(accelerator).step(0)
    with assembly.context.preserving_state():
        forward_backward(assembly.model, replace(step, microbatches=step.microbatches[:2]), accelerator)
    clear_gradients(assembly.optimizer, assembly.model)
    if assembly.audit["compiled"] == "nothing":
        job = job.with_microbatch(math.gcd(job.plan.microbatch, MICROBATCH))

    seconds, parts = [], []
    for _ in range(arguments.repeats):
        began = time.perf_counter()
        parity = compare_step_0(job, assembly.model, assembly.optimizer, accelerator)
        seconds.append(round(time.perf_counter() - began, 3))
        parts.append(parity.seconds)
    report = {
        **measured_on(),
        "device": job.plan.devices.name,
        "torch": torch.__version__,
        "precision": job.precision.name,
        "backend": job.active.backend,
        "weights": job.recipe.weights,
        "fused": assembly.audit["fused"],
        "compiled": assembly.audit["compiled"],
        "packs_a_microbatch": job.plan.microbatch,
        "seconds": seconds,
        "parts": parts,
        "parity": parity.record(),
    }
    write(arguments.out, report)
    print(parity.summary())
    print(f"{job.precision.name} on {job.plan.devices.name}: {seconds} s, of which {parts}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--recipe", type=Path, default=Path("benchmarks/qwen3_1_7b.yaml"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
