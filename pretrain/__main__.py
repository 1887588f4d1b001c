"""Commands for runs and packs: `python -m pretrain COMMAND`, or `low-precision COMMAND`.

The commands of `python -m packing` are available here too.
"""

from __future__ import annotations

import importlib
import signal
import sys
from difflib import get_close_matches
from typing import Any, NoReturn

from foundation.signals import end_on_ctrl_c

if __name__ == "__main__":
    end_on_ctrl_c()

from foundation.command import end_process, run_command
from pretrain import __version__
from pretrain.settings import commands

# Map each command to the module whose `main` runs the command, and to a description for the help.
RUNS = {
    "train": (
        "pretrain.run.train_command",
        "train a recipe on this machine with accelerate launch",
    ),
    "plan": (
        "pretrain.run.plan_command",
        "estimate time, memory and microbatch of a recipe on other devices",
    ),
    "evaluate": (
        "pretrain.run.evaluate_command",
        "compute the held-out loss of a checkpoint",
    ),
    "report": (
        "pretrain.compare.report",
        "compare runs: tables, curves, and the difference in loss from a baseline",
    ),
    "doctor": (
        "pretrain.run.doctor",
        "test which precisions work on this machine, and how fast",
    ),
    "export": (
        "pretrain.run.export",
        "export a checkpoint as a Hugging Face folder",
    ),
    "sample": (
        "pretrain.run.sampling",
        "generate text with a finished run or an exported model",
    ),
    "matrix": (
        "pretrain.compare.matrix",
        "run all cells of an experiment and compare them",
    ),
    "which": (
        "pretrain.compare.which",
        "find the fastest precision at equal loss for your model and data",
    ),
}
# Map each command of `python -m packing` to its module and its description. The `main` of that
# module expects the name of the command as its first argument.
PACKS = {
    "tokenizer": ("packing.__main__", "train a tokenizer on text"),
    "prepare": ("packing.__main__", "tokenize text and pack it"),
    "follow": ("packing.__main__", "tokenize and pack text while a run trains on it"),
    "inspect": ("packing.__main__", "show the counts, lengths and text of packs"),
}
COMMANDS = RUNS | PACKS


def console() -> NoReturn:
    """Run the command on the command line and exit. Entry point of the program `low-precision`."""
    end_process(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """Run the command whose name is the first argument, and return its exit status.

    `foundation.command.run_command` documents the exit statuses. The status for an unknown command
    is 2.
    """
    if arguments and arguments[0] in COMMANDS:
        return run_command(lambda: _run(arguments))
    if arguments in (["-h"], ["--help"]):
        print(usage())
        return 0
    if arguments == ["--version"]:
        print(f"low-precision {__version__}")
        return 0
    if arguments:
        similar = [
            f"; did you mean {name}?" for name in get_close_matches(arguments[0], COMMANDS, 1)
        ]
        print(f"error: unknown command {arguments[0]!r}{''.join(similar)}", file=sys.stderr)
    print(usage(), file=sys.stderr)
    return 2


def _run(arguments: list[str]) -> int:
    """Run the command `arguments[0]` with the remaining arguments, and return its exit status.

    The options are parsed before the module of the command is imported, because most of the modules
    import torch. So --help and typos answer at once.
    """
    name, *options = arguments
    parsed: Any = arguments if name in PACKS else commands.read(name, options)
    module = importlib.import_module(COMMANDS[name][0])
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return module.main(parsed)


def usage() -> str:
    """Return the help text of the program, with one line for each command."""
    lines = [f"  {name:<10} {description}" for name, (_, description) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: low-precision COMMAND ..., or python -m pretrain COMMAND ...",
            "",
            *lines,
            "",
            "COMMAND --help lists the options of a command. --version prints the version.",
        ]
    )


if __name__ == "__main__":
    console()
