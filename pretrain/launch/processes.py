"""Start trainings in the background, each in a process group of its own that writes to a log.

A program that imports torch starts in 5 to 15 seconds, mostly because of imports. So all trainings
are forked from one server, a process of multiprocessing that has imported the modules of a training
(`pretrain.launch.preloaded`). A forked process has the state of a program that has just imported
its modules, so it computes the same as a training that was launched separately.

If this process is killed, its trainings continue. Each training locks its log until all of its
processes have ended. So other processes can see that the training is running.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import BinaryIO

from foundation.command import run_command
from foundation.errors import InputError, one_line
from foundation.files import is_locked
from foundation.overrides import overridden
from pretrain.launch import launcher
from pretrain.launch.launcher import Launch

# Seconds between two checks of a process.
POLL_SECONDS = 0.2
# Longest name of a folder for the socket of the server. The path of a socket has at most 103
# characters on some systems, and multiprocessing appends 32 characters to the folder.
LONGEST_SOCKET_FOLDER = 71
# Modules that the server imports. `set_forkserver_preload` sets them when a training is started.
PRELOADED = ["pretrain.launch.preloaded"]
_FORKS = multiprocessing.get_context("forkserver")


class BackgroundTraining:
    """A training in the background.

    Args:
        process: The first process of the training. The ID of the process is also the ID of the
            training's process group. A process that was not started has ended.
        log: Log of the training.
    """

    def __init__(self, process: ForkServerProcess, log: Path) -> None:
        self._process = process
        self._log = log

    def signal(self, number: int) -> None:
        """Send the signal `number` to all processes of the training."""
        # ProcessLookupError means that all processes have just ended.
        with suppress(ProcessLookupError):
            if self._process.pid:
                os.killpg(self._process.pid, number)

    def has_ended(self) -> bool:
        """Return True if no process of the training is running.

        If the server is killed, multiprocessing reports that the first process has ended, although
        it continues. It still locks the log.
        """
        return not self._process.is_alive() and not is_training(self._log)

    def wait(self, seconds: float = float("inf")) -> bool:
        """Wait until the training has ended, at most for `seconds`. Return `has_ended`."""
        latest = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < latest:
            time.sleep(POLL_SECONDS)
        return self.has_ended()

    @property
    def status(self) -> int:
        """Return the exit status of the training, which has ended. Return 1 if it is not known."""
        returncode = self._process.exitcode
        return 1 if returncode is None else launcher.exit_status(returncode)


def start_training(launch: Launch, environment: Mapping[str, str], log: Path) -> BackgroundTraining:
    """Start a training in the background.

    The training runs in a fork of a server process. The first call starts the server, and waits
    until the server has imported torch and the launcher. An error of the start is written to the
    log.

    Args:
        launch: The training.
        environment: All environment variables of the training.
        log: File to which output is appended. The training locks the file.
    """
    _FORKS.set_forkserver_preload(PRELOADED)
    # Create the log, because the training may be killed before it opens the log.
    log.touch()
    connection, in_training = _FORKS.Pipe()
    process = _FORKS.Process(target=_train, args=(launch, dict(environment), log, in_training))
    try:
        # `start` creates the socket of the server in the folder `tempfile.tempdir`.
        with connection, overridden(tempfile, tempdir=_socket_folder()):
            with in_training:
                process.start()
            # Wait until the training has its process group and has locked its log. Then let it
            # begin. If this process is killed in between, nobody could find the training.
            connection.recv()
            connection.send(None)
    except (EOFError, OSError) as error:
        with log.open("a") as file:
            file.write(f"error: the training was not started: {one_line(error, named=True)}\n")
    return BackgroundTraining(process, log)


def _socket_folder() -> str:
    """Return the folder for temporary files, or /tmp if its name is too long for a socket."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= LONGEST_SOCKET_FOLDER else "/tmp"


def _train(launch: Launch, environment: dict[str, str], log: Path, command: Connection) -> None:
    """Train in this forked process, and end this process with the exit status of the training.

    `command` is the connection to `start_training`. The training begins when `start_training`
    answers.
    """
    os.setpgid(0, 0)
    with open_log(log) as output, open(os.devnull, "rb") as nothing:
        for descriptor, file in enumerate((nothing, output, output)):
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    try:
        command.send(None)
        command.recv()
    except (EOFError, OSError):
        sys.exit("error: the training was not started, because its command was stopped")
    command.close()
    import torch

    if torch.cuda._is_in_bad_fork():
        # An imported package has used CUDA in the server, so CUDA does not work here. Replace this
        # process by one that imports the modules itself.
        os.execv(sys.executable, launch.command)
    sys.exit(run_command(lambda: launcher.run(launch)))


def check_log(log: Path) -> None:
    """Raise InputError if a log exists, but is not a file.

    A link is refused, because the output would be written to the file behind it.
    """
    if log.is_symlink() or (log.exists() and not log.is_file()):
        raise InputError(
            f"{log}: the output of a training cannot be appended here, because this is not a file; "
            "move it away"
        )


def open_log(path: Path) -> BinaryIO:
    """Open a log file for appending. Lock it until all processes that write to it have ended."""
    file = path.open("ab")
    # Leave the log unlocked if the file system has no locks or another process holds the lock.
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def is_training(log: Path) -> bool:
    """Return True if processes of a training, perhaps of an earlier command, write to `log`."""
    return is_locked(log)
