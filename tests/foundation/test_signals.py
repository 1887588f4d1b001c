"""Signals sent to real processes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from foundation.signals import REPEAT_SECONDS

# A training loop that saves until its stdin is closed. Its clock advances between two signals by
# the seconds in its argument. It polls stdin: if a signal arrives just before a blocking read,
# Python runs the handler after the read, which would not end here.
LOOP = """
import itertools, select, sys, time
from types import SimpleNamespace
from foundation import signals
clock = itertools.count(0.0, float(sys.argv[1]))
signals.time = SimpleNamespace(monotonic=lambda: next(clock))
with signals.StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saving", flush=True)
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        pass
    print("saved after", stop.requested.name, flush=True)
"""


def start(seconds_between_signals: float, *before: str) -> subprocess.Popen:
    command = [*before, sys.executable, "-c", LOOP, str(seconds_between_signals)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("before", "numbers", "stops"),
    [
        ((), [signal.SIGINT], signal.SIGINT),
        ((), [signal.SIGHUP], signal.SIGHUP),
        ((), [signal.SIGUSR1], signal.SIGUSR1),
        (("nohup",), [signal.SIGHUP, signal.SIGTERM], signal.SIGTERM),
    ],
)
def test_a_first_signal_lets_the_process_save_and_exit_cleanly(before, numbers, stops):
    """Under nohup, a lost terminal changes nothing."""
    process = start(0, *before)
    for number in numbers:
        process.send_signal(number)
    output, errors = process.communicate()
    assert output == f"saving\nsaved after {stops.name}\n" and process.returncode == 0
    assert f"{stops.name}: finishing this step" in errors and errors.count("finishing") == 1
    assert ("Ctrl-C" in errors) == (stops == signal.SIGINT)


def test_a_second_ctrl_c_exits_at_once():
    process = start(seconds_between_signals=REPEAT_SECONDS + 0.1)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGINT)
    assert process.wait() == -signal.SIGINT
    assert process.communicate()[0] == ""


def test_a_ctrl_c_delivered_twice_and_repeated_sigterm_let_the_save_end():
    process = start(seconds_between_signals=REPEAT_SECONDS / 10)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "saving\n"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        process.send_signal(number)
    output, _ = process.communicate()
    assert output == "saved after SIGINT\n"
    assert process.returncode == 0


def test_an_import_that_fails_after_ctrl_c_is_ctrl_c():
    code = """
import os, signal
from foundation.command import run_command
from foundation.signals import end_on_ctrl_c, raising_on_ctrl_c

@raising_on_ctrl_c()
def command():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("partially initialized module")

end_on_ctrl_c()
raise SystemExit(run_command(command))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr.startswith("\nstopped by Ctrl-C") and "Traceback" not in done.stderr


def test_a_killed_process_prints_no_warning_about_semaphores():
    code = (
        "import multiprocessing, os, signal; from foundation.signals import end_on_ctrl_c; "
        "end_on_ctrl_c(); lock = multiprocessing.get_context('spawn').RLock(); "
        "os.kill(os.getpid(), signal.SIGINT)"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
