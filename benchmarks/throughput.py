"""Ways to train one model, side by side: every way in a process of its own, on the same packs, from the same weights.

    python -m benchmarks.throughput --out benchmarks/results/speed/h200_throughput.json
    python -m benchmarks.throughput --model llama_8b --out benchmarks/results/speed/h200_throughput_8b.json
    python -m benchmarks.throughput --report benchmarks/results/speed/h200_throughput.json

Measured are whole steps, data included; the machine's own limits in the same run, so that every figure is also a share of what
is possible; and of every way whether it trains what plain Hugging Face trains (benchmarks.ways.judge). A way that fails stands in
the result with its error. The file is written after every way, and `--continue` adds to it what is missing. `--report` makes the
tables of docs/results.md from result files; `--tiny` goes through everything with a small model on a CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks import throughput_report
from benchmarks.machine import command
from benchmarks.throughput_run import Bench, Settings
from benchmarks.ways.entries import BASELINE, MODELS
from foundation.command import run_command
from foundation.errors import InputError


def main() -> None:
    arguments = parse_arguments()
    if arguments.report:
        throughput_report.write(arguments.report, arguments.page)
    else:
        measure(arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--model", choices=MODELS, default="qwen3_1_7b")
    what.add_argument("--tiny", action="store_true", help="the model `tiny`, on the CPU: a dry run")
    what.add_argument("--recipe", type=Path, help="another recipe for the model's ways")
    what.add_argument(
        "--ways",
        type=lambda text: text.split(","),
        metavar="A,B",
        help="only these (default: all of the model)",
    )
    what.add_argument("--list", action="store_true", help="name the model's ways and end")
    how = parser.add_argument_group("how")
    how.add_argument("--warm-up", type=int, default=3, help="steps before those that are timed")
    how.add_argument("--steps", type=int, default=8, help="timed steps")
    how.add_argument("--timeout", type=float, default=400, help="seconds for one way")
    how.add_argument(
        "--continue", action="store_true", dest="go_on", help="keep what --out has measured already"
    )
    how.add_argument("--out", type=Path, help="the result file")
    show = parser.add_argument_group("showing results")
    show.add_argument(
        "--report",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="result files to make the tables from",
    )
    show.add_argument(
        "--page",
        type=Path,
        default=Path("docs/results.md"),
        help="whose table between the markers is replaced",
    )
    arguments = parser.parse_args()
    if not (arguments.report or arguments.out or arguments.list):
        parser.error("--out FILE is needed, to hold the result")
    return arguments


def measure(arguments: argparse.Namespace) -> None:
    """Measure the ways that are asked for, the baseline first; InputError for a way that the model has not."""
    arguments.model = "tiny" if arguments.tiny else arguments.model
    model = MODELS[arguments.model]
    if arguments.list:
        print(
            "\n".join(
                f"{entry.name:30} {entry.label}; weights {entry.weights}" for entry in model.entries
            )
        )
        return
    known = [entry.name for entry in model.entries]
    if unknown := [name for name in arguments.ways or () if name not in known]:
        raise InputError(
            f"--ways: {arguments.model} has no way {', '.join(unknown)}; it has {', '.join(known)}"
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
    """Keep the tiny model on the CPU; InputError where there is no GPU for the others: on a CPU they would train for days."""
    if arguments.model == "tiny":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    import torch  # only here: naming the ways and making the report need none

    if not torch.cuda.is_available():
        raise InputError("no CUDA device is here; take --tiny for a dry run on the CPU")


if __name__ == "__main__":
    sys.exit(run_command(main))
