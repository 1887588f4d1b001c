"""Compare the loss and gradient norm of every step between one process and several.

    python -m benchmarks.equality [--topology ddp] [--processes 2 4] [--steps 50] [--gpu]
        [--folder F] [--out F] [key=value ...]

Runs the real launcher under `accelerate launch`, on the CPU unless `--gpu` is given. Every number
of processes computes the same microbatches. Each process sums its own microbatches, then the sums
are added. So results differ only by the order of additions in FP32, and by the effect of this order
on later steps. A run in one process with the microbatches of each step in reverse order shows how
large this effect is.

`key=value` arguments are passed to the launcher of every run. A topology is the name of a file in
accelerate_configs/. Results of other topologies stay in the result file. With `--folder`, runs in
one process are shared between topologies.
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
# First argument that makes this module a launcher that reverses the order of microbatches.
BACKWARDS = "--launch-backwards"
# Name of the run in one process whose microbatches are in reverse order.
REVERSED_RUN = "1, microbatches backwards"
# Overrides of kill_resume's recipe. Eight microbatches per step can be divided evenly between one,
# two, four and eight processes.
OVERRIDES = (
    "optimizer.learning_rate=3e-4",
    "schedule.kind=constant",
    "schedule.warmup=10",
    f"batch.microbatch={PACKS_PER_STEP // 8}",
    "evaluate.every=null",
    "checkpoint.every=null",
    "checkpoint.at_end=false",
    "parity=off",
)
CASES = {
    "fp32": ("precision=fp32", "weights=fp32"),
    "bf16_exact": ("precision=bf16", "weights=bf16_exact"),
    # A BF16 weight that rounds differently changes all later BF16 values. At this learning rate, no
    # weight rounds differently within 50 steps.
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
    """Train, unless the run is already finished, and return loss and gradient norm by step.

    Raises SystemExit with the launcher's output if the launcher fails.
    """
    config = topology
    if processes == 1:
        config = "bf16" if gpu else "cpu"
    script = ["-m", "benchmarks.equality", BACKWARDS] if backward_order else ["train_accelerate.py"]
    options = [
        "--config_file",
        f"accelerate_configs/{config}.yaml",
        "--num_processes",
        str(processes),
    ]
    command = [*LAUNCH, *options, *script]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if not gpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    if not (run_dir / "summary.json").exists():
        # Delete what an interrupted run has left.
        shutil.rmtree(run_dir, ignore_errors=True)
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(
                f"{shlex.join(command)} ended with status {done.returncode}:\n"
                f"{(done.stdout + done.stderr)[-3000:]}"
            )
    steps = [record for record in read_metrics(run_dir) if "gradient_norm" in record]
    return {figure: [record[figure] for record in steps] for figure in FIGURES}


def name_of(
    case: str,
    overrides: Sequence[str],
    topology: str,
    processes: int,
    *,
    gpu: bool,
    backward_order: bool = False,
) -> str:
    """Return the name of a run's folder. It depends on everything that determines the training.

    The name of a run in one process does not contain the topology.
    """
    launch = f"{topology}-{processes}" if processes > 1 else "1"
    return f"{case}-{launch}-{backward_order}-{hash_of({'wanted': overrides, 'gpu': gpu})[:8]}"


def relative_differences(
    reference: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]]
) -> dict[str, float | None]:
    """Return the largest relative difference of each figure.

    The entry "first step above 1e-6" is the first step with a larger difference than 1e-6, or None.
    """
    relative = {
        key: [abs(b / a - 1) for a, b in zip(reference[key], other[key], strict=True)]
        for key in FIGURES
    }
    beyond = [
        step
        for step, values in enumerate(zip(*relative.values(), strict=True), start=1)
        if max(values) > 1e-6
    ]
    largest = {key: max(values) for key, values in relative.items()}
    return largest | {"first step above 1e-6": beyond[0] if beyond else None}


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return, by case, the curves of all runs and their differences from the run in one process."""
    # Map the name of each run to its number of processes, and to True for the reverse order.
    runs = {"1": (1, False), REVERSED_RUN: (1, True)}
    runs |= {str(number): (number, False) for number in arguments.processes}
    packs = folder / "packs"
    results = {}
    recipe = write_recipe(folder, "qwen3", packs if packs.exists() else write_packs(packs))
    for case in arguments.cases:
        for fused in ("on", "off"):
            name = f"{case}, fused {fused}"
            by_processes = {}
            overrides = [
                *OVERRIDES,
                *CASES[case],
                f"model.fused={fused}",
                f"train.steps={arguments.steps}",
                *arguments.overrides,
            ]
            for number, (processes, backward_order) in runs.items():
                launch = {
                    "topology": arguments.topology,
                    "processes": processes,
                    "gpu": arguments.gpu,
                    "backward_order": backward_order,
                }
                run_dir = folder / name_of(f"{case}-{fused}", overrides, **launch)
                by_processes[number] = curves(
                    [str(recipe), *overrides, f"run_dir={run_dir}"], run_dir, **launch
                )
            differences = {
                number: relative_differences(by_processes["1"], by_processes[number])
                for number in list(runs)[1:]
            }
            for number, difference in differences.items():
                print(f"{arguments.topology}, {name}, processes {number}: {difference}", flush=True)
            results[name] = {"apart": differences, "curves": by_processes}
    return results


def launch_backwards() -> int:
    """Run the launcher with the microbatches of each step in reverse order."""
    import train_accelerate

    step = BatchStream.step

    def reversed_step(self: BatchStream, place: int) -> StepBatches:
        batches = step(self, place)
        return replace(batches, microbatches=batches.microbatches[::-1])

    BatchStream.step = reversed_step
    del sys.argv[1]
    return train_accelerate.main()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="ddp", help="topology of runs with several processes")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[2, 4], help="numbers of processes"
    )
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=list(CASES), help="default: all"
    )
    parser.add_argument("--steps", type=int, default=50, help="steps of each run")
    parser.add_argument("--gpu", action="store_true", help="train on GPUs")
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep the runs in this folder, and reuse finished runs in it",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="result file to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of all runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="equality-") as temporary:
        results = compare(arguments, (arguments.folder or Path(temporary)).resolve())
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
