"""Trainings in the background, with a small program in place of a training, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from foundation.errors import InputError
from foundation.files import is_locked
from pretrain.launch.processes import check_log
from tests.conftest import ROOT

# The module that the server imports in place of `pretrain.launch.preloaded`.
PRELOADED = """
import os, signal, sys, time
from types import SimpleNamespace
from foundation.errors import InputError
from pretrain.launch import launcher

if os.environ.get("BROKEN"):
    raise RuntimeError("a package is broken")
server = os.getpid()
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(_is_in_bad_fork=lambda: False))

def run(launch):
    task, *arguments = launch.script_arguments
    group = "own group" if os.getpgrp() == os.getpid() else "another group"
    print(server, os.getpid(), arguments, os.environ.get("GPU"), group, repr(sys.stdin.read()))
    sys.stdout.flush()
    if task == "child":
        os.fork()
    if task == "wait" or (task == "child" and os.getpid() != os.getpgrp()):
        time.sleep(600)
    if task == "mistake":
        raise InputError("a.yaml: `key`: not a number; set a number")
    return int(arguments[0]) if task == "exit" else 0

launcher.run = run
"""
# Beginning of each client, a command that starts trainings.
CLIENT = """
import os, signal, sys, time
from pathlib import Path
from pretrain.launch import processes
from pretrain.launch.launcher import Launch

processes.PRELOADED[:] = ["preloaded"]

def start(log, *arguments, **variables):
    launch = Launch(Path("a.yaml"), arguments)
    return processes.start_training(launch, os.environ | variables, Path(log))

def ids(log):
    while not Path(log).read_text().endswith("\\n"):
        time.sleep(0.01)
    return [int(word) for word in Path(log).read_text().split()[:2]]
"""


@pytest.fixture
def client(tmp_path: Path) -> Callable[..., str]:
    """Function that runs a client in `tmp_path` and returns its output."""
    (tmp_path / "preloaded.py").write_text(PRELOADED)

    def run(code: str, status: int = 0, **variables: str) -> str:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"} | variables
        # A pipe would stay open until the server ends.
        out = tmp_path / "out"
        with out.open("w") as file:
            command = [sys.executable, "-c", CLIENT + code]
            done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=file)
        assert done.returncode == status
        return out.read_text()

    return run


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


def test_trainings_have_arguments_variables_logs_and_the_status_of_a_shell(
    client: Callable[..., str], tmp_path: Path
) -> None:
    """A mistake is one line of the log. A rank may continue after its launcher was killed."""
    # In a long TMPDIR, such as the folder of a SLURM job, the path of a socket would be too long.
    long = tmp_path / f"{80 * 'x'}"
    long.mkdir()
    client(
        """
start("one.log", "end", "one", GPU="3").wait()
start("two.log", "end", "two words", "ü", GPU="5").wait()
start("two.log", "end").wait()

for number in (0, 3):
    training = start("a.log", "exit", str(number))
    assert training.wait() and training.status == number
training = start("b.log", "wait")
assert not training.wait(seconds=0)
training.signal(signal.SIGKILL)
training.wait()
assert training.status == 137
training.signal(signal.SIGTERM)  # no error, although the group has ended

training = start("mistake.log", "mistake")
training.wait(60)
assert training.status == 2

training = start("c.log", "child")
ids("c.log")
while training._process.is_alive():
    time.sleep(0.01)
assert not training.has_ended()
training.signal(signal.SIGTERM)
assert training.wait()
""",
        TMPDIR=str(long),
    )
    first = (tmp_path / "one.log").read_text()
    second, third = (tmp_path / "two.log").read_text().splitlines()
    server = first.split()[0]
    assert first.endswith(" ['one'] 3 own group ''\n")
    assert second.endswith(" ['two words', 'ü'] 5 own group ''")
    assert third.endswith(" [] None own group ''"), "output is appended"
    assert second.startswith(f"{server} ") and third.startswith(f"{server} ")
    log = (tmp_path / "mistake.log").read_text()
    assert log.splitlines()[-1] == "error: a.yaml: `key`: not a number; set a number"
    assert "Traceback" not in log


def test_a_killed_training_or_server_ends_no_other_training(client: Callable[..., str]) -> None:
    client("""
killed = start("killed.log", "wait")
waiting = start("waiting.log", "wait")
killed.signal(signal.SIGKILL)
killed.wait()
server, process = ids("waiting.log")
assert not waiting.has_ended()
os.kill(server, signal.SIGKILL)
while waiting._process.is_alive():
    time.sleep(0.01)
assert not waiting.has_ended(), "it locks its log"
start("new.log", "end").wait()
assert ids("new.log")[0] != server
waiting.signal(signal.SIGKILL)
assert waiting.wait() and waiting.status == 255
""")


def test_a_server_that_breaks_is_a_failed_training(client: Callable[..., str]) -> None:
    client(
        """
training = start("a.log", "end")
assert training.has_ended() and training.status == 1
assert Path("a.log").read_text().startswith("error: the training was not started: ")
""",
        BROKEN="1",
    )


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    check_log(tmp_path / "missing")
    (tmp_path / "log").touch()
    check_log(tmp_path / "log")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "log")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(InputError, match="cannot be appended here"):
            check_log(path)


def test_a_training_continues_when_its_command_is_killed(
    client: Callable[..., str], tmp_path: Path
) -> None:
    client(
        """
start("a.log", "wait")
print(*ids("a.log"), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""",
        status=-signal.SIGKILL,
    )
    log = tmp_path / "a.log"
    server, training = map(int, log.read_text().split()[:2])
    assert is_locked(log) and not has_ended(training)
    os.kill(training, signal.SIGKILL)
    wait_until(lambda: has_ended(server))
    assert not is_locked(log)
