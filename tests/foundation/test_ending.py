"""How processes end, in real ones, and what their output says of why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foundation.ending import reason_in

ROOT = Path(__file__).parents[2]
BEGIN = """
import atexit, os, threading, time
from foundation.ending import Ending
ending = Ending()
"""
MORE = """
class Last:
    def __del__(self):
        print("taken apart")

last = Last()
atexit.register(print, "registered", end=" ")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread", end=" "))).start()
"""


def run(*program: str) -> subprocess.CompletedProcess[str]:
    command, buffered = [sys.executable, "-c", "".join((BEGIN, *program))], {**os.environ, "PYTHONUNBUFFERED": ""}
    return subprocess.run(command, cwd=ROOT, env=buffered, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("error: no\nhalted: loss\nValueError: x\nthe end\n", "halted: loss"),
        ("Traceback\n  ValueError: x\n\nthe end\n", "ValueError: x"),
        ("nothing to see\n \n", "nothing to see"),
        ("\n", "it said nothing"),
    ],
)
def test_the_reason_is_our_message_or_else_an_error_or_else_the_last_line(output: str, reason: str) -> None:
    assert reason_in(output.splitlines()) == reason


def test_threads_and_what_is_registered_come_first_and_no_object_is_taken_apart() -> None:
    done = run(MORE, "ending.exit(7)")
    assert (done.returncode, done.stdout, done.stderr) == (7, "thread registered ", "")


def test_an_error_ends_the_process_as_ever() -> None:
    done = run(MORE, "raise ValueError('of the program')")
    assert done.returncode == 1 and done.stderr.endswith("ValueError: of the program\n")
    assert done.stdout == "thread registered taken apart\n"


def test_output_that_nobody_can_read_any_more_changes_no_status() -> None:
    done = run("print('lost'); os.close(1); ending.exit(3)")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_a_process_that_began_without_stdout_ends_as_any_other() -> None:
    done = run("import sys; sys.stdout = None; ending.exit(7)")
    assert (done.returncode, done.stderr) == (7, "")
