"""Parse a command line, and turn the errors of a command into one message and an exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from foundation.errors import InputError

SIGINT_STATUS = 130  # of a process that SIGINT ended, as a shell reports it
SIGPIPE_STATUS = 141  # of a process that SIGPIPE ended, as a shell reports it


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises InputError, without the usage, instead of exiting.

    `--help` prints the description with its line breaks.
    """

    remedy = "--help lists the options"

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        super().__init__(
            prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse `arguments`. Options and positional arguments may come in any order."""
        return self.parse_intermixed_args(arguments)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"command line: {message}; {self.remedy}")


def run_command(command: Callable[[], int | None], *, on_ctrl_c: str = "stopped by Ctrl-C") -> int:
    """Run `command` and return its exit status. A command that returns None exits with 0.

    Other statuses: 2 for a user's mistake or an OSError, 3 for a training that cannot go on, 130
    for Ctrl-C, and 141 if the reader of stdout has gone. Their messages go to stderr.

    Under torchrun only local rank 0 prints an error. The other ranks record theirs for the table
    that torchrun prints.

    Global rank 0 also writes the status to the file that PRETRAIN_STATUS_FILE names, if it is set.
    A batch script needs this file, because `accelerate launch` exits with 1 for every failure.
    """
    try:
        status = command()
        print(end="", flush=True)  # raises BrokenPipeError here if stdout is closed
    except KeyboardInterrupt:
        print(f"\n{on_ctrl_c}", file=sys.stderr)
        status = SIGINT_STATUS
    except BrokenPipeError:
        # The reader, such as `head`, has ended. Discard the rest of the output: the interpreter
        # flushes stdout when it exits, and that would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = SIGPIPE_STATUS
    except (InputError, OSError) as error:
        status = report_error(error)
    path = os.environ.get("PRETRAIN_STATUS_FILE")
    if path and status is not None and os.environ.get("RANK", "0") == "0":
        Path(path).write_text(f"{status}\n", encoding="utf-8")
    return status or 0


def report_error(error: InputError | OSError) -> int:
    """Print an error, and record it for torchrun if torchrun started us. Return the exit status."""
    under_torchrun = "TORCHELASTIC_ERROR_FILE" in os.environ
    if under_torchrun:
        # Imported here because torch is slow to import, and most commands do not need it.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    source = error if isinstance(error, InputError) else InputError
    if not under_torchrun or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{source.kind}: {error}", file=sys.stderr)
    return source.status
