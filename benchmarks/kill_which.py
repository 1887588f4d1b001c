"""Kill `which` at random moments, continue it, and compare it with an uninterrupted command.

    python -m benchmarks.kill_which [--kills 20] [--seed 0]

Runs the real command on the CPU with a small Qwen3: three rounds of FP32 and emulated FP8. After
each SIGKILL the same command is started again. Every second kill ends all processes, like the loss
of a machine. The other kills end only the command, and a training that it has started continues.

Two commands are equal if their rounds have the same trainings, and all values of each step that are
not a time or memory are the same doubles. A training is not repeated if its summary.json, which is
written last, is never written again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.kill_resume import LENGTH, MODELS, figures, write_packs
from benchmarks.machine import ROOT, measured_on, start
from foundation.files import write_json
from pretrain.metrics.run_folder import SUMMARY_FILE, describe_environment
from pretrain.metrics.run_record import read_metrics

RESULTS = ROOT / "benchmarks/results/resume/kill_which.json"
PACKS_PER_STEP = 2
STEPS = 500
ROUNDS = 3
# A kill is at a random moment within this number of seconds after the start of the command.
LATEST_KILL = 14.0
# Exit statuses of a command that has printed its answer: all verdicts are final, or one is open.
ANSWERED = (0, 1)


def main() -> int:
    """Run the command, and return 1 if a kill has changed a result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--out", type=Path, default=RESULTS, help="result file to write")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    # The folder is kept for inspection.
    folder = Path(tempfile.mkdtemp(prefix="kill_which-"))
    recipe = write_recipe(folder)
    uninterrupted = folder / "uninterrupted"
    killed = folder / "killed"
    log = folder / "which.log"
    began = time.monotonic()
    finish(recipe, uninterrupted, log)
    result: dict[str, Any] = {
        **measured_on(describe_environment({})),
        "uninterrupted_seconds": round(time.monotonic() - began, 1),
    }
    kills = []
    repeated: set[str] = set()
    for number in range(arguments.kills):
        # The first kill and every second kill after it end all processes.
        kill = kill_once(recipe, killed, log, rng, everything=number % 2 == 0)
        repeated.update(kill.pop("repeated_trainings"))
        kills.append(kill)
        print(f"kill {number + 1} of {arguments.kills}: {kill}", flush=True)
    finished = finish_times(killed)
    finish(recipe, killed, log)
    repeated |= rewritten(finished, killed)
    differing = differences(uninterrupted, killed)
    result |= {
        "trainings": len(finish_times(killed)),
        "kills": kills,
        "repeated_trainings": sorted(repeated),
        "differences": differing,
    }
    write_json(arguments.out, result)
    print(f"repeated trainings: {sorted(repeated)}; differences: {differing}")
    return 1 if repeated or differing else 0


def write_recipe(folder: Path) -> Path:
    """Write packs and a recipe, and return the recipe's path.

    The packs suffice for one epoch, so no training sees a pack twice.
    """
    packs = write_packs(folder / "packs", training=STEPS * PACKS_PER_STEP)
    recipe = {
        "name": "kill_which",
        "model": {"config": MODELS["qwen3"]},
        "data": {"packs": str(packs), "length": LENGTH},
        "batch": {"tokens": PACKS_PER_STEP * LENGTH, "microbatch": PACKS_PER_STEP},
        "optimizer": {"learning_rate": 0.003},
        "schedule": {"kind": "wsd", "warmup": 5},
        "train": {"steps": STEPS},
        "parity": False,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def command_of(recipe: Path, folder: Path) -> list[str]:
    """Return the command whose trainings are in `folder`."""
    options = ["--precisions", "fp32,delayed", "--seeds", str(ROUNDS), "--steps", str(STEPS)]
    options += ["--hours", "1", "--margin", "50", "--run_dir", str(folder)]
    return [sys.executable, "-m", "pretrain", "which", str(recipe), *options]


def finish(recipe: Path, folder: Path, log: Path) -> None:
    """Run the command to its end. Raises SystemExit if it gives no answer."""
    status = start(command_of(recipe, folder), log, {"OMP_NUM_THREADS": "1"}).wait()
    if status not in ANSWERED:
        raise SystemExit(f"the command ended with status {status}; see {log}")


def kill_once(
    recipe: Path, folder: Path, log: Path, rng: random.Random, *, everything: bool
) -> dict[str, Any]:
    """Start the command, kill it at a random moment, and describe the kill.

    If `everything` is true, the processes of its trainings are killed too. Raises SystemExit if the
    command ends before.
    """
    finished = finish_times(folder)
    process = start(command_of(recipe, folder), log, {"OMP_NUM_THREADS": "1"})
    moment = rng.uniform(0, LATEST_KILL)
    time.sleep(moment)
    if process.poll() is not None:
        raise SystemExit(f"the command ended (status {process.returncode}) before its kill")
    children = psutil.Process(process.pid).children(recursive=True) if everything else []
    for running in [psutil.Process(process.pid), *children]:
        running.kill()
    process.wait()
    return {
        "after_seconds": round(moment, 2),
        "killed": "all processes" if everything else "the command",
        "finished_trainings": len(finish_times(folder)),
        "repeated_trainings": rewritten(finished, folder),
    }


def runs_of(folder: Path) -> Iterator[Path]:
    """Yield the run folders of the trials and of the rounds."""
    yield from sorted(path.parent for path in folder.glob("*/*/matrix.json"))


def finish_times(folder: Path) -> dict[str, int]:
    """Map each finished training to the time at which its summary was written, in nanoseconds."""
    return {
        str(run.relative_to(folder)): (run / SUMMARY_FILE).stat().st_mtime_ns
        for run in runs_of(folder)
        if (run / SUMMARY_FILE).exists()
    }


def rewritten(finished: Mapping[str, int], folder: Path) -> set[str]:
    """Return the trainings of `finished` whose summary is missing or has another time now."""
    now = finish_times(folder)
    return {name for name, written in finished.items() if now.get(name) != written}


def differences(one: Path, other: Path) -> list[str]:
    """Return a text for each difference between the rounds of two commands."""
    names = [[run.name for run in runs_of(folder)] for folder in (one, other)]
    if names[0] != names[1]:
        return [f"{one} has the trainings {names[0]}, {other} has {names[1]}"]
    return [
        f"{a} and {b} differ"
        for a, b in zip(runs_of(one), runs_of(other), strict=True)
        if [*map(figures, read_metrics(a))] != [*map(figures, read_metrics(b))]
    ]


if __name__ == "__main__":
    sys.exit(main())
