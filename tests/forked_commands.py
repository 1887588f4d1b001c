"""Commands as a user types them, without the seconds of a core that each takes to import torch.

Shells, command lines, launchers, environments, signals and exit statuses are real. But where a command would begin to import, a
process takes its place that is forked from one which has imported all of that: tests/forked_site. It has the command's files,
folder and environment, and a process group of its own. `tests/pretrain/run/test_doctor.py` forks nothing.
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
LARGEST = 1 << 20  # bytes of a command with its environment


def forking(*folders: Path) -> dict[str, str]:
    """The environment, but for accelerate's variables, under which commands are forked. `folders`: others whose `sitecustomize`
    is run first."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    paths = {
        "PYTHONPATH": os.pathsep.join(map(str, (SITE, *folders))),
        "FORKED_COMMANDS": _server(),
    }
    return kept | {"OMP_NUM_THREADS": "1"} | paths


@cache
def _server() -> str:
    """Start the process that commands are forked from, which ends with this one, as that holds a pipe to it; returns the name of
    its socket, which is no file's."""
    name = f"forked-{os.getpid()}-{os.urandom(8).hex()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen()
    theirs, ours = fork_context.Pipe(duplex=False)
    fork_context.Process(target=_serve, args=(listener, theirs), daemon=True).start()
    theirs.close()
    listener.close()
    _server.held = ours
    return name


def _serve(listener: socket.socket, tests: Any) -> None:
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401  each run draws its picture

    gc.freeze()
    minders: set[int] = set()
    while tests not in select.select([listener, tests], [], [])[0]:
        client, _ = listener.accept()
        minders = {each for each in minders if os.waitpid(each, os.WNOHANG) == (0, 0)}
        if not (minder := os.fork()):
            listener.close()
            _mind(client)
        minders.add(minder)
        client.close()


def _mind(client: socket.socket) -> None:
    """Fork the command, pass on what signals come, and tell how it has ended once nothing of its group runs."""
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
            said = client.recv(1)
            os.killpg(child, said[0] if said else signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ProcessLookupError, BrokenPipeError):
        while True:
            os.killpg(child, 0)
            time.sleep(0.02)
    with suppress(BrokenPipeError):
        client.send(str(status).encode())
    os._exit(0)


def _become(command: dict[str, Any], files: list[int]) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN if number in command["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in command["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.current_process()._config.pop("daemon")  # it may start processes
    atexit._clear()  # what a worker of pytest does at its end
    atexit.register(util._exit_function)
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    os._exit(_status_of([each for each in command["arguments"] if each != "-u"]))


def _status_of(arguments: list[str]) -> int:
    """Run the command as Python does; returns its exit status."""
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
