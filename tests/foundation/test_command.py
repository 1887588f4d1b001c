"""A command turns its errors into one message and an exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from foundation.command import run_command
from foundation.errors import InputError


def failing(error: BaseException):
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InputError("key: wrong; do this"), 2, "error: key: wrong; do this\n"),
        (
            PermissionError(13, "Permission denied", "/data"),
            2,
            "error: [Errno 13] Permission denied: '/data'\n",
        ),
        (KeyboardInterrupt(), 130, "\nstopped\n"),
    ],
)
def test_an_error_becomes_a_message_and_an_exit_status(
    error, status, message, capsys: pytest.CaptureFixture[str]
):
    assert run_command(failing(error), on_ctrl_c="stopped") == status
    assert capsys.readouterr().err == message


def fail_on_rank(local_rank: int, error_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    assert run_command(failing(InputError("no such folder"))) == 2


def test_local_rank_0_prints_and_torchrun_gets_errors_of_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_on_rank(0, tmp_path / "0.json", monkeypatch)
    assert capsys.readouterr().err == "error: no such folder\n"
    fail_on_rank(3, tmp_path / "3.json", monkeypatch)
    assert capsys.readouterr().err == ""
    failure = ProcessFailure(local_rank=3, pid=1, exitcode=2, error_file=str(tmp_path / "3.json"))
    assert "no such folder" in str(ChildFailedError("train_accelerate.py", {3: failure}))


def test_a_process_ends_with_its_status_after_threads_and_exit_functions() -> None:
    """No object is freed after that, which would take seconds with torch."""
    program = """
import atexit, sys, threading, time
from foundation.command import end_process

class Freed:
    def __del__(self):
        print("freed", flush=True)

freed = Freed()
atexit.register(print, "exit function")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
sys.stdout.write("last line ")
sys.stderr.write("error")
end_process(3)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 3
    assert ended.stdout == "last line thread\nexit function\n" and ended.stderr == "error"
