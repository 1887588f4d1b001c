"""How a command line is read and runs: what it can meet becomes one message and an exit status."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from foundation.errors import InputError


class CommandParser(argparse.ArgumentParser):
    """A parser whose mistakes are an InputError, so that they are one message, without the usage."""

    remedy = "--help lists the options"

    def error(self, message: str) -> NoReturn:
        raise InputError(f"command line: {message}; {self.remedy}")


def number(least: float | None = None, most: float = math.inf, *, whole: bool = False) -> Callable[[str], float]:
    """Returns a function for argparse's `type`, which reads a number of `least` to `most`, a `whole` one as an int. `least` None:
    above 0."""

    def numeric(text: str) -> float:
        value = int(text) if whole else float(text)  # argparse makes a message of a ValueError
        if not ((value > 0 if least is None else value >= least) and value <= most and math.isfinite(value)):
            wanted = "above 0" if least is None else f"{least} or more"
            raise argparse.ArgumentTypeError(f"{text}: a number {wanted}, and at most {most:g}, is wanted")
        return value

    return numeric


def run_command(command: Callable[[], int | None], *, on_ctrl_c: str) -> int:
    """Run `command` and return its exit status, 0 where it gives none. It is 2 for a mistake in what was given and for what a
    disk refuses, 130 where Ctrl-C broke it off, which `on_ctrl_c` says, and 141 where nobody reads what is printed any more."""
    try:
        status = command() or 0
        print(end="", flush=True)  # to a closed stdout, too
        return status
    except KeyboardInterrupt:
        print(f"\n{on_ctrl_c}", file=sys.stderr)
        return 130  # what a shell reports for a process that SIGINT ended
    except BrokenPipeError:  # `| head` has seen enough. The rest goes nowhere, or the flush at the process's end would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
