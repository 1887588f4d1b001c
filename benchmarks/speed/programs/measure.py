"""Measure other trainers as their own programs, beside this project, on one GPU.

    make speed-table
    python -m benchmarks.speed programs --model Qwen2.5-3B --trainers "ours BF16" llmq --out FILE

All trainers compute the same model on sequences that are one document each, with random tokens, in
steps of the same number of tokens. Each uses its own data path, optimizer and kernels, in the best
settings that are known to run here. The table names the differences that remain. Trainers that have
no variable-length attention need the same time for short documents, because they attend to all
documents of a sequence.

The first command starts `measure.sh`. It installs the packages of each trainer, whose versions
`packages/` pins, into a folder of its own such as `PEERS/torchtitan`, and measures with `--packages
PEERS`. Packages that the folder does not have are those of this interpreter.

If a microbatch does not fit, it is halved. A trainer that fails is recorded with the end of its
output. The result file is written after every run, and trainers that it already has are not
measured again. `--model tiny` is a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.machine import command, environment_from_elsewhere, measured_on, run_to_its_end
from benchmarks.speed import generated_packs
from benchmarks.speed.programs.task import QWEN3, WARM_UP, Task, shape_of, task_of
from benchmarks.speed.programs.trainers import TRAINERS, Trainer
from foundation.errors import InputError
from foundation.files import write_json
from foundation.units import markdown
from pretrain.settings.config import load_recipe

OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory")
# Characters of a failed run's output that are recorded.
LAST_OUTPUT = 4000
# Columns of the table, in tokens/s.
COLUMNS = ("BF16", "FP8", "FP8 with the head")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", default=QWEN3, help=f"model; default: {QWEN3}")
    parser.add_argument("--trainers", nargs="*", help="names of trainers or rows; default: all")
    parser.add_argument("--packages", type=Path, help="folder with the packages of the trainers")
    parser.add_argument("--tokens", type=int, help="tokens of a step; default: the recipe's")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run; default: 12")
    parser.add_argument("--timeout", type=float, default=280, help="maximum seconds of a run")
    parser.add_argument("--out", type=Path, required=True, help="result file")


def measure(arguments: argparse.Namespace) -> None:
    """Measure the requested trainers that the result file does not have."""
    if arguments.steps <= WARM_UP:
        raise InputError(f"--steps: the first {WARM_UP} steps are not timed; set more")
    task = task_of(arguments.model, arguments.steps, arguments.tokens)
    if task.name == "tiny":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    names = {name for trainer in TRAINERS for name in (trainer.program, trainer.name)}
    if unknown := set(arguments.trainers or ()) - names:
        raise InputError(f"--trainers {unknown.pop()}: choose of {', '.join(sorted(names))}")
    environment = environment_from_elsewhere()
    result = {**measured_on(environment), "task": asdict(task), "rows": {}}
    if arguments.out.exists():
        result = json.loads(arguments.out.read_text())
        if result["task"] != asdict(task):
            raise InputError(f"{arguments.out}: has another task; choose another file")
    for trainer in TRAINERS:
        chosen = arguments.trainers or [trainer.name]
        if trainer.name in result["rows"] or not {trainer.name, trainer.program} & set(chosen):
            continue
        row = run(trainer, task, arguments)
        result["rows"][trainer.name] = row
        write_json(arguments.out, result)
        print(trainer.name, row.get("tokens_per_second") or row["failed"], flush=True)
    print(table(result))


def run(trainer: Trainer, task: Task, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a trainer. Microbatches are halved until they fit."""
    row: dict[str, Any] = {"command": command(), "differs": trainer.differs}
    if trainer.models and task.name not in trainer.models:
        return row | {"failed": f"its models are {', '.join(trainer.models)} here"}
    paths = [str(Path.cwd())]
    if arguments.packages:
        paths.insert(0, str((arguments.packages / trainer.program.replace(" ", "_")).resolve()))
    environment = trainer.environment | {
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
    }
    if not has_module(trainer.module, paths):
        return row | {"failed": f"needs the package {trainer.module}"}
    microbatch = task.microbatch
    while True:
        folder = Path(tempfile.mkdtemp(prefix="peers"))
        try:
            write_json(folder / "task.json", asdict(task))
            if trainer.program == "ours":
                recipe = load_recipe(Path(shape_of(task.name).recipe))
                generated_packs.make(folder / "packs", recipe, task.steps, whole_documents=True)
            status, output = run_to_its_end(
                trainer.command(task, microbatch, folder), arguments.timeout, environment
            )
            seconds = trainer.seconds(task, output, folder) if status == 0 else []
        finally:
            shutil.rmtree(folder)
        is_full = status != 0 and any(text in output for text in OUT_OF_MEMORY)
        if not is_full or microbatch == 1:
            break
        microbatch //= 2
    row |= {"microbatch": microbatch, "seconds": seconds}
    if len(seconds) <= WARM_UP:
        lines = [line for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\w+Error\b", line)]
        reason = f"status {status}: " + "".join((errors or lines)[-1:])[:200]
        return row | {"failed": reason, "output": output[-LAST_OUTPUT:]}
    median = statistics.median(seconds[WARM_UP:])
    return row | {"tokens_per_second": round(task.tokens / median)}


def has_module(name: str, paths: list[str]) -> bool:
    """Return True if a module is installed here or is in one of the folders."""
    found = any(
        (Path(path) / name).exists() or (Path(path) / f"{name}.py").exists() for path in paths
    )
    return found or importlib.util.find_spec(name) is not None


def table(result: dict[str, Any]) -> str:
    """Return the table of a result in Markdown: a row for each trainer, and its speeds.

    The reasons of trainers that failed follow.
    """
    rows: dict[str, list[str]] = {}
    failed = []
    for name, row in result["rows"].items():
        program, precision, option = re.fullmatch(r"(.*) (BF16|FP8)(.*)", name).groups()
        if precision + option in COLUMNS:
            label = program
            column = COLUMNS.index(precision + option)
        else:
            # A trainer with an option that has no column, in BF16, has a row of its own.
            label = f"{program}{option}"
            column = 0
        cells = rows.setdefault(label, [*["–"] * len(COLUMNS), row["differs"]])
        if "tokens_per_second" in row:
            cells[column] = f"{row['tokens_per_second']:,}"
        else:
            failed.append(f"{name}: {row['failed']}")
    header = ["trainer", *COLUMNS, "differs from ours"]
    text = markdown(header, [[label, *cells] for label, cells in rows.items()])
    return "\n".join([text, "", *failed]).strip()
