"""Signals sent to real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from foundation.signals import IF_NOT_IGNORED, REPEAT_SECONDS, SIGNALS, StopRequest

LOOP = """
import time
from foundation.signals import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saving", flush=True)
    time.sleep({save_seconds})
    print("saved after", stop.requested.name, flush=True)
"""


def start(save_seconds: float, *before: str) -> subprocess.Popen:
    code = LOOP.format(save_seconds=save_seconds)
    process = subprocess.Popen([*before, sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_first_signal_lets_the_process_save_and_exit_cleanly(number):
    process = start(save_seconds=0)
    process.send_signal(number)
    output, errors = process.communicate(timeout=20)
    assert output == f"saving\nsaved after {number.name}\n"
    assert process.returncode == 0
    assert f"{number.name}: finishing this step" in errors


def test_under_nohup_a_lost_terminal_changes_nothing():
    process = start(0, "nohup")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.3)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=20)
    assert output == "saving\nsaved after SIGTERM\n" and "SIGHUP" not in errors


def test_a_second_ctrl_c_exits_at_once():
    process = start(save_seconds=30)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "saving\n"
    time.sleep(REPEAT_SECONDS + 0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=5)
    assert output == ""
    assert process.returncode == -signal.SIGINT


def test_the_same_ctrl_c_delivered_twice_and_repeated_sigterm_do_not_cut_the_save_off():
    process = start(save_seconds=1)
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.05)
    output, _ = process.communicate(timeout=20)
    assert output == "saving\nsaved after SIGINT\n"
    assert process.returncode == 0


def test_the_handlers_from_before_come_back_after_the_block():
    before = [signal.getsignal(number) for number in (*SIGNALS, *IF_NOT_IGNORED)]
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert stop.requested == signal.SIGTERM
    assert [signal.getsignal(number) for number in (*SIGNALS, *IF_NOT_IGNORED)] == before
