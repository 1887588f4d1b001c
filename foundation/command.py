"""Parse command lines, and report the error of a command as one message and an exit status."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import difflib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from foundation.errors import InputError
from foundation.settings import local_path
from foundation.storage import refuse_secret

# Map the name of an option in another program to the name of the option here. In both names, `_`
# replaces `-`.
_OTHER_NAMES = {
    "dry_run": "plan",
    "num_processes": "processes",
    "nproc_per_node": "processes",
    "max_tokens": "tokens",
    "output": "out",
    "output_dir": "out",
    "vocab_size": "vocabulary",
    "resume_from_checkpoint": "resume",
    "checkpoint": "resume",
}


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises InputError instead of printing the usage and exiting.

    `remedy` is appended to every error message. `--help` prints the description with its line
    breaks. An unknown option is reported before all other mistakes, with the option that was
    probably meant.
    """

    remedy = "use --help to list the options"

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        super().__init__(
            prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        # Refuse addresses in all arguments of the type Path.
        self.register("type", Path, lambda text: Path(local_path(text)))

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the parsed `arguments`. Options and positional arguments may be in any order."""
        # Refuse a secret before a message prints it. It may be in the value of an override.
        for text in arguments:
            refuse_secret(text)
            refuse_secret(text.partition("=")[2])
        self._check_options(arguments)
        return self.parse_intermixed_args(arguments)

    def _check_options(self, arguments: Sequence[str]) -> None:
        """Raise InputError for an argument that begins with `--` but is not a known option."""
        for text in itertools.takewhile("--".__ne__, arguments):
            name = text.partition("=")[0]
            # Like argparse, accept an abbreviated option, and treat an argument with a space as a
            # value and not as an option.
            is_known = any(option.startswith(name) for option in self._option_string_actions)
            if name.startswith("--") and not is_known and " " not in text:
                meant = self.suggest(name.removeprefix("--").replace("-", "_")) or self.remedy
                hint = meant if " " in meant else f"did you mean {meant}?"
                raise InputError(f"command line: unknown option {name}; {hint}")

    def suggest(self, name: str) -> str | None:
        """Return the known option that the user probably meant, or None.

        A subclass may return a sentence with a remedy instead. name: the unknown option, with `_`
        for `-`.
        """
        options = {
            option.removeprefix("--").replace("-", "_"): option
            for option in self._option_string_actions
        }
        similar = difflib.get_close_matches(name, options, n=1, cutoff=0.75)
        return options.get(_OTHER_NAMES.get(name, "")) or next(map(options.get, similar), None)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"command line: {message}; {self.remedy}")


def run_command(command: Callable[[], int | None]) -> int:
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
        # Flush stdout here, so that the BrokenPipeError of a closed stdout is handled below.
        print(end="", flush=True)
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C; run the same command again to continue", file=sys.stderr)
        status = 128 + signal.SIGINT
    except BrokenPipeError:
        # The program that reads stdout, such as `head`, has ended. Discard the remaining output:
        # the interpreter flushes stdout at exit, which would raise the same error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    except (InputError, OSError) as error:
        status = report_error(error)
    if status is not None:
        _write_status(status)
    return status or 0


def _write_status(status: int) -> None:
    """Write an exit status to the file that PRETRAIN_STATUS_FILE names, on global rank 0.

    On the other ranks, and if the variable is not set, do nothing. Print a warning if the file
    cannot be written.
    """
    path = os.environ.get("PRETRAIN_STATUS_FILE")
    if path and os.environ.get("RANK", "0") == "0":
        try:
            Path(path).write_text(f"{status}\n", encoding="utf-8")
        except OSError as error:
            _print_error(
                f"warning: PRETRAIN_STATUS_FILE: the status {status} is not written: {error}"
            )


def end_process(status: int) -> NoReturn:
    """End this process with the exit status `status`, without freeing its objects one by one.

    Threads are joined, exit functions are called, and output is flushed, as when Python exits. A
    normal exit would also visit all objects of torch and transformers, which takes seconds.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # Flush the output that C libraries buffer, for example the messages of NCCL.
    ctypes.CDLL(None).fflush(None)
    # A stream is None if the shell has closed it, for example by `>&-`.
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(status)


def end_after_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> NoReturn:
    """Print the traceback of an error and end this process with the exit status 1.

    Assign this function to `sys.excepthook`. Before the process ends, `_write_status` writes the
    status to a file.
    """
    sys.__excepthook__(kind, error, trace)
    _write_status(1)
    end_process(1)


def report_error(error: InputError | OSError) -> int:
    """Print an error and return the exit status of the process.

    In a rank that torchrun has started, the error is recorded instead of printed. torchrun then
    prints the message in its table of failures, which is the last output of a launch. Only the
    first failing rank of a machine records its error, because all ranks usually have the same
    error.
    """
    # An OSError is reported with the kind and the status of an InputError.
    reported_as = error if isinstance(error, InputError) else InputError
    message = f"{reported_as.kind}: {error}"
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    # Test whether torchrun has started this rank. torchrun puts the error file of each rank into a
    # folder that has the local rank as its name.
    if error_file.parent.name == os.environ.get("LOCAL_RANK"):
        _record_first(message, reported_as.status, error_file)
    else:
        _print_error(message)
    return reported_as.status


def _print_error(message: str) -> None:
    """Print a message to stderr. It is lost if stderr is a file on a full disk."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _record_first(message: str, status: int, error_file: Path) -> None:
    """Write an error to `error_file`, unless another rank of this machine has recorded an error.

    torchrun reads this file. The file has the format of torch.distributed.elastic, and torchrun
    shows the entry `py_callstack` in its table of failures. Here, this entry contains the message.
    torch's own decorator `@record` writes a traceback into the entry.
    """
    first = error_file.parent.parent / "first_message"
    with contextlib.suppress(FileExistsError):
        first.touch(exist_ok=False)
        # torchrun shows the earliest failure last, and assigns the present time to ranks without a
        # record. So subtract one second, the unit of these times, to show this failure last.
        details = {"py_callstack": message, "timestamp": str(int(time.time()) - 1)}
        record = {"message": {"message": message, "errorCode": status, "extraInfo": details}}
        error_file.write_text(json.dumps(record), encoding="utf-8")
