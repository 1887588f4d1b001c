"""A command in a process that is forked from a server, and the process that it replaces."""

import atexit
import fcntl
import multiprocessing
import os
import re
import runpy
import select
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}


def run_on_server(arguments: list[str]) -> None:
    """Run the command in a process forked from the server, and end as it ends."""
    server = forkserver._forkserver
    server._forkserver_address = os.environ["FORKED_COMMANDS"]
    # This process starts neither a server nor a resource tracker.
    server.ensure_running = lambda: None
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDWR)
    resource_tracker._resource_tracker._fd = server._forkserver_alive_fd
    ignored = {number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN}
    files = [Connection(number) for number in (0, 1, 2, *descriptors_of_server(arguments))]
    if arguments[0] == "-c":
        # Otherwise the command that has started the server would count as running with it.
        os.setpgid(0, 0)
    process = multiprocessing.get_context("forkserver").Process(
        target=run_command, args=(arguments, dict(os.environ), ignored, files)
    )
    process.start()

    def forward(number: int, _: object) -> None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:  # The process does not have its group yet, or has ended.
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    for number in SIGNALS - ignored:
        signal.signal(number, forward)
    process.join()
    with suppress(ProcessLookupError):
        while True:
            os.killpg(process.pid, 0)
            time.sleep(0.02)
    status = process.exitcode
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def descriptors_of_server(arguments: list[str]) -> list[int]:
    """Return the file descriptors in a command that starts multiprocessing's fork server."""
    if arguments[0] != "-c":
        return []
    return [int(number) for number in re.findall(r"main\((\d+), (\d+)", arguments[1])[0]]


def run_command(
    arguments: list[str],
    environment: dict[str, str],
    ignored: set[signal.Signals],
    files: list[Connection],
) -> None:
    """Run a command in this forked process as Python does."""
    os.setpgid(0, 0)
    kill_group_at_end_of(multiprocessing.parent_process().sentinel)
    for number, file in enumerate(files[:3]):
        os.dup2(file.fileno(), number)
    if arguments[0] == "-c":
        listener, alive = (os.dup(file.fileno()) for file in files[3:])
        arguments[1] = re.sub(r"main\(\d+, \d+", f"main({listener}, {alive}", arguments[1])
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout = open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Drop the exit handlers of the pytest worker.
    atexit._clear()
    import torch

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        execute(arguments)
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        # multiprocessing would print the traceback whatever hook the command has set.
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        with suppress(Exception):
            threading._shutdown()
            atexit._run_exitfuncs()


def kill_group_at_end_of(sentinel: int) -> None:
    """Let the kernel kill this process group when the process behind `sentinel` ends."""
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([sentinel], [], [], 0)[0]:
        os._exit(1)


def execute(arguments: list[str]) -> None:
    """Run the `sitecustomize.py` of other folders and the command."""
    site = Path(__file__).parent
    for folder in os.environ["PYTHONPATH"].split(os.pathsep):
        hook = Path(folder, "sitecustomize.py")
        if Path(folder) != site and hook.exists():
            runpy.run_path(str(hook))
    if arguments[0] == "-c":
        exec(arguments[1], {})
    elif arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        sys.modules.pop(f"{arguments[1]}.__main__", None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
