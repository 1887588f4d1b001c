"""A fork server with a small program in place of the launcher, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import psutil
import pytest

from foundation.files import is_locked
from foundation.fork_server import ForkServer
from foundation.signals import StopRequest
from tests.conftest import ROOT

PROGRAM = """
import os, sys, time
from foundation.fork_server import SERVE, serve
print("a banner of a package")
print("a line without an end", end="")
if os.environ.get("BROKEN"):
    raise ImportError("a package is broken")
imported_by = os.getpid()
for when in ("before", "after_in_parent"):
    os.register_at_fork(**{when: lambda: print("forked!", flush=True)})
if os.environ.get("HANGS"):
    os.kill(os.getpid(), 19)
if sys.argv[1:] == [SERVE]:
    serve()
print(sys.argv[1:], os.environ.get("GPU"), imported_by, os.getpgrp() == os.getpid(), flush=True)
print(repr(sys.stdin.read()), file=sys.stderr, flush=True)
if "wait" in sys.argv:
    time.sleep(600)
"""


# A request without a signal.
NEVER = StopRequest()


@pytest.fixture
def fork(tmp_path: Path) -> Callable[..., int]:
    """Function that forks the program with arguments, and writes to a log in `tmp_path`."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    server = ForkServer()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def fork(
        log: str,
        *arguments: str,
        gpu: str = "0",
        stop: StopRequest = NEVER,
        **variables: str,
    ) -> int:
        return server.fork(
            [sys.executable, str(program)],
            environment | variables,
            arguments,
            {"GPU": gpu},
            tmp_path / log,
            stop,
        )

    return fork


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def output_of(process: int, log: Path) -> list[str]:
    wait_until(lambda: has_ended(process))
    return log.read_text().split("\n")


def test_a_fork_has_its_arguments_variables_and_log(
    fork: Callable[..., int], tmp_path: Path
) -> None:
    first = output_of(fork("a.log", "one", gpu="3"), tmp_path / "a.log")
    second = output_of(fork("b.log", "two words", "ü", gpu="5"), tmp_path / "b.log")
    server = first[0].split()[-2]
    assert first == [f"['one'] 3 {server} True", "''", ""], "stdin is empty"
    assert second == [f"['two words', 'ü'] 5 {server} True", "''", ""], "the same server"


def test_a_killed_fork_takes_nobody_with_it(fork: Callable[..., int], tmp_path: Path) -> None:
    killed = fork("killed.log", "wait")
    waiting = fork("waiting.log", "wait")
    wait_until(lambda: is_locked(tmp_path / "killed.log"))
    wait_until(lambda: is_locked(tmp_path / "waiting.log"))
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not is_locked(tmp_path / "killed.log"))
    assert is_locked(tmp_path / "waiting.log")
    # The last line is the end of the process's stdin.
    wait_until(lambda: (tmp_path / "waiting.log").read_text().endswith("''\n"))
    server = int((tmp_path / "waiting.log").read_text().split()[-3])
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: has_ended(server))
    assert not has_ended(waiting)
    assert output_of(fork("new.log"), tmp_path / "new.log")[0].startswith("[] 0")
    os.kill(waiting, signal.SIGKILL)
    assert not is_locked(tmp_path / "missing.log")


def test_a_changed_environment_launches_another_server(
    fork: Callable[..., int], tmp_path: Path
) -> None:
    servers = {
        output_of(fork("a.log", THREADS=threads), tmp_path / "a.log")[-3].split()[-2]
        for threads in ("1", "2", "2")
    }
    assert len(servers) == 2


def test_an_error_during_imports_is_in_the_log(fork: Callable[..., int], tmp_path: Path) -> None:
    ended = fork("broken.log", BROKEN="1")
    wait_until(lambda: has_ended(ended))
    assert "ImportError: a package is broken" in (tmp_path / "broken.log").read_text()
    assert "[]" in output_of(fork("new.log"), tmp_path / "new.log")[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_a_server_that_hangs(
    number: signal.Signals, fork: Callable[..., int], tmp_path: Path
) -> None:
    """The server suspends itself during its imports. The signal arrives while the client waits."""
    with StopRequest(passed_on=True) as stop:
        Timer(0.3, os.kill, (os.getpid(), number)).start()
        ended = fork("hangs.log", stop=stop, HANGS="1")
    assert stop.received == [number]
    wait_until(lambda: has_ended(ended))
    assert "[]" in output_of(fork("new.log"), tmp_path / "new.log")[0]


def test_the_server_ends_with_its_client(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    client = f"""
import os, sys
from pathlib import Path
from foundation.fork_server import ForkServer
from foundation.signals import StopRequest
command = [sys.executable, {str(tmp_path / "program.py")!r}]
log = Path({str(tmp_path / "a.log")!r})
ForkServer().fork(command, dict(os.environ), ["wait"], {{}}, log, StopRequest())
os.kill(os.getpid(), 9)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", client], env=environment)
    assert ended.returncode == -signal.SIGKILL
    log = tmp_path / "a.log"
    # The last line is the end of the process's stdin.
    wait_until(lambda: log.exists() and log.read_text().endswith("''\n"))
    server = int(log.read_text().split()[-3])
    wait_until(lambda: has_ended(server))
    assert is_locked(log), "the forked process continues"
    (process,) = (p for p in psutil.process_iter() if is_program(p, tmp_path))
    process.kill()


def is_program(process: psutil.Process, folder: Path) -> bool:
    try:
        return str(folder / "program.py") in process.cmdline()
    except psutil.Error:
        return False
