"""Train as `accelerate launch` does, and translate the end of the training into an exit status.

This module imports torch and accelerate's launcher only when a training starts. A training in one
process runs in this process, so that torch and accelerate are imported only once.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import psutil

from foundation.overrides import overridden
from foundation.reading import as_input_error
from foundation.signals import IF_NOT_IGNORED, SIGNALS, end_on_ctrl_c
from pretrain.launch.configuration import Launch

# Signals that are passed on to the training processes.
PASSED_ON = (*SIGNALS, *IF_NOT_IGNORED)
# Beginnings of log lines that are not printed: accelerate's list of default values, and the lines
# that torchrun logs before its error.
_OMITTED = ("The following values were not passed", "failed (", "Sending process")
# Errors that accelerate raises for a mistake in its configuration.
_REFUSED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    AssertionError,
    RuntimeError,
)


def run(launch: Launch) -> int:
    """Train as `accelerate launch` does, and return the exit status of the training.

    A training in one process ends this process with its exit status.

    Unlike this function, `accelerate launch` ends with a traceback, and with status 1 for every
    failure. If torchrun's record of a failure has no traceback, only the message in the record is
    printed. Raises InputError if accelerate does not accept the configuration.
    """
    end_on_ctrl_c()
    # Turn off garbage collection during the imports. Imports create no garbage, but garbage
    # collection took a fifth of the time of the imports.
    gc.disable()
    from accelerate.commands import launch as accelerate_launch
    from accelerate.utils import launch as launch_environment
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    gc.enable()
    for name in ("accelerate.commands.launch", "torch.distributed.elastic.multiprocessing.api"):
        logging.getLogger(name).addFilter(lambda line: not str(line.msg).startswith(_OMITTED))
    # If accelerate wants to start a single process, its options are stored here. The training then
    # runs in this process.
    single: list[argparse.Namespace] = []
    try:
        with (
            _passing_on_signals(),
            # A missing FP8 library is reported later, with the precision, and not for --plan.
            overridden(launch_environment, is_fp8_available=lambda: True),
            overridden(accelerate_launch, simple_launcher=single.append),
            as_input_error(
                _REFUSED,
                f"{launch.configuration}: accelerate does not accept this configuration",
                "correct the file, or choose another --config, such as bf16 or cpu",
            ),
        ):
            parser = accelerate_launch.launch_command_parser()
            accelerate_launch.launch_command(parser.parse_args(launch.arguments))
            started = [
                accelerate_launch.prepare_simple_launcher_cmd_env(options) for options in single
            ]
    except subprocess.CalledProcessError as error:
        return reported_status(error.returncode)
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        return _report(error)
    for command, environment in started:
        _train_here(command, environment)
    return 0


def _train_here(command: Sequence[str], environment: dict[str, str]) -> None:
    """Run a training in this process, and end this process with its exit status.

    command: interpreter, script and arguments. Words before the interpreter are ignored. They would
        start several processes with mpirun, and the training refuses such a configuration.
    environment: environment variables of the training.
    """
    import torch

    os.environ.update(environment)
    # Set the number of threads explicitly, because torch has already read OMP_NUM_THREADS.
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = list(command[command.index(sys.executable) + 1 :])
    runpy.run_path(sys.argv[0], run_name="__main__")


@contextmanager
def _passing_on_signals() -> Iterator[None]:
    """Pass on signals to the training processes while the caller's `with` block runs."""
    before = {
        number: signal.signal(number, _pass_on)
        for number in PASSED_ON
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Send a signal to the training processes, which save a checkpoint and exit.

    A training process may also receive Ctrl-C from the terminal. It then treats the two signals as
    one signal.
    """
    children = psutil.Process().children()
    for child in children:
        child.send_signal(number)
    if not children:
        raise SystemExit(128 + number)


def exit_status(returncode: int) -> int:
    """Return the exit status that a shell reports for a `returncode` of subprocess.

    `returncode` is the negative number of a signal if the signal has ended the process.
    """
    return returncode if returncode >= 0 else 128 - returncode


def reported_status(returncode: int, process: str = "the training") -> int:
    """Return `exit_status`, and print a message if a signal has ended `process`."""
    if returncode < 0:
        print(
            f"{process} was ended by {signal.Signals(-returncode).name}; the same command "
            "continues from the newest checkpoint, if there is one",
            file=sys.stderr,
        )
    return exit_status(returncode)


def _report(error: Any) -> int:
    """Print the first failure of several processes, and return its exit status.

    error: torch's ChildFailedError.
    """
    for rank, item in error.failures.items():
        # If SIGINT or SIGKILL has ended a rank, report this rank, because the errors of the other
        # ranks follow from the signal. Other signals are not reported here, because libraries use
        # them to end a process after an error of another rank.
        if item.exitcode in (-signal.SIGINT, -signal.SIGKILL):
            return reported_status(item.exitcode, f"rank {rank}")
    _, failure = error.get_first_failure()
    record = failure.error_file_data["message"]
    # Print only the message of a record that `foundation.command.report_error` has written. Only
    # these records have the key `errorCode`.
    if "errorCode" in record:
        print(record["message"], file=sys.stderr)
        return record["errorCode"]
    # Print torchrun's table, which has the ranks and their tracebacks. If a signal has stopped the
    # run, the user needs no table.
    if failure.exitcode < 128:
        print(error, file=sys.stderr)
    return reported_status(failure.exitcode)
