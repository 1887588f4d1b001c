"""A command turns its errors into one message and an exit status."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from foundation.command import run_command
from foundation.errors import InputError


def failing(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


DENIED = PermissionError(13, "Permission denied", "/data")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InputError("key: wrong; do this"), 2, "error: key: wrong; do this\n"),
        (DENIED, 2, "error: [Errno 13] Permission denied: '/data'\n"),
        (KeyboardInterrupt(), 130, "\nstopped by Ctrl-C; run the same command again to continue\n"),
    ],
)
def test_an_error_becomes_a_message_and_an_exit_status(
    error, status, message, capsys: pytest.CaptureFixture[str]
):
    assert run_command(failing(error)) == status
    assert capsys.readouterr().err == message


def test_torchrun_shows_the_message_of_the_first_failing_rank_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rank that fails first is not rank 0, and both fail in the same second."""
    failures = {}
    for rank in (1, 0):
        folder = tmp_path / str(rank)
        folder.mkdir()
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        assert run_command(failing(InputError("no such folder"))) == 2
    for rank in (0, 1):
        file = str(tmp_path / str(rank) / "error.json")
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=2, error_file=file)
    assert capsys.readouterr().err == ""
    error = ChildFailedError("train_accelerate.py", failures)
    assert error.get_first_failure()[0] == 1
    table = str(error)
    assert table.count("no such folder") == 1
    assert table.rstrip("=\n").endswith("traceback : error: no such folder")
    assert "Traceback" not in table


@pytest.mark.parametrize("path", ["", "error.json", "0/error.json"])
def test_the_message_is_printed_if_another_program_sets_the_error_file(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    assert run_command(failing(InputError("no such folder"))) == 2
    assert capsys.readouterr().err == "error: no such folder\n"
    assert list(tmp_path.iterdir()) == []


ENDING = """
import atexit, sys, threading, time
from foundation.command import end_after_error, end_process, run_command

class Freed:
    def __del__(self):
        print("freed", flush=True)

freed = Freed()
atexit.register(print, "exit function")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
sys.stdout.write("last line ")
sys.excepthook = end_after_error
"""


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("sys.stderr.write('error'); end_process(3)", 3, "error"),
        ("run_command(lambda: 1 / 0)", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_a_process_ends_with_its_status_after_threads_and_exit_functions(
    end: str, status: int, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No object is freed after that, which would take seconds with torch."""
    path = tmp_path / "status"
    path.write_text("138\n")  # of an earlier start of the same job
    monkeypatch.setenv("PRETRAIN_STATUS_FILE", str(path))
    monkeypatch.delenv("RANK", raising=False)
    ended = subprocess.run([sys.executable, "-c", ENDING + end], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (status, "last line thread\nexit function\n")
    assert ended.stderr.endswith(error) and ("Traceback" in ended.stderr) == (status == 1)
    # Another function writes the status of an error that is no bug.
    assert path.read_text() == ("1\n" if status == 1 else "138\n")
    assert run_command(failing(InputError("a mistake"))) == 2
    assert path.read_text() == "2\n"


@pytest.mark.parametrize("name", ["missing/status", "."])
def test_a_status_file_that_cannot_be_written_is_one_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRETRAIN_STATUS_FILE", str(tmp_path / name))
    monkeypatch.delenv("RANK", raising=False)
    assert run_command(lambda: 0) == 0
    assert capsys.readouterr().err.startswith("warning: PRETRAIN_STATUS_FILE: ")
    assert run_command(failing(InputError("a mistake"))) == 2


def test_an_error_on_a_full_disk_keeps_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    # Closing the file fails too.
    with suppress(OSError), open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert run_command(failing(InputError("no space"))) == 2
