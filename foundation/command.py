"""How a command line runs: what it can meet becomes one message and an exit status."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from foundation.errors import InputError, permissions_named
from foundation.files import no_room

OURS = ("foundation", "packing", "pretrain")


def run_command(command: Callable[[], int | None], *, on_ctrl_c: str) -> int:
    """Run `command` and return its exit status, 0 where it gives none. It is 2 for a mistake in what was given, for a package
    that is not installed and for a disk that is full, 130 where Ctrl-C broke it off, which `on_ctrl_c` says, and 141 where nobody
    reads what is printed any more."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name or a text in any script must not end a command whose output is ASCII
        sys.stdout.reconfigure(errors="replace")
    try:
        with permissions_named():
            status = command()
        print(end="", flush=True)  # to a closed stdout, too
        return status or 0
    except InputError as error:
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
    """What is still to be written to stdout goes nowhere, so that the flush at the process's end does not fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
