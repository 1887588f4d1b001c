"""Which process tells the user what went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from foundation.errors import InputError
from pretrain.run.command_line import say_once


def speak_as(local_rank: int, error_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    try:
        raise InputError("no such folder")
    except InputError as error:
        say_once(f"error: {error}", error)


def test_the_first_process_of_a_machine_prints_and_torchrun_finds_what_the_others_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speak_as(0, tmp_path / "0.json", monkeypatch)
    assert capsys.readouterr().err == "error: no such folder\n"
    speak_as(3, tmp_path / "3.json", monkeypatch)
    assert capsys.readouterr().err == ""
    failure = ProcessFailure(local_rank=3, pid=1, exitcode=2, error_file=str(tmp_path / "3.json"))
    assert "no such folder" in str(ChildFailedError("train_accelerate.py", {3: failure}))
