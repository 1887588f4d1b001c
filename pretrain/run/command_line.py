"""What a user types, and the one message of a launch that ends early, however many processes come to it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from foundation.command import CommandParser, number
from foundation.errors import InputError


class LauncherParser(CommandParser):
    remedy = "a setting is key=value or --key=value, and --help lists the options"


def parse_arguments(description: str | None) -> argparse.Namespace:
    """`description`: what the launcher is, for --help. Raises InputError for an option that there is not."""
    parser = LauncherParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="what is trained: a YAML file, see recipes/")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="over the recipe's settings: weights=bf16 train.steps=9"
    )
    parser.add_argument("--plan", action="store_true", help="say what would happen, check every setting, and stop")
    parser.add_argument("--tokens-per-second", type=number(), metavar="N", help="speed at which the plan reckons the hours")
    parser.add_argument("--preview-schedule", type=Path, metavar="PNG", help="draw the learning rate of every step, and stop")
    parser.add_argument("--eval-only", action="store_true", help="say the held-out loss of --resume's checkpoint, and stop")
    parser.add_argument("--profile", action="store_true", help="record a step: profile.md and a trace in the run folder")
    parser.add_argument("--resume", default="auto", metavar="CHECKPOINT", help="default auto: the run's newest intact one")
    parser.add_argument("--accept-changes", action="store_true", help="continue a checkpoint although the recipe has changed")
    arguments = parser.parse_intermixed_args(without_dashes(sys.argv[1:], parser))  # so that key=value may follow an option
    _check_together(arguments)
    return arguments


def _check_together(arguments: argparse.Namespace) -> None:
    """InputError for options of which one would be passed over."""
    instead = [f"--{name.replace('_', '-')}" for name in ("plan", "preview_schedule", "eval_only") if getattr(arguments, name)]
    if len(instead) > 1:
        raise InputError(f"command line: {' and '.join(instead)} each do one thing and stop; give one of them at a time")
    if instead and arguments.profile:
        raise InputError(
            f"command line: --profile records a step of training, and {instead[0]} trains none; leave one of them out"
        )


def without_dashes(arguments: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """`arguments` with `--key=value`, as W&B's agents write a setting, as `key=value`; options of `parser` stay as they are."""
    options = [option for action in parser._actions for option in action.option_strings]

    def is_setting(text: str) -> bool:
        name, equals, _ = text.partition("=")
        return bool(equals) and name.startswith("--") and not any(option.startswith(name) for option in options)

    return [text[2:] if is_setting(text) else text for text in arguments]


def say_once(text: str, error: BaseException) -> None:
    """Print `text`, once a machine: torchrun prints in its table what the other processes record of their `error`."""
    get_error_handler().record_exception(error)
    if "TORCHELASTIC_ERROR_FILE" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr)


def leave_status(status: int) -> int:
    """The first process of all writes `status` to the file that PRETRAIN_STATUS_FILE names, if it names one; returns `status`.

    `accelerate launch` ends with 1 whatever a process of its ended with, and who started it may have to know.
    """
    path = os.environ.get("PRETRAIN_STATUS_FILE")
    if path and os.environ.get("RANK", "0") == "0":
        try:
            Path(path).write_text(f"{status}\n", encoding="utf-8")
        except OSError as error:
            print(f"PRETRAIN_STATUS_FILE: {path}: {error.strerror}; the status is {status}", file=sys.stderr)
    return status
