"""Which process tells the user what went wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from pretrain.run.command_line import say_once


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that somebody wanted to sleep, instead of sleeping them."""
    seconds: list[float] = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


def speak_as(rank: int, local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    say_once("error: no such folder")


@pytest.mark.parametrize("rank", [0, 8])
def test_the_first_process_of_each_machine_speaks_at_once(
    rank: int, slept: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speak_as(rank, 0, monkeypatch)
    assert slept == []
    assert capsys.readouterr().err == "error: no such folder\n"


def test_another_process_speaks_if_the_launcher_has_not_ended_it_meanwhile(
    slept: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speak_as(3, 3, monkeypatch)
    assert sum(slept) > 1, "torchrun looks at its processes ten times a second"
    assert capsys.readouterr().err == "rank 3: error: no such folder\n"


def test_torchrun_finds_the_message_where_it_looks_for_its_processes_last_words(
    tmp_path: Path, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    speak_as(3, 3, monkeypatch)
    failure = ProcessFailure(local_rank=3, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    assert "traceback : error: no such folder" in str(ChildFailedError("train_accelerate.py", {3: failure}))


@pytest.mark.parametrize("status", [2, 3, 138])
def test_accelerate_launch_makes_one_of_every_status_as_the_docs_say(status: int, tmp_path: Path) -> None:
    script, config = tmp_path / "ends.py", Path(__file__).parents[2] / "accelerate_configs/cpu.yaml"
    script.write_text(f"raise SystemExit({status})")
    with pytest.raises(subprocess.CalledProcessError):  # its traceback, which ends a program with 1
        launch_command(launch_command_parser().parse_args(["--config_file", str(config), str(script)]))
    with pytest.raises(SystemExit, match=r"^1$"):
        launch_command(launch_command_parser().parse_args(["--quiet", "--config_file", str(config), str(script)]))
