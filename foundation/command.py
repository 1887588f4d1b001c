"""How a command line is read and runs: what it can meet becomes one message and an exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from foundation.errors import InputError


class CommandParser(argparse.ArgumentParser):
    """A parser that raises a mistake as InputError, one message without the usage; --help shows the description as written."""

    remedy = "--help lists the options"

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        super().__init__(
            prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """What they say, options and other arguments in any order."""
        return self.parse_intermixed_args(arguments)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"command line: {message}; {self.remedy}")


def run_command(command: Callable[[], int | None], *, on_ctrl_c: str = "stopped by Ctrl-C") -> int:
    """Run `command` and return its exit status, 0 where it gives none. 2: a user's mistake or a disk's error. 3: a training
    that cannot go on. 130: Ctrl-C. 141: nobody reads what is printed any more. Of several processes of torchrun one prints: what
    the others record of their error is in torchrun's table.

    The first process of all writes the status to the file that PRETRAIN_STATUS_FILE names, if it names one: `accelerate launch`
    ends with 1 whatever a process of its ended with, and who started it may have to know.
    """
    try:
        status = command()
        print(end="", flush=True)  # to a closed stdout, too
    except KeyboardInterrupt:
        print(f"\n{on_ctrl_c}", file=sys.stderr)
        status = 130  # what a shell reports for a process that SIGINT ended
    # `| head` has seen enough. The rest goes nowhere, or the flush at the process's end would fail
    # again
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except (InputError, OSError) as error:
        kind, status = (
            (error.kind, error.status)
            if isinstance(error, InputError)
            else (InputError.kind, InputError.status)
        )
        several = "TORCHELASTIC_ERROR_FILE" in os.environ
        if several:
            # slow, and others do without
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        if not several or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{kind}: {error}", file=sys.stderr)
    path = os.environ.get("PRETRAIN_STATUS_FILE")
    if path and status is not None and os.environ.get("RANK", "0") == "0":
        Path(path).write_text(f"{status}\n", encoding="utf-8")
    return status or 0
