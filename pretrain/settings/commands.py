"""What the commands that need torch are told: read before torch is imported, so that --help and mistakes are answered at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from inspect import getdoc
from pathlib import Path

from foundation.command import CommandParser
from pretrain.settings.config import LaunchParser

USUAL = ("H100", "H200", "B200", "8xB200")  # devices that `plan` tells of
# Of `sample`, unless said otherwise: so many tokens at most, drawn from the likeliest that have this probability together.
TOKENS, TEMPERATURE, TOP_P = 64, 0.8, 0.95


def read(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of `command`, one of COMMANDS; InputError for a mistake in `arguments`, and with --help the process ends."""
    kind, options = COMMANDS[command]
    parser = kind(f"python -m pretrain {command}", getdoc(options))
    options(parser.add_argument)
    return parser.read(arguments)


def count(text: str) -> int:
    """An option's number from 1 on; of another, argparse says `invalid count value`."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def plan(add: Callable) -> None:
    """What a recipe would take elsewhere.

        python -m pretrain plan my.yaml train.tokens=20e9                           hours on H100, H200, B200 and 8 x B200
        python -m pretrain plan my.yaml --on 8xH200 --mfu 0.42                      at the share of the peak that a run reached

    What a launch on this machine would do is told by `accelerate launch ... train_accelerate.py RECIPE --plan`; it needs packs.
    """
    several = {"action": "append", "default": []}
    add(
        "--on",
        metavar="DEVICE",
        help=f"H200, 8xB200, 'RTX 4090'; may be repeated; default: {', '.join(USUAL)}",
        **several,
    )
    add(
        "--mfu",
        type=float,
        metavar="SHARE",
        help="of the peak that is reached, 0.4 say; twice: from, to",
        **several,
    )


def evaluate(add: Callable) -> None:
    """The held-out loss of a checkpoint, or of the model that a run would begin with, or its loss on a text of one's own. Nothing
    of a run is written.

        python -m pretrain evaluate RUN_OR_RECIPE [FILE] [--resume CHECKPOINT] [key=value ...]

    On GPUs behind `accelerate launch --config_file accelerate_configs/bf16.yaml -m pretrain evaluate`.
    """
    add(
        "--resume",
        default="auto",
        metavar="CHECKPOINT",
        help="default auto: the run's newest intact one",
    )


def doctor(add: Callable) -> None:
    """Which precision works on this machine, on what, and how fast for one layer: each trains a model of one layer for a few
    steps, behind parity with plain transformers."""
    add("--precisions", type=lambda text: text.split(","), metavar="A,B", help="only these")


def export(add: Callable) -> None:
    """Any checkpoint as a Hugging Face folder with its card. It takes no GPU, and the memory of the weights."""
    add(
        "source",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="a run folder, of which the newest, or a step-*",
    )
    add("out", type=Path, nargs="?", metavar="OUT", help="the folder to make; default: RUN/export")
    add(
        "--best", action="store_true", help="of a run, the checkpoint with the lowest held-out loss"
    )
    stored = "of the weights; default: as the run stores them. fp32 of bf16_exact: each weight joined with its remainder"
    add("--dtype", choices=["bf16", "fp32"], help=stored)
    add(
        "--push",
        metavar="OWNER/NAME",
        help="to this repository of the hub too; made, private, if missing",
    )


def sample(add: Callable) -> None:
    """How a model continues a text. FOLDER is that of a run that has ended, or one that transformers loads, which `python -m
    pretrain export` makes of any checkpoint. On a GPU where there is one, in the dtype that the weights are stored in."""
    add("folder", type=Path, metavar="FOLDER", help="a run folder, or a folder of a model")
    add("prompts", nargs="*", metavar="PROMPT", help="a text to continue; '' begins one")
    add("--prompt", action="append", default=[], help="another way to give one; may be repeated")
    add(
        "--tokens",
        "--max-new-tokens",
        "--max_new_tokens",
        type=count,
        default=TOKENS,
        help="at most; default %(default)s",
    )
    add(
        "--temperature",
        type=float,
        default=TEMPERATURE,
        help="default %(default)s; 0: always the likeliest token",
    )
    add(
        "--top-p",
        "--top_p",
        type=float,
        default=TOP_P,
        help="the likeliest with this probability; default %(default)s",
    )
    add("--seed", type=int, default=42, help="default 42; of it each prompt's own is made")


def flops(add: Callable) -> None:
    """What a model costs to train, a token, by every definition in use, beside each other. MODEL is a recipe, a folder or a name
    of a model. Nothing of its weights is read. docs/planning.md derives each definition."""
    add("model", metavar="MODEL", help="a recipe (.yaml), or what `model.source` takes")
    add(
        "--length",
        type=count,
        nargs="+",
        metavar="T",
        help="of a sequence, in tokens; default: the recipe's",
    )
    add("--tokens-per-second", type=float, metavar="N", help="of all devices: also MFU")
    add(
        "--on",
        metavar="DEVICE",
        default="H200",
        help="default: H200; 8xB200: its dense BF16 peak is 100 %%",
    )


COMMANDS: dict[str, tuple[type[CommandParser], Callable]] = {
    "plan": (LaunchParser, plan),
    "evaluate": (LaunchParser, evaluate),
    "doctor": (CommandParser, doctor),
    "export": (CommandParser, export),
    "sample": (CommandParser, sample),
    "flops": (CommandParser, flops),
}
