"""How a command line is read and runs: what it can meet becomes one message and an exit status."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from foundation.errors import InputError, shown
from foundation.files import no_room

OURS = ("foundation", "packing", "pretrain")


class CommandParser(argparse.ArgumentParser):
    """A parser whose mistakes are an InputError, so that they are one message, without the usage."""

    remedy = "--help lists the options"

    def error(self, message: str) -> NoReturn:
        raise InputError(f"command line: {message}; {self.remedy}")


def number(least: float | None = None, most: float = math.inf, *, whole: bool = False) -> Callable[[str], float]:
    """Returns a function for argparse's `type`, which reads a number of `least` to `most`, a `whole` one as an int. `least` None:
    above 0. As recipes do, it takes a whole number written as 1e3 or 8.0."""
    bounds = "above 0" if least is None else f"of {least} or more"
    bounds += f" and of at most {most:g}" if math.isfinite(most) else ""

    def read(text: str) -> float:
        try:
            value = int(text) if whole and text.isdecimal() else float(text)
        except ValueError:
            value = math.nan
        inside = (value > 0 if least is None else value >= least) and value <= most and math.isfinite(value)
        if not inside or (whole and int(value) != value):
            raise argparse.ArgumentTypeError(f"{shown(text)}: a {'whole ' if whole else ''}number {bounds} is wanted")
        return int(value) if whole else value

    return read


def run_command(command: Callable[[], int | None], *, on_ctrl_c: str) -> int:
    """Run `command` and return its exit status, 0 where it gives none. It is 2 for a mistake in what was given, for a file that
    this user may not use, a package that is not installed and a disk that is full, 130 where Ctrl-C broke it off, which
    `on_ctrl_c` says, and 141 where nobody reads what is printed any more."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name or a text in any script must not end a command whose output is ASCII
        sys.stdout.reconfigure(errors="replace")
    try:
        status = command()
        print(end="", flush=True)  # to a closed stdout, too
        return status or 0
    except (InputError, PermissionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{on_ctrl_c}", file=sys.stderr)
        return 130  # what a shell reports for a process that SIGINT ended
    except ModuleNotFoundError as error:  # what few commands need is imported where they do
        package = (error.name or "").partition(".")[0]
        if package in ("", *OURS):
            raise
        print(f"error: the package `{package}` is not installed: python -m pip install -r requirements.txt", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough
        _print_no_more()
        return 141
    except OSError as error:
        if not (full := no_room(error)):
            raise
        _print_no_more()
        print(f"error: {error.filename or 'what is printed'}: {full}, then run the same command again", file=sys.stderr)
        return 2


def _print_no_more() -> None:
    """Sends what is still to be written to stdout nowhere, so that the flush at the process's end does not fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
