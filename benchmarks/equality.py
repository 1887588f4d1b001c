"""Train the same recipe in one process and in several, and hold loss and gradient norm of every step against each other.

    python -m benchmarks.equality [--topology ddp] [--processes 2 4] [--steps 50] [--gpu] [--folder F] [--out F] [key=value ...]

The real launcher under `accelerate launch`, on the CPU unless `--gpu` is given. Every number of processes computes the same
microbatches. Each process adds up its own, and then all are added up. So figures differ by the order of additions in FP32, and by
what the following steps make of that. How much that is by itself shows one process that takes the microbatches of each step in
backward order. `key=value` arguments go to the launcher of every run. A topology is the name of a file in accelerate_configs/;
figures of other topologies stay in the result file, and share with this one what `--folder` keeps of runs in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.kill_resume import PACKS_PER_STEP, write_packs, write_recipe
from benchmarks.machine import LAUNCH, ROOT, measured_on
from foundation.files import hash_of, write_json
from packing.batch import BatchStream, StepBatches
from pretrain.metrics.run_folder import describe_environment
from pretrain.metrics.run_record import read_metrics

RESULTS = ROOT / "benchmarks" / "results" / "resume" / "equality_cpu.json"
FIGURES = ("loss", "gradient_norm")
# as the first argument: be the launcher that takes microbatches in backward order
BACKWARDS = "--launch-backwards"
ORDER = "1, microbatches backwards"
# Over kill_resume's recipe: eight microbatches a step, which one, two, four and eight processes share evenly.
OVERRIDES = (
    "optimizer.learning_rate=3e-4",
    "schedule.kind=constant",
    "schedule.warmup=10",
    f"batch.microbatch={PACKS_PER_STEP // 8}",
)
OVERRIDES += (
    "evaluate.every=null",
    "checkpoint.every=null",
    "checkpoint.at_end=false",
    "parity=off",
)
CASES = {
    "fp32": ("precision=fp32", "weights=fp32"),
    "bf16_exact": ("precision=bf16", "weights=bf16_exact"),
    # A BF16 weight that rounds otherwise changes all BF16 values after it by a unit: at this rate none does in 50 steps.
    "bf16_exact, rate 1e-6": (
        "precision=bf16",
        "weights=bf16_exact",
        "optimizer.learning_rate=1e-6",
    ),
}


def curves(
    arguments: Sequence[str],
    run_dir: Path,
    topology: str,
    processes: int,
    *,
    gpu: bool,
    backward_order: bool = False,
) -> dict[str, list[float]]:
    """Train, unless that was done, and return each figure step by step. SystemExit with the launcher's words where it fails."""
    config = topology if processes > 1 else "bf16" if gpu else "cpu"
    script = ["-m", "benchmarks.equality", BACKWARDS] if backward_order else ["train_accelerate.py"]
    options = [
        "--config_file",
        f"accelerate_configs/{config}.yaml",
        "--num_processes",
        str(processes),
    ]
    command = [*LAUNCH, *options, *script]
    environment = (
        os.environ | {"OMP_NUM_THREADS": "1"} | ({} if gpu else {"ACCELERATE_USE_CPU": "true"})
    )
    if not (run_dir / "summary.json").exists():
        shutil.rmtree(run_dir, ignore_errors=True)  # of a run that was broken off
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(
                f"{shlex.join(command)} ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
            )
    steps = [record for record in read_metrics(run_dir) if "gradient_norm" in record]
    return {figure: [record[figure] for record in steps] for figure in FIGURES}


def name_of(
    case: str,
    wanted: Sequence[str],
    topology: str,
    processes: int,
    *,
    gpu: bool,
    backward_order: bool = False,
) -> str:
    """A run folder's, by all that decides what is trained in it, so that a kept run is taken for no other. One process has
    no topology."""
    launched = f"{topology}-{processes}" if processes > 1 else "1"
    return f"{case}-{launched}-{backward_order}-{hash_of({'wanted': wanted, 'gpu': gpu})[:8]}"


def apart(
    one: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]]
) -> dict[str, float | None]:
    """The largest relative difference of each figure over all steps, and the first step in which one is above 1e-6."""
    relative = {
        key: [abs(b / a - 1) for a, b in zip(one[key], other[key], strict=True)] for key in FIGURES
    }
    beyond = [
        step
        for step, each in enumerate(zip(*relative.values(), strict=True), start=1)
        if max(each) > 1e-6
    ]
    return {key: max(each) for key, each in relative.items()} | {
        "first step above 1e-6": beyond[0] if beyond else None
    }


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return by case the curves by number of processes, and how far each is from that of one."""
    runs = {"1": (1, False), ORDER: (1, True)} | {
        str(number): (number, False) for number in arguments.processes
    }
    packs, results = folder / "packs", {}
    recipe = write_recipe(folder, "qwen3", packs if packs.exists() else write_packs(packs))
    for case in arguments.cases:
        overrides = CASES[case]
        for fused in ("on", "off"):
            name, by_processes = f"{case}, fused {fused}", {}
            wanted = [
                *OVERRIDES,
                *overrides,
                f"model.fused={fused}",
                f"train.steps={arguments.steps}",
                *arguments.overrides,
            ]
            for number, (processes, backward_order) in runs.items():
                launch = {
                    "topology": arguments.topology,
                    "processes": processes,
                    "gpu": arguments.gpu,
                }
                launch["backward_order"] = backward_order
                run_dir = folder / name_of(f"{case}-{fused}", wanted, **launch)
                by_processes[number] = curves(
                    [str(recipe), *wanted, f"run_dir={run_dir}"], run_dir, **launch
                )
            differences = {
                number: apart(by_processes["1"], by_processes[number]) for number in list(runs)[1:]
            }
            for number, each in differences.items():
                print(f"{arguments.topology}, {name}, processes {number}: {each}", flush=True)
            results[name] = {"apart": differences, "curves": by_processes}
    return results


def launch_backwards() -> int:
    """The launcher, its microbatches in backward order."""
    import train_accelerate

    step = BatchStream.step

    def backwards(self: BatchStream, number: int) -> StepBatches:
        batches = step(self, number)
        return replace(batches, microbatches=batches.microbatches[::-1])

    BatchStream.step = backwards
    del sys.argv[1]
    return train_accelerate.main()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="ddp", help="of the runs of several processes")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep the runs there; those that are finished there are not repeated",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="equality-") as passing:
        results = compare(arguments, (arguments.folder or Path(passing)).resolve())
    report = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    report[arguments.topology] = {
        **measured_on(
            describe_environment({"config_file": f"accelerate_configs/{arguments.topology}.yaml"})
        ),
        "steps": arguments.steps,
        "results": results,
    }
    write_json(arguments.out, report)


if __name__ == "__main__":
    sys.exit(launch_backwards() if BACKWARDS in sys.argv[1:2] else main())
