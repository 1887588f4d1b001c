"""`low-precision COMMAND`, which `pip install .` brings, or `python -m pretrain COMMAND`: what is done with runs and packs.

`accelerate launch ... train_accelerate.py` trains; the commands of `python -m packing` are here too.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import NoReturn

from foundation.command import run_command
from pretrain.settings import commands

# By name: the module whose `main` runs the command and returns its exit status, and what it does.
RUNS = {
    "plan": (
        "pretrain.run.plan_command",
        "time, memory and microbatch of a recipe on devices that are not here",
    ),
    "evaluate": (
        "pretrain.run.evaluate_command",
        "the held-out loss of a checkpoint; behind `accelerate launch ... -m pretrain`",
    ),
    "report": (
        "pretrain.compare.report",
        "curves and tables of run folders, and how one run differs from another",
    ),
    "doctor": (
        "pretrain.run.doctor",
        "which precision works on this machine, on what, and how fast",
    ),
    "export": (
        "pretrain.run.export",
        "any checkpoint as a Hugging Face folder, on a machine without a GPU",
    ),
    "sample": ("pretrain.run.sampling", "how a finished run or an exported model continues a text"),
    "flops": ("pretrain.plan.flops_table", "what a token costs, by every definition in use"),
    "matrix": ("pretrain.compare.matrix", "run every cell of a comparison, and report on it"),
    "which": (
        "pretrain.compare.which",
        "which precision to train a model in: its gain at equal loss, on your text",
    ),
    "phases": (
        "pretrain.compare.phases",
        "find a fast configuration in phases, each on the best before it",
    ),
}
# Commands of a module that has several, and takes the name as the first of its arguments.
PACKS = {
    "tokenizer": ("packing.__main__", "text to a tokenizer"),
    "prepare": ("packing.__main__", "text to packs"),
    "inspect": ("packing.__main__", "what packs hold: counts, lengths, text"),
}
COMMANDS = RUNS | PACKS


def console() -> NoReturn:
    """The installed command."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """Run the command that the first argument names; returns its exit status, as `run_command` says."""
    if arguments and arguments[0] in COMMANDS:

        def run() -> int:
            name, *given = arguments
            told = (
                commands.read(name, given)
                if name in commands.COMMANDS
                else arguments
                if name in PACKS
                else given
            )
            module = importlib.import_module(COMMANDS[name][0])
            return module.main(
                told,
                *(
                    [importlib.import_module("train_accelerate").assemble]
                    if name == "evaluate"
                    else []
                ),
            )

        return run_command(run)
    lines = [f"  {name:<9} {what}" for name, (_, what) in COMMANDS.items()]
    last = "COMMAND --help says more; to train: accelerate launch train_accelerate.py RECIPE"
    usage = "\n".join(
        [
            "usage: low-precision COMMAND ..., or python -m pretrain COMMAND ...",
            "",
            *lines,
            "",
            last,
        ]
    )
    if arguments in (["-h"], ["--help"]):
        print(usage)
        return 0
    if arguments:
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1, cutoff=0.5)
        print(
            f"error: unknown command {arguments[0]!r}"
            + (f"; did you mean {near[0]!r}?" if near else ""),
            file=sys.stderr,
        )
    print(usage, file=sys.stderr)
    return 2


if __name__ == "__main__":
    console()
