"""Parse command lines, and report the error of a command as one message and an exit status."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
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

    Under torchrun, the message of the first failing rank appears once, at the end of the table of
    failures that torchrun prints. See `report_error`.

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


def report_error(error: InputError | OSError) -> int:
    """Print an error and return the exit status of the process.

    Under torchrun the error is recorded instead of printed. torchrun then prints the message in its
    table of failures, which is the last output of a launch. Only the first failing rank of a
    machine records its error: usually all ranks fail because of the same mistake.
    """
    # An OSError is reported with the kind and the status of an InputError.
    reported_as = error if isinstance(error, InputError) else InputError
    message = f"{reported_as.kind}: {error}"
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        _record_first(message, reported_as.status, Path(error_file))
    else:
        print(message, file=sys.stderr)
    return reported_as.status


def _record_first(message: str, status: int, error_file: Path) -> None:
    """Write an error to torchrun's `error_file`, unless another rank of this machine was earlier.

    The file has the format of torch.distributed.elastic. torchrun shows `py_callstack` in its
    table. For an exception, `@record` of torch writes the traceback there.
    """
    # The folder of the attempt has a folder for each rank, which contains the rank's error file.
    first = error_file.parent.parent / "first_message"
    with contextlib.suppress(FileExistsError):
        first.touch(exist_ok=False)
        # torchrun shows the earliest failure last, and takes the present time for ranks without a
        # record. Times are whole seconds.
        details = {"py_callstack": message, "timestamp": str(int(time.time()) - 1)}
        record = {"message": message, "errorCode": status, "extraInfo": details}
        error_file.write_text(json.dumps({"message": record}), encoding="utf-8")
