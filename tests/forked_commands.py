"""Run commands as a user types them, without the seconds that every command takes to import torch.

Shells, command lines, launchers, environments, signals and exit statuses are real. Before a command
imports anything, tests/forked_site replaces it by a process forked from a server that has imported
everything. The forked process has the command's files, folder and environment, and its own process
group. `tests/pretrain/run/test_doctor.py` runs commands without this replacement.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import cache
from multiprocessing import util
from pathlib import Path
from typing import Any

from tests.moments import fork_context

SITE = Path(__file__).with_name("forked_site")
ROOT = Path(__file__).resolve().parents[1]
# Largest size of a command with its environment, in bytes.
LARGEST = 1 << 20


def forking(*folders: Path) -> dict[str, str]:
    """Return an environment in which commands are forked, without accelerate's variables.

    The `sitecustomize.py` of each of `folders` runs before the command.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    paths = {
        "PYTHONPATH": os.pathsep.join(map(str, (SITE, *folders))),
        "FORKED_COMMANDS": _server(),
    }
    return kept | {"OMP_NUM_THREADS": "1"} | paths


@cache
def _server() -> str:
    """Start the server and return the name of its socket, an abstract one without a file.

    The server ends when this process does, because this process then closes a pipe to it.
    """
    name = f"forked-{os.getpid()}-{os.urandom(8).hex()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen()
    server_end, tests_end = fork_context.Pipe(duplex=False)
    fork_context.Process(target=_serve, args=(listener, server_end), daemon=True).start()
    server_end.close()
    listener.close()
    # Keep the pipe open as long as this process runs.
    _server.tests_end = tests_end
    return name


def _serve(listener: socket.socket, tests: Any) -> None:
    """Fork a minder for every command until the tests end, which closes the pipe `tests`."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401  Runs draw a picture.

    gc.freeze()
    minders: set[int] = set()
    while tests not in select.select([listener, tests], [], [])[0]:
        client, _ = listener.accept()
        minders = {minder for minder in minders if os.waitpid(minder, os.WNOHANG) == (0, 0)}
        if not (minder := os.fork()):
            listener.close()
            _mind(client)
        minders.add(minder)
        client.close()


def _mind(client: socket.socket) -> None:
    """Fork the command, pass signals to its group, and send its exit status when the group ends."""
    content, files, *_ = socket.recv_fds(client, LARGEST, 3)
    if not (child := os.fork()):
        client.close()
        _become(json.loads(content), files)
    for file in files:
        os.close(file)
    with suppress(OSError):
        os.setpgid(child, child)
    ended = os.pidfd_open(child)
    while ended not in (ready := select.select([ended, client], [], [])[0]):
        if ready:
            number = client.recv(1)
            # Nothing is received if the client was killed.
            os.killpg(child, number[0] if number else signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ProcessLookupError, BrokenPipeError):
        while True:
            os.killpg(child, 0)
            time.sleep(0.02)
    with suppress(BrokenPipeError):
        client.send(str(status).encode())
    os._exit(0)


def _become(command: dict[str, Any], files: list[int]) -> None:
    """Turn this forked process into the command and run it."""
    with suppress(OSError):
        os.setpgid(0, 0)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout = open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN if number in command["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in command["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A daemonic process may not start other processes.
    multiprocessing.current_process()._config.pop("daemon")
    # Drop the exit handlers of the pytest worker.
    atexit._clear()
    atexit.register(util._exit_function)
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    os._exit(_status_of([argument for argument in command["arguments"] if argument != "-u"]))


def _status_of(arguments: list[str]) -> int:
    """Run the command as Python does, and return its exit status."""
    status = 0
    try:
        for folder in os.environ["PYTHONPATH"].split(os.pathsep):
            if Path(folder) != SITE and (hook := Path(folder, "sitecustomize.py")).exists():
                runpy.run_path(str(hook))
        if arguments[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = arguments[1:]
            sys.modules.pop(f"{arguments[1]}.__main__", None)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        status = 1
    with suppress(Exception):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status
