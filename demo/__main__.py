"""Run the demo: `make demo` prepares data, trains a small model and compares precisions.

The steps are the real commands, run as a user would type them. Only the corpus is specific to the
demo. All paths come from the recipe, so the same commands work without the demo. Steps that are
already done are skipped, so after Ctrl-C the next call continues.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import psutil

from demo.corpus import standard_library, write_corpus
from foundation.errors import InputError
from foundation.signals import handling
from foundation.units import duration
from packing.pack_maker import usable_cores
from pretrain.settings.config import load_recipe, run_dir_of
from pretrain.settings.recipe import Recipe

RECIPE = "recipes/smoke.yaml"
MATRIX = "recipes/matrices/demo.yaml"
REPORT = Path("runs/demo/demo.html")


@dataclass(frozen=True)
class Step:
    """A step of the demo."""

    title: str
    # File or folder that exists once the step is done.
    product: Path
    run: Callable[[], object]


def main() -> int:
    """Run the demo and return its exit status."""
    try:
        recipe = load_recipe(RECIPE)
        times = run_steps(steps_of(recipe))
        print(last_screen(recipe, times))
    except InputError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as failure:
        print(
            f"\ndemo: `{failure.cmd}` ended with exit code {failure.returncode}; see its message "
            "above. `make demo` continues from here.",
            file=sys.stderr,
        )
        return failure.returncode
    except KeyboardInterrupt:
        print("\nStopped. `make demo` continues from here.", file=sys.stderr)
        return 130
    return 0


def run_steps(steps: list[Step]) -> str:
    """Run the steps that are not done. Return a text with the time of each of them."""
    times = []
    for number, step in enumerate(steps, start=1):
        is_done = step.product.exists()
        note = " (already done)" if is_done else ""
        print(f"\n[{number}/{len(steps)}] {step.title}{note}", flush=True)
        if not is_done:
            started = time.monotonic()
            step.run()
            title = step.title[0].lower() + step.title[1:]
            times.append(f"{title} {duration(time.monotonic() - started)}")
    return ", ".join(times) or "all steps were done before"


def steps_of(recipe: Recipe) -> list[Step]:
    """Return the steps of the demo."""
    corpus = Path(recipe.data.source)
    tokenizer = Path(recipe.data.tokenizer)
    packs = recipe.data.packs
    # The recipe's vocabulary is small. At a hidden size of 256, the embeddings of 4,096 tokens have
    # a million parameters, and three minutes of training are too short for more.
    vocabulary = recipe.model.config["vocab_size"]
    train_tokenizer = python("tokenizer", corpus, "--vocabulary", vocabulary, "--out", tokenizer)
    return [
        Step("Text", corpus, lambda: write_text(corpus)),
        Step("Tokenizer", tokenizer / "tokenizer_config.json", lambda: run(train_tokenizer)),
        Step("Packs", packs / "packs.json", lambda: run(python("prepare", RECIPE))),
        Step(
            "Training",
            run_dir_of(recipe) / "final",
            lambda: run(python("train", RECIPE, "--config", "cpu")),
        ),
        Step(
            "Comparison of FP32 with emulated FP8 and FP4",
            REPORT,
            lambda: compare(MATRIX, REPORT),
        ),
    ]


def compare(matrix: str, report: Path) -> None:
    """Run a matrix, which writes `report`. If a run fails, delete this incomplete report.

    So the next call continues with the runs that are not finished.
    """
    try:
        run(python("matrix", matrix))
    except subprocess.CalledProcessError:
        report.unlink(missing_ok=True)
        raise


def write_text(corpus: Path) -> None:
    """Write the corpus from Python's standard library."""
    documents, size = write_corpus(corpus, standard_library())
    print(
        f"the standard library of Python {platform.python_version()}: {documents:,} documents, "
        f"{size / 1e6:.1f} MB"
    )


def python(*arguments: object) -> list[str]:
    """Return the command `python -m pretrain arguments`."""
    return [script("python"), "-m", "pretrain", *map(str, arguments)]


def script(name: str) -> str:
    """Return the path of the program `name` that is installed next to this Python.

    The path is relative if it lies below the current folder.
    """
    path = Path(sys.executable).parent / name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


@cache
def idle_cores() -> int:
    """Return the number of cores for the demo's commands: the idle ones, and at least 1.

    On two idle cores, two threads trained the demo's model 1.8 times as fast as one thread (4,900
    and 2,670 tokens per second). With five other processes on the two cores, threads waited for
    each other: two threads trained 230 to 440 tokens per second, and one thread 1,300 to 1,500.
    benchmarks/results/cpu/demo.json has these speeds (`threads`).
    """
    idle = round((os.cpu_count() or 1) * (1 - psutil.cpu_percent(interval=1) / 100))
    cores = max(1, min(idle, usable_cores()))
    if cores < usable_cores():
        print(
            f"This machine is busy, so the demo uses {cores} of {usable_cores()} cores and takes "
            "longer. The environment variable OMP_NUM_THREADS sets another number.",
            flush=True,
        )
    return cores


def run(command: list[str]) -> None:
    """Print and run `command`, with one thread per idle core.

    Raises CalledProcessError for an exit code other than 0. After a signal, the command saves its
    state and ends. Then KeyboardInterrupt is raised for Ctrl-C, and SystemExit for other signals.
    """
    print(f"$ {shlex.join(command)}", flush=True)
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # Ctrl-C reaches every process of the terminal at once.
        if number != signal.SIGINT:
            process.send_signal(number)

    # Set the number of threads. The default of accelerate is the number of physical cores, which
    # many virtual machines cannot report.
    environment = dict(os.environ)
    if "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(idle_cores())
    process = subprocess.Popen(command, env=environment)
    with handling(pass_on):
        code = process.wait()
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    if received:
        raise SystemExit(128 + received[0])
    if code:
        # Popen returns the negative number of the signal that ended the process, such as -9.
        # Convert it as a shell does, to 137.
        raise subprocess.CalledProcessError(code if code > 0 else 128 - code, shlex.join(command))


def last_screen(recipe: Recipe, times: str) -> str:
    """Return the results, the times, the files, and suggestions for the next commands."""
    run_dir = run_dir_of(recipe)
    final = run_dir / "final"
    summary = json.loads((run_dir / "summary.json").read_text())
    vocabulary = recipe.model.config["vocab_size"]
    sample = shlex.join(python("sample", final, "class "))
    longer = shlex.join(python("train", RECIPE, "name=longer", "train.steps=3000"))
    return f"""
Held-out loss {summary["held_out_loss"]:.3f} nats per token: perplexity \
{summary["held_out_perplexity"]:.1f}. A uniform guess has {vocabulary:,}.
Time: {times}

Files
  comparison       {REPORT} (open it in a browser)
  model            {final}

Next
  generate text    {sample}
  train longer     {longer}
  compare losses   make which
  your own text    docs/quick_start.md
  start over       make clean demo"""


if __name__ == "__main__":
    sys.exit(main())
