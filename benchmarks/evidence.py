"""What a precision costs in loss: every cell and seed of a scale trained, measured, kept in one file (docs/evidence_design.md).

    python -m benchmarks.evidence_text --out work/evidence
    python -m packing prepare recipes/evidence_14m.yaml
    python -m benchmarks.evidence --scale 14m --gpus 4 --at-once 8 --max-hours 0.15 --out runs/evidence_14m.json

The same command goes on: what stands in the file is not trained again, on whatever machine, and an unfinished run whose folder is
here goes on from its checkpoint. `--steps 50` trains that many steps of each cell, says how long they took, and keeps nothing.

Exit status: that of `python -m pretrain matrix`: 0 all are in the file, 1 some run failed, 2 a mistake in what was given, 130 or
143 stopped, 138 hours are over.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence_results import Results, baseline_of, check_named, key_of
from benchmarks.machine import command
from foundation.errors import InputError
from foundation.locks import FileLock
from foundation.signals import StopRequest
from foundation.tables import markdown, or_dash
from pretrain.compare.matrix import Outcome, run_all
from pretrain.compare.matrix_cell import TIME_IS_UP_STATUS
from pretrain.compare.matrix_file import CELL, Matrix, MatrixRun, load_matrix
from pretrain.compare.ranking import Ranking
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import read_run
from pretrain.settings.config import layered

RESERVE = 40.0  # seconds of the hours in which runs save and what has ended is measured
LEAST = 20.0  # seconds that training gets, however few hours there are
# Of a run that is timed: nothing is evaluated in between, and nothing kept.
TIMED = ("evaluate.every=null", "evaluate.packs=8", "checkpoint.every=null", "checkpoint.at_end=false")
TIMED += ("schedule.kind=constant", "schedule.warmup=0")


def main(arguments: Sequence[str] | None = None) -> int:
    began, options = time.monotonic(), parse_arguments(arguments)
    try:
        return time_cells(options) if options.steps else collect(options, began, command(arguments))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the recipe's settings, in every run")
    parser.add_argument("--scale", required=True, help="what recipes/matrices/evidence_SCALE.yaml describes: 14m, 35m, 111m, ...")
    parser.add_argument("--matrix", type=Path, help="another matrix file for the scale")
    parser.add_argument("--out", type=Path, help="the result file")
    parser.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="key=value",
        help="these runs: cell=bf16 seed=1; put settings before it",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs to spread the runs over")
    parser.add_argument("--at-once", type=int, metavar="N", help="runs side by side; default one on each GPU")
    parser.add_argument(
        "--max-hours", type=float, metavar="H", help="of the whole; then runs save, and what has ended is measured"
    )
    parser.add_argument(
        "--baselines-again",
        action="store_true",
        help="train baselines whose folders are gone once more, where another run of their seed is to be compared with them",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="time N steps of each cell, and keep nothing")
    options = parser.parse_intermixed_args(arguments)
    if not (options.out or options.steps):
        parser.error("--out FILE is needed, to hold the results; or --steps N, to time each cell")
    return options


def matrix_of(options: argparse.Namespace, overrides: Sequence[str] | None = None, **changes: Any) -> Matrix:
    """`overrides`: in place of those of the command line."""
    path = options.matrix or Path("recipes/matrices") / f"evidence_{options.scale}.yaml"
    changes = {"gpus": options.gpus, "at_once": options.at_once, **changes}
    given = {key: value for key, value in changes.items() if value is not None}
    matrix = load_matrix(path, options.overrides if overrides is None else overrides, **given)
    check_named(matrix)
    return matrix


def collect(options: argparse.Namespace, began: float, command: str) -> int:
    """Train and measure what is not in the file."""
    if options.max_hours is not None and not 0 < options.max_hours < math.inf:
        raise InputError(f"--max-hours {options.max_hours:g}: hours are wanted, above 0")
    seconds = None if options.max_hours is None else options.max_hours * 3600
    training = None if seconds is None else max(seconds - RESERVE - (time.monotonic() - began), LEAST)
    matrix = matrix_of(options, max_hours=None if training is None else training / 3600)
    chosen, results = matrix.only(options.only), Results(options.out)
    results.check(matrix, options.scale)
    if unkept := [run.name for run in chosen if not run.recipe.checkpoint.at_end]:
        raise InputError(f"{unkept[0]}: `checkpoint.at_end: false` leaves no model behind that could be measured; leave it out")
    runs = results.lacking(chosen)
    print(f"{len(chosen) - len(runs)} of {len(chosen)} runs stand in {options.out}", flush=True)
    if not runs:
        return 0
    runs = that_can_begin(runs, results)
    if options.baselines_again:
        runs = with_baselines(matrix, runs, results)
    with RunFolder(matrix.folder), results.locked() as lock, StopRequest(passed_on=True) as stop:
        measuring = start_measuring(options, matrix.path, command, lock)
        try:
            outcomes = run_all(matrix, runs, stop, Ranking(matrix))
        finally:
            measuring.stdin.close()  # what has ended is measured still
        left = None if seconds is None else max(seconds - (time.monotonic() - began), LEAST)
        try:
            failed = measuring.wait(left) != 0
        except subprocess.TimeoutExpired:
            measuring.terminate()
            measuring.wait()
            failed = False
            print("hours are over; what is not measured yet will be, by the same command", file=sys.stderr)
    return report_outcome(outcomes, chosen, Results(options.out), stop, failed=failed)


def that_can_begin(runs: Sequence[MatrixRun], results: Results) -> list[MatrixRun]:
    """`runs` without those that begin with a checkpoint that is gone, and that no other of them will make: that is said.
    InputError where none is left."""
    folders = {run.run_dir.resolve() for run in runs}
    lacked = {key_of(run): run.begin for run in runs if run.begin and not run.begin.exists()}
    gone = {name: begin for name, begin in lacked.items() if begin.parent.parent not in folders}
    if not gone:
        return list(runs)
    told = (
        f"{', '.join(gone)}: the checkpoints that they begin with are not here ({next(iter(gone.values()))} is the first), and "
        f"no run of this command makes them. Where {results.path} has the baseline already, go on where its run folder is, or "
        "train it once more with another --out"
    )
    if len(gone) == len(runs):
        raise InputError(told)
    print(f"left out: {told}", file=sys.stderr, flush=True)
    return [run for run in runs if key_of(run) not in gone]


def with_baselines(matrix: Matrix, runs: Sequence[MatrixRun], results: Results) -> list[MatrixRun]:
    """`runs`, and before them the baselines of their seeds whose models are not here. One that the file has as halted would halt
    again and leave no model, so that is said instead."""
    wanted = [baseline_of(matrix, run) for run in runs]
    again = {one.name: one for one in wanted if one is not None and one not in runs and not one.is_finished()}
    halted = [name for name, run in again.items() if results.has_halted(run)]
    for run in map(again.pop, halted):
        what = f"{key_of(run)} stands in {results.path} as halted, so it is not trained again"
        print(f"{what}; the runs of its seed are measured without their distance from it", flush=True)
    return [*again.values(), *runs]


def start_measuring(options: argparse.Namespace, matrix: Path, command: str, lock: FileLock) -> subprocess.Popen[bytes]:
    """A process of its own, so that torch is read once and nothing waits for it; it ends after its standard input does. It shares
    the file's `lock`, as it may outlive us."""
    asked = [str(matrix), *options.overrides, "--out", str(options.out), "--scale", options.scale, "--command", command]
    launched = [sys.executable, "-m", "benchmarks.evidence_endpoints", *asked]
    environment = dict(os.environ)
    if not options.gpus:
        environment.setdefault("OMP_NUM_THREADS", "1")  # on a CPU the runs need the cores
    shared = {"start_new_session": True, "env": environment, "pass_fds": [lock.fileno()]}
    return subprocess.Popen(launched, stdin=subprocess.PIPE, **shared)


def report_outcome(
    outcomes: Sequence[Outcome], chosen: Sequence[MatrixRun], results: Results, stop: StopRequest, *, failed: bool
) -> int:
    """Say what has come of it; returns the exit status."""
    for status in ("failed", "halted"):
        if names := [each.run.name for each in outcomes if each.status == status]:
            print(f"{status}: {', '.join(names)}", file=sys.stderr)
    missing = results.lacking(chosen)
    print(f"{len(chosen) - len(missing)} of {len(chosen)} runs stand in {results.path}", flush=True)
    if stop.requested:
        return 128 + stop.requested
    if gone := [run.name for run in missing if run.is_finished() and not (run.run_dir / "final" / "config.json").is_file()]:
        print(
            f"finished, and without a model in `final`: {', '.join(gone)}; remove their folders to train again", file=sys.stderr
        )
        failed = True
    if failed or any(each.status in ("failed", "halted") for each in outcomes):
        return 1
    return TIME_IS_UP_STATUS if missing else 0


def time_cells(options: argparse.Namespace) -> int:
    """Train a few steps of each cell, one seed of each, and say how long a whole run would take."""
    whole = {key_of(run): run for run in matrix_of(options).runs}
    place = f"runs/evidence_timing/{options.scale}/{{cell}}"
    overrides = layered([*options.overrides, *TIMED, f"train.steps={options.steps}", f"log.every={options.steps}"])
    matrix = matrix_of(options, overrides, run_dir=place)
    # A branch takes as long as the same cell from scratch, and its checkpoint is not here.
    timed = [run for run in matrix.only(options.only) if run.begin is None]
    first = {run.values[CELL]: run for run in reversed(timed)}
    runs = list(reversed(first.values()))
    with RunFolder(matrix.folder), StopRequest(passed_on=True) as stop:
        outcomes = run_all(matrix, runs, stop, Ranking(matrix))
    rows = []
    for outcome in outcomes:
        run, summary = outcome.run, {}
        if run.is_finished():
            summary = read_run(run.run_dir).summary
        steps, step = whole[key_of(run)].recipe.train.steps, summary.get("step_ms")
        total = None
        if step and steps and outcome.seconds:
            total = outcome.seconds + (steps - options.steps) * step / 1000
        figures = [summary.get(key) for key in ("first_step_seconds", "step_ms", "tokens_per_second", "memory_gib")]
        forms = ("{:.1f}".format, "{:.1f}".format, "{:,.0f}".format, "{:.1f}".format)
        rows.append([run.values[CELL], outcome.status, *(or_dash(each, form) for each, form in zip(figures, forms, strict=True))])
        rows[-1] += [or_dash(each, "{:.0f}".format) for each in (outcome.seconds, total)]
    header = ["cell", "status", "first step, s", "step, ms", "tokens/s", "GiB", f"{options.steps} steps, s", "whole run, s"]
    print(f"\n{markdown(header, rows, names=2)}\n", flush=True)
    return 128 + stop.requested if stop.requested else int(any(each.status in ("failed", "halted") for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
