"""Compare ways to train a model: each in its own process, on the same packs, from the same weights.

    python -m benchmarks.speed ways --out FILE.json
    python -m benchmarks.speed ways --model llama_8b --out FILE.json

A way is a trainer with its settings. Complete steps are measured, including data. The limit of the
machine is measured in the same run, so that every speed is also a share of the possible speed. The
losses and gradient norms of each way are compared with those of plain Hugging Face
(`libraries/judge.py`). A way that fails is recorded with its error. The file is written after every
way, and `--continue` adds the missing ones. `--tiny` runs everything with a small model on a CPU.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.machine import command
from benchmarks.speed.bench import Bench, Settings
from benchmarks.speed.libraries.entries import BASELINE, MODELS
from foundation.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    what = parser.add_argument_group("what to measure")
    what.add_argument("--model", choices=MODELS, default="qwen3_1_7b", help="default: %(default)s")
    what.add_argument(
        "--tiny", action="store_true", help="dry run with the model `tiny` on the CPU"
    )
    what.add_argument("--recipe", type=Path, help="use another recipe for the model")
    what.add_argument(
        "--ways",
        type=lambda text: text.split(","),
        metavar="A,B",
        help="ways to measure; default: all of the model",
    )
    what.add_argument("--list", action="store_true", help="list the ways of the model and exit")
    how = parser.add_argument_group("how to measure")
    how.add_argument("--warm-up", type=int, default=3, help="steps before the timed ones")
    how.add_argument("--steps", type=int, default=8, help="number of timed steps")
    how.add_argument("--timeout", type=float, default=400, help="maximum seconds of one way")
    how.add_argument(
        "--continue",
        action="store_true",
        dest="go_on",
        help="keep the results that --out already has",
    )
    how.add_argument("--out", type=Path, help="the result file")


def measure(arguments: argparse.Namespace) -> None:
    """Measure the requested ways, the baseline first.

    Raises InputError for a way that the model does not have, and without --out.
    """
    if not (arguments.out or arguments.list):
        raise InputError("set --out FILE for the result")
    if arguments.tiny:
        arguments.model = "tiny"
    model = MODELS[arguments.model]
    if arguments.list:
        for entry in model.entries:
            print(f"{entry.name:30} {entry.label}; weights {entry.weights}")
        return
    names = [entry.name for entry in model.entries]
    unknown = [name for name in arguments.ways or () if name not in names]
    if unknown:
        raise InputError(
            f"--ways: {arguments.model} has no way {', '.join(unknown)}; it has {', '.join(names)}"
        )
    check_device(arguments)
    chosen = [
        entry
        for entry in model.entries
        if not arguments.ways or entry.name in (BASELINE, *arguments.ways)
    ]
    settings = Settings(
        model=arguments.model,
        recipe=arguments.recipe or model.recipe,
        configuration=model.configuration,
        warm_up=arguments.warm_up,
        steps=arguments.steps,
        timeout=arguments.timeout,
        whole_documents=model.whole_documents,
    )
    Bench(settings, arguments.out, command(), go_on=arguments.go_on).run(chosen)


def check_device(arguments: argparse.Namespace) -> None:
    """Keep the tiny model on the CPU. Raises InputError if there is no GPU for other models.

    Other models would train for days on a CPU.
    """
    if arguments.model == "tiny":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    # Imported late, because --list does not need it.
    import torch

    if not torch.cuda.is_available():
        raise InputError("there is no CUDA device; use --tiny for a dry run on the CPU")
