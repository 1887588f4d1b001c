"""Parse command lines, and report the error of a command as one message and an exit status."""

from __future__ import annotations

import argparse
import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from foundation.errors import InputError

# Exit statuses that a shell reports for a process that SIGINT or SIGPIPE has ended.
SIGINT_STATUS = 130
SIGPIPE_STATUS = 141


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises InputError instead of printing the usage and exiting.

    `remedy` is appended to every error message. `--help` prints the description with its line
    breaks.
    """

    remedy = "use --help to list the options"

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        super().__init__(
            prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the parsed `arguments`. Options and positional arguments may be in any order."""
        return self.parse_intermixed_args(arguments)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"command line: {message}; {self.remedy}")


def run_command(command: Callable[[], int | None], *, on_ctrl_c: str = "stopped by Ctrl-C") -> int:
    """Run `command` and return the exit status of the process.

    `command` may return an exit status. If it returns None, the exit status is 0. The other exit
    statuses are 2 for an InputError (a user's mistake) or an OSError, 3 for a training that cannot
    continue, 130 for Ctrl-C, and 141 if the program that reads stdout has closed it. Error messages
    are printed to stderr.

    Under torchrun, only local rank 0 prints its error. All ranks record their errors for the table
    of failures that torchrun prints.

    If the environment variable PRETRAIN_STATUS_FILE is set to a path, global rank 0 also writes the
    exit status to this file, unless `command` returns None. A batch script needs this file, because
    `accelerate launch` exits with 1 for every failure.
    """
    try:
        status = command()
        # The flush raises BrokenPipeError here if stdout is closed.
        print(end="", flush=True)
    except KeyboardInterrupt:
        print(f"\n{on_ctrl_c}", file=sys.stderr)
        status = SIGINT_STATUS
    except BrokenPipeError:
        # The program that reads stdout, such as `head`, has ended. Discard the remaining output:
        # the interpreter flushes stdout at exit, which would raise the same error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = SIGPIPE_STATUS
    except (InputError, OSError) as error:
        status = report_error(error)
    path = os.environ.get("PRETRAIN_STATUS_FILE")
    if path and status is not None and os.environ.get("RANK", "0") == "0":
        Path(path).write_text(f"{status}\n", encoding="utf-8")
    return status or 0


def end_process(status: int) -> NoReturn:
    """End this process with the exit status `status`, without freeing its objects one by one.

    Threads are joined, exit functions are called, and output is flushed, as when Python exits. But
    Python would then visit all objects of torch and transformers, which takes seconds.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # C libraries buffer their own output, for example the messages of NCCL.
    ctypes.CDLL(None).fflush(None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def report_error(error: InputError | OSError) -> int:
    """Print an error and return the exit status. Under torchrun, also record it for torchrun."""
    under_torchrun = "TORCHELASTIC_ERROR_FILE" in os.environ
    if under_torchrun:
        # Imported here because torch is slow to import, and most commands do not need it.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    # An OSError is reported with the kind and the status of an InputError.
    reported_as = error if isinstance(error, InputError) else InputError
    if not under_torchrun or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{reported_as.kind}: {error}", file=sys.stderr)
    return reported_as.status
