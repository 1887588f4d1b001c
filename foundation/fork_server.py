"""Start many processes of a program that imports its modules only once.

A program that imports torch starts in 5 to 15 seconds, mostly because of imports. `ForkServer`
launches the program once, with the argument SERVE. The program imports its modules and calls
`serve`, which forks a process for each request. A forked process has the state of a program that
has just imported its modules, so it computes the same as a process that was launched separately. If
a forked process is killed, the server and the other forked processes continue.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from foundation.signals import StopRequest

# Command-line argument with which a program serves requests on its stdin.
SERVE = "-"
# First line of the server, after its imports.
READY = b"ready\n"
# Seconds between two checks for a request to stop.
POLL_SECONDS = 0.2
# File descriptor of stdin, which is a socket. The server reads requests from it, and writes answers
# to it.
_STDIN = 0


class ForkServer:
    """A program that forks processes. It is launched by the first call of `fork`.

    The program ends when this process ends. Requests and answers pass through a socket, which is
    the program's stdin. Output of the program does not disturb the answers.
    """

    # The (command, environment) of the launched program, the process of the program, and this
    # process's end of the socket. None before the first launch.
    _server: tuple[Any, subprocess.Popen[bytes], socket.socket] | None = None

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        arguments: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
        stop: StopRequest,
    ) -> int:
        """Fork a process that continues the program as if it was launched with `arguments`.

        If the program is not running with this `command` and `environment`, launch the program
        first, and wait until it has imported its modules. Return the ID of the forked process,
        which is also the ID of its process group. If the program ends with an error while it
        imports modules, or if it is killed because of a signal, return the ID of the program's
        process.

        Args:
            command: Command that launches the program, without arguments of the program.
            environment: Environment variables of the program.
            arguments: Arguments of the program.
            variables: Environment variables that the forked process sets in addition.
            log: File to which output is appended. The forked process locks the file.
            stop: Request to stop. If a signal arrives while this method waits for the program, the
                program is killed.
        """
        launch = (command, environment)
        if not self._server or self._server[0] != launch or self._server[1].poll() is not None:
            connection, stdin = socket.socketpair()
            with log.open("ab") as errors, stdin:
                process = subprocess.Popen(
                    [*command, SERVE],
                    start_new_session=True,
                    env=environment,
                    stdin=stdin.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            self._server = (launch, process, connection)
            # The request is sent after the imports: if this process is killed while it waits, the
            # program ends without a fork.
            _answer(process, connection, stop)
        _, process, connection = self._server
        # The program may have ended.
        with suppress(OSError):
            connection.sendall(f"{json.dumps([arguments, variables, str(log)])}\n".encode())
            return int(_answer(process, connection, stop) or process.pid)
        return process.pid


def _answer(process: subprocess.Popen[bytes], connection: socket.socket, stop: StopRequest) -> str:
    """Return the next line of the server, or "" if the server has ended.

    If a signal arrives before the line, kill the server. Processes that it has forked continue.
    """
    while not select.select([connection], [], [], POLL_SECONDS)[0]:
        if stop.requested:
            os.killpg(process.pid, signal.SIGKILL)
            return ""
    return connection.makefile().readline()


def serve() -> None:
    """Fork a process for each request on stdin, and return in each forked process.

    A forked process has its own process group, and the arguments, variables and output of its
    request. The server itself exits at the end of stdin.
    """
    os.write(_STDIN, READY)
    while line := sys.stdin.readline():
        process = os.fork()
        # Set the process group in the server and in the forked process, because either of them may
        # be the first one that needs the group. In the server, the call fails if the forked process
        # has already ended.
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(process, process)
        if process == 0:
            break
        os.write(_STDIN, f"{process}\n".encode())
    else:
        sys.exit()
    arguments, variables, log = json.loads(line)
    with open_log(Path(log)) as output, open(os.devnull, "rb") as nothing:
        for descriptor, file in enumerate((nothing, output, output)):
            os.dup2(file.fileno(), descriptor)
    os.environ.update(variables)
    sys.argv[-1:] = arguments


def open_log(path: Path) -> BinaryIO:
    """Open a log file for appending. Lock it until all processes that write to it have ended."""
    log = path.open("ab")
    # Leave the log unlocked if the file system has no locks or another process holds the lock.
    with suppress(OSError):
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return log
