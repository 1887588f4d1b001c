"""Run every cell of a comparison: `python -m pretrain matrix MATRIX.yaml [key=value ...] [--only precision=bf16] [--dry-run]`.

Each is a run of the launcher in processes of its own: one that fails is reported and does not touch the others. A run that is
finished is left alone and one that was interrupted is resumed. Ctrl-C and SIGTERM are passed on: what is running saves and stops,
and nothing else is started. A second Ctrl-C makes it exit at once.

Exit status: 0 all finished, 1 some run failed, 2 something given cannot be used (one message says what), 130 or 143 stopped, 138
the hours of some run are over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from foundation.errors import InputError
from foundation.files import replace_file
from foundation.reading import load_object
from foundation.signals import StopRequest
from foundation.units import duration
from pretrain.compare import report
from pretrain.compare.matrix_file import Matrix, MatrixRun, load_matrix
from pretrain.compare.report import markdown, or_dash
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import MATRIX_FILE, read_metrics

POLL_SECONDS = 0.2
PROGRESS_SECONDS = 5.0
SHOWN_LOG_LINES = 12
TIME_IS_UP = 128 + signal.SIGUSR1  # the status of a run whose `train.max_hours` are over
LAUNCHER = Path(__file__).resolve().parents[2] / "train_accelerate.py"

Status = Literal["finished", "finished before", "failed", "stopped", "not started"]


@dataclass
class Outcome:
    """How a run of the matrix ended, this time."""

    run: MatrixRun
    status: Status = "not started"
    seconds: float | None = None


@dataclass
class StartedRun:
    """A run's processes, in a group of their own, so that a terminal's Ctrl-C reaches them only through us, once."""

    run: MatrixRun
    process: subprocess.Popen[bytes]
    gpu: int | None
    log_begins: int  # bytes of the log before this start
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, matrix: Matrix, run: MatrixRun, gpu: int | None, *, side_by_side: bool) -> StartedRun:
        """Mark the run's folder and start its launcher, which sees no other `gpu`; InputError where they cannot be written."""
        try:
            mark(matrix, run, side_by_side=side_by_side)
            with run.log.open("ab") as log:
                streams = {"stdout": log, "stderr": subprocess.STDOUT}
                begins, command, environment = log.tell(), command_of(matrix, run), environment_on(gpu)
                environment["PRETRAIN_STATUS_FILE"] = str(status_file(run))
                process = subprocess.Popen(command, start_new_session=True, env=environment, **streams)
        except (OSError, ValueError) as error:
            raise InputError(f"{run.run_dir}: cannot be used as its run folder: {error}") from None
        return cls(run, process, gpu, begins)

    def signal(self, number: int) -> None:
        """Signal the whole group: accelerate's launcher of a single process passes nothing on by itself."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.process.pid, number)

    def has_ended(self) -> bool:
        """Whether nothing of the group runs. A launcher that was signalled ends without waiting for its trainer to save."""

        def runs_in_group(process: psutil.Process) -> bool:
            try:
                return os.getpgid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE
            except (ProcessLookupError, psutil.NoSuchProcess):
                return False

        return self.process.poll() is not None and not any(map(runs_in_group, psutil.process_iter()))

    def end_of_log(self) -> list[str]:
        """The last lines of its output since it was started this time."""
        output = self.run.log.read_bytes()[self.log_begins :].decode(errors="replace")
        return output.rstrip().splitlines()[-SHOWN_LOG_LINES:]

    def progress(self) -> str:
        """How far it is, from the last line of its metrics."""
        try:
            steps = [record for record in read_metrics(self.run.run_dir) if "loss" in record]
        except InputError:  # not there yet
            steps = []
        at = f"step {steps[-1]['step']}, loss {steps[-1]['loss'] or float('nan'):.4f}" if steps else "starting"
        return f"{self.run.name}: {at}, {duration(round(time.monotonic() - self.started))}"


def command_of(matrix: Matrix, run: MatrixRun) -> list[str]:
    """The command that one would type; `--quiet` leaves out accelerate's own traceback under a message of ours."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", str(matrix.settings.accelerate)]
    return [*launch, os.path.relpath(LAUNCHER), str(matrix.settings.recipe), *run.overrides]


def environment_on(gpu: int | None) -> dict[str, str]:
    """Our environment, in which only the `gpu`-th of the GPUs that we see can be seen; None: all of them."""
    if gpu is None:
        return dict(os.environ)
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if seen and gpu >= len(seen):
        raise InputError(f"`gpus`: CUDA_VISIBLE_DEVICES names {len(seen)}, which is fewer; lower `gpus`")
    return os.environ | {"CUDA_VISIBLE_DEVICES": seen[gpu] if seen else str(gpu)}


def status_file(run: MatrixRun) -> Path:
    """Where the run leaves its exit status, in place of which accelerate's launcher ends with its own."""
    return run.log.with_suffix(".status")


def take_status(run: MatrixRun) -> int | None:
    """The exit status that the run has left, None where it was killed; asked for once."""
    try:
        return int(status_file(run).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    finally:
        status_file(run).unlink(missing_ok=True)


def least_busy(gpus: int | None, running: Sequence[StartedRun]) -> int | None:
    return None if gpus is None else min(range(gpus), key=[one.gpu for one in running].count)


def run_all(matrix: Matrix, runs: Sequence[MatrixRun], stop: StopRequest) -> list[Outcome]:
    """Run what is not finished, in its order and at most `at_once` at a time, until all have ended or a signal comes."""
    outcomes = {run.name: Outcome(run, "finished before" if run.is_finished() else "not started") for run in runs}
    waiting = [run for run in runs if outcomes[run.name].status == "not started"]
    at_once, gpus = min(matrix.settings.at_once, len(waiting)), matrix.settings.gpus
    screen = Screen(len(runs), len(runs) - len(waiting))
    running: list[StartedRun] = []
    try:
        while running or (waiting and not stop.requested):
            while waiting and len(running) < at_once and not stop.requested:
                run = waiting.pop(0)
                try:
                    gpu = least_busy(gpus, running)
                    running.append(StartedRun.start(matrix, run, gpu, side_by_side=at_once > (gpus or 1)))
                    screen.say(f"{run.name}: started; its output goes to {run.log}")
                except InputError as error:
                    outcomes[run.name].status = "failed"
                    screen.say(f"{run.name}: failed: {error}")
            for signal_received in stop.take():
                screen.say(f"{signal_received.name}: passed on to {', '.join(one.run.name for one in running)}")
                for one in running:
                    one.signal(signal_received)
            for one in [one for one in running if one.has_ended()]:
                running.remove(one)
                stopped = take_status(one.run) == TIME_IS_UP or stop.requested
                status: Status = "finished" if one.run.is_finished() else "stopped" if stopped else "failed"
                outcomes[one.run.name] = outcome = Outcome(one.run, status, time.monotonic() - one.started)
                screen.ended(outcome, one)
            screen.progress(running)
            time.sleep(POLL_SECONDS)
    finally:
        for one in running:  # only after an error of our own: nothing may go on that nobody watches
            one.signal(signal.SIGTERM)
    return list(outcomes.values())


def mark(matrix: Matrix, run: MatrixRun, *, side_by_side: bool) -> None:
    """Note in the run folder which matrix the run belongs to, and whether any part of it shared the machine with other runs.

    The speed of such a run says nothing of its precision, and the report leaves it out.
    """
    path = run.run_dir / MATRIX_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    before = load_object(path, "remove it to run the cell again") if path.exists() else {}
    shared = side_by_side or before.get("side_by_side", False)
    content = {"matrix": matrix.settings.name, "cell": run.values, "side_by_side": shared}
    replace_file(path, json.dumps(content, indent=2).encode() + b"\n")


class Screen:
    """What is printed meanwhile: a line as each run starts and ends and, on a terminal, one that says how far they are."""

    def __init__(self, runs: int, done: int) -> None:
        self.runs, self.done = runs, done
        self._on_terminal = sys.stdout.isatty()
        self._progress_at = 0.0  # when the progress line was last written
        if done:
            self.say(f"{done} of {runs} cells are finished already")

    def say(self, text: str) -> None:
        print(f"\r\x1b[2K{text}" if self._on_terminal else text, flush=True)

    def ended(self, outcome: Outcome, one: StartedRun) -> None:
        self.done += outcome.status == "finished"
        took = duration(outcome.seconds or 0.0)
        self.say(f"{one.run.name}: {outcome.status} after {took}, {self.done} of {self.runs} cells done")
        if outcome.status == "failed":
            self.say(f"  exit status {one.process.returncode}; the last of {one.run.log}:")
            self.say("\n".join(f"  | {line}" for line in one.end_of_log()))

    def progress(self, running: Sequence[StartedRun]) -> None:
        now = time.monotonic()
        if self._on_terminal and running and now - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = now
            text = "; ".join(one.progress() for one in running)[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[2K{text}", end="", flush=True)


def write_report(matrix: Matrix) -> str:
    """Write the report over all finished runs that are comparable (an axis may be a learning rate); returns what to print."""
    finished = [run.run_dir for run in matrix.runs if run.is_finished()]
    if not finished:
        return "No cell is finished, so there is nothing to report yet."
    baseline = matrix.baseline.run_dir if matrix.baseline.run_dir in finished else finished[0]
    name = matrix.folder / matrix.settings.name
    out, page, html = (name.with_name(f"{name.name}.{ending}") for ending in ("png", "md", "html"))
    vary = list(dict.fromkeys(key for run in matrix.runs for key in run.values))
    text = report.write(finished, baseline=baseline, out=out, page=page, html=html, vary=vary, leave_out_unfair=True)
    missing = len(matrix.runs) - len(finished)
    return text + (f"\n{missing} of {len(matrix.runs)} cells are not finished and not in it." if missing else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status. Raises InputError for a mistake in what it was given."""
    parser = argparse.ArgumentParser(
        prog="python -m pretrain matrix", description="Run every cell of a comparison and report on it."
    )
    parser.add_argument("matrix", type=Path, help="what is compared: a YAML file, see recipes/matrices/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the recipe's settings, in every cell")
    parser.add_argument("--only", action="append", default=[], metavar="key=value", help="run these cells only; may be repeated")
    parser.add_argument(
        "--cell", type=int, metavar="N", help="run one cell alone, of those picked the N-th from 0, as an array of jobs does"
    )
    parser.add_argument("--count", action="store_true", help="print the number of cells, and stop")
    parser.add_argument("--dry-run", action="store_true", help="print the command of each cell, and stop")
    options = parser.parse_intermixed_args(arguments)
    matrix = load_matrix(options.matrix, options.overrides)
    runs = matrix.only(options.only)
    if options.count:
        print(len(runs))
        return 0
    if options.cell is not None:
        if not 0 <= options.cell < len(runs):
            raise InputError(f"command line: --cell {options.cell}: there are {len(runs)} cells, from 0 to {len(runs) - 1}")
        runs = [runs[options.cell]]
    if options.dry_run:
        for run in runs:
            print(f"# {run.name}{' (finished)' if run.is_finished() else ''}\n{shlex.join(command_of(matrix, run))}")
        return 0
    # Its lock: two of these would start the same runs. Single cells run beside each other, each under its own run's lock.
    lock = RunFolder(matrix.folder) if options.cell is None else contextlib.nullcontext()
    with lock, StopRequest(passed_on=True) as stop:
        outcomes = run_all(matrix, runs, stop)
        rows = [[each.run.name, each.status, or_dash(each.seconds, duration), str(each.run.run_dir)] for each in outcomes]
        print(f"\n{markdown(['cell', 'status', 'took', 'run folder'], rows, names=4)}\n", flush=True)
        if options.cell is None:
            print(write_report(matrix))
    if stop.requested:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 128 + stop.requested
    if any(outcome.status == "stopped" for outcome in outcomes):
        print("\nhours are over; the same command goes on from here", file=sys.stderr)
        return TIME_IS_UP
    return 0 if all(outcome.status in ("finished", "finished before") for outcome in outcomes) else 1
