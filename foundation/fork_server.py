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
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

# Command-line argument with which a program serves requests on its stdin.
SERVE = "-"
# Line that the server prints after its imports.
READY = "ready\n"


class ForkServer:
    """A program that forks processes. It is launched by the first call of `fork`.

    The program ends when this process ends.
    """

    # Pair: the (command, environment) of the launched program, and the process of the program.
    # Before the first launch, the process is None.
    _server: tuple[Any, subprocess.Popen[str] | None] = (None, None)

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        arguments: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
    ) -> int:
        """Fork a process that continues the program as if it was launched with `arguments`.

        If the program is not running with this `command` and `environment`, launch the program
        first, and wait until it has imported its modules. Return the ID of the forked process,
        which is also the ID of its process group. If the program ends with an error while it
        imports modules, return the ID of the program's process.

        Args:
            command: Command that launches the program, without arguments of the program.
            environment: Environment variables of the program.
            arguments: Arguments of the program.
            variables: Environment variables that the forked process sets in addition.
            log: File to which output is appended. The forked process locks the file.
        """
        launched, process = self._server
        if process is None or process.poll() is not None or launched != (command, environment):
            with log.open("ab") as errors:
                process = subprocess.Popen(
                    [*command, SERVE],
                    start_new_session=True,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            self._server = ((command, environment), process)
            # Read lines up to READY, and skip the lines that imported packages print. The request
            # is sent after the imports: if this process is killed while it waits, the program ends
            # without a fork.
            any(line == READY for line in cast(IO[str], process.stdout))
        assert process.stdin and process.stdout
        with suppress(BrokenPipeError):
            print(json.dumps([arguments, variables, str(log)]), file=process.stdin, flush=True)
        return int(process.stdout.readline() or process.pid)


def serve() -> None:
    """Fork a process for each request on stdin, and return in each forked process.

    A forked process has its own process group, and the arguments, variables and output of its
    request. The server itself exits at the end of stdin.
    """
    print(READY, end="", flush=True)
    while line := sys.stdin.readline():
        process = os.fork()
        # Set the process group in the server and in the forked process, because either of them may
        # be the first one that needs the group. In the server, the call fails if the forked process
        # has already ended.
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(process, process)
        if process == 0:
            break
        print(process, flush=True)
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
