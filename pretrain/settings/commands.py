"""Command-line options of the commands that import torch.

They are parsed before torch is imported, so that --help and typos answer at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from inspect import getdoc
from pathlib import Path

from foundation.command import CommandParser
from pretrain.settings.config import LaunchParser

# Default devices of `plan`.
USUAL = ("H100", "H200", "B200", "8xB200")
# Defaults of `sample`: at most 64 new tokens, temperature 0.8, nucleus sampling with top-p 0.95.
TOKENS = 64
TEMPERATURE = 0.8
TOP_P = 0.95


def read(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of `command`, which is a key of COMMANDS.

    Raises InputError if an argument is invalid. Ends the process after --help.
    """
    parser_class, add_options = COMMANDS[command]
    parser = parser_class(f"python -m pretrain {command}", getdoc(add_options))
    add_options(parser.add_argument)
    return parser.read(arguments)


def count(text: str) -> int:
    """Parse a whole number of at least 1. argparse reports others as `invalid count value`."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def plan(add: Callable) -> None:
    """Estimate time and memory of a recipe on devices that this machine does not have.

        python -m pretrain plan my.yaml train.tokens=20e9        on H100, H200, B200 and 8 x B200
        python -m pretrain plan my.yaml --on 8xH200 --mfu 0.42   at an MFU that a run has reached

    To plan a launch on this machine: accelerate launch ... train_accelerate.py RECIPE --plan.
    That needs the packs.
    """
    add(
        "--on",
        action="append",
        default=[],
        metavar="DEVICE",
        help="device to plan for: H200, 8xB200, 'RTX 4090'; may be repeated; "
        f"default: {', '.join(USUAL)}",
    )
    add(
        "--mfu",
        action="append",
        default=[],
        type=float,
        metavar="SHARE",
        help="model FLOPs utilization to assume, for example 0.4; give two for a range",
    )


def evaluate(add: Callable) -> None:
    """Compute the held-out loss of a checkpoint, or its loss on a text file of your own.

        python -m pretrain evaluate RUN_OR_RECIPE [FILE] [--resume CHECKPOINT] [key=value ...]

    Without a checkpoint, evaluate the model that the run would start from. Writes nothing into
    the run folder. On GPUs, start it as
    accelerate launch --config_file accelerate_configs/bf16.yaml -m pretrain evaluate ...
    """
    add(
        "--resume",
        default="auto",
        metavar="CHECKPOINT",
        help="checkpoint to evaluate; default: the newest intact checkpoint of the run",
    )


def doctor(add: Callable) -> None:
    """Test the precisions on this machine: whether they work, their engine and their speed.

    Each precision trains a model of one layer for a few steps. Parity with plain transformers is
    checked before the first step.
    """
    add(
        "--precisions",
        type=lambda text: text.split(","),
        metavar="A,B",
        help="precisions to test; default: all",
    )


def export(add: Callable) -> None:
    """Export a checkpoint as a Hugging Face folder with a model card.

    Needs no GPU, and as much memory as the weights take.
    """
    add(
        "source",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="a step-* folder, or a run folder to export its newest checkpoint",
    )
    add("out", type=Path, nargs="?", metavar="OUT", help="folder to create; default: RUN/export")
    add(
        "--best",
        action="store_true",
        help="export the run's checkpoint with the lowest held-out loss",
    )
    add(
        "--dtype",
        choices=["bf16", "fp32"],
        help="dtype of the exported weights; default: as the run stores them. With bf16_exact, "
        "fp32 joins each BF16 weight with its 16 remainder bits",
    )
    add(
        "--push",
        metavar="OWNER/NAME",
        help="also upload to this hub repository, which is created as private if it is missing",
    )


def sample(add: Callable) -> None:
    """Generate text with a trained model.

    FOLDER is the folder of a finished run or a model folder that transformers can load. `python -m
    pretrain export` makes a model folder from any checkpoint. Runs on a GPU if there is one, in
    the dtype of the stored weights.
    """
    add("folder", type=Path, metavar="FOLDER", help="a run folder or a model folder")
    add("prompts", nargs="*", metavar="PROMPT", help="text to continue; '' starts a new text")
    add(
        "--prompt", action="append", default=[], help="a prompt given as an option; may be repeated"
    )
    add(
        "--tokens",
        "--max-new-tokens",
        "--max_new_tokens",
        type=count,
        default=TOKENS,
        help="maximum number of new tokens; default %(default)s",
    )
    add(
        "--temperature",
        type=float,
        default=TEMPERATURE,
        help="sampling temperature; 0 always takes the likeliest token; default %(default)s",
    )
    add(
        "--top-p",
        "--top_p",
        type=float,
        default=TOP_P,
        help="sample from the likeliest tokens whose probabilities sum to this; "
        "default %(default)s",
    )
    add(
        "--seed",
        type=int,
        default=42,
        help="seed from which the seed of each prompt is derived; default 42",
    )


def flops(add: Callable) -> None:
    """List the training FLOPs of a model per token, by each definition of MFU in use.

    MODEL is a recipe, a model folder or a hub name. Weights are not read. docs/planning.md derives
    each definition.
    """
    add("model", metavar="MODEL", help="a recipe (.yaml), or a value of `model.source`")
    add(
        "--length",
        type=count,
        nargs="+",
        metavar="T",
        help="sequence length in tokens; default: the length in the recipe",
    )
    add(
        "--tokens-per-second",
        type=float,
        metavar="N",
        help="throughput of all devices together; adds the MFU to the table",
    )
    add(
        "--on",
        metavar="DEVICE",
        default="H200",
        help="device whose dense BF16 peak is 100 %%, for example 8xB200; default: H200",
    )


# By command: the parser's class, and the function that adds the options and describes the command.
COMMANDS: dict[str, tuple[type[CommandParser], Callable]] = {
    "plan": (LaunchParser, plan),
    "evaluate": (LaunchParser, evaluate),
    "doctor": (CommandParser, doctor),
    "export": (CommandParser, export),
    "sample": (CommandParser, sample),
    "flops": (CommandParser, flops),
}
