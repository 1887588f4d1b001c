"""Does the fast path train what plain transformers trains? Loss and gradients of one microbatch, beside plain FP32.

    python -m benchmarks.parity --out benchmarks/results/h200_parity.json precision=bf16

The fast path is the launcher's own, in the precision and with the weights that the recipe and the overrides name; `parity: true`
makes the same comparison before a run. Here plain transformers in BF16, on the same separate documents, is measured against the
same FP32 reference as well: what it loses to rounding is what a BF16 path may lose.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from pretrain.metrics.run_folder import describe_environment
from pretrain.model.distributed import make_accelerator
from pretrain.plan.preflight import prepare_job
from pretrain.precision.registry import PRECISIONS
from pretrain.run.assembly import assemble
from pretrain.settings.config import load_recipe
from pretrain.settings.launch_environment import with_precision
from pretrain.verify.parity import compare, fast_pass, valid_share
from pretrain.verify.plain_model import Pass, plain_model, plain_pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--recipe", type=Path, default=Path("benchmarks/qwen3_1_7b.yaml"))
    parser.add_argument("--packs", type=int, default=2, help="of the run's first step; they must divide its packs")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    accelerator = make_accelerator()
    job = prepare_job(with_precision(load_recipe(arguments.recipe, arguments.overrides), os.environ), accelerator)
    step = job.with_microbatch(arguments.packs).batches(accelerator).step(0)
    step = replace(step, microbatches=step.microbatches[:1])
    batch = step.microbatches[0]
    assembly = assemble(job, accelerator)

    def plain(dtype: torch.dtype) -> Pass:
        reference = plain_model(assembly.hf, accelerator.device, dtype)
        return plain_pass(reference, step.microbatches, step.valid_tokens, accelerator.device)

    fast = fast_pass(assembly.model, assembly.hf, step, accelerator)
    reference, share = plain(torch.float32), valid_share(step, accelerator)
    found = {
        "batch": {"tokens": batch.input_ids.numel(), "documents": batch.documents, "valid_tokens": batch.valid_tokens},
        "precision": job.precision.name,
        "weights": job.recipe.weights,
        "fast_path": compare(fast, reference, job.precision.tolerance, share).record(),
        "plain_bf16": compare(plain(torch.bfloat16), reference, PRECISIONS["bf16"].tolerance, share).record(),
    }
    report = {
        "command": shlex.join(["python", "-m", "benchmarks.parity", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "environment": describe_environment({}),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report | found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
