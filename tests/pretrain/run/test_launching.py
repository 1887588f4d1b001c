"""Which process tells the user what went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from foundation.command import run_command
from foundation.errors import InputError
from pretrain.settings.config import LaunchParser, load_recipe, run_dir_of

ROOT = Path(__file__).parents[3]


def speak_as(local_rank: int, error_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))

    def launch() -> int:
        raise InputError("no such folder")

    assert run_command(launch) == 2


def test_the_first_process_of_a_machine_prints_and_torchrun_finds_what_the_others_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speak_as(0, tmp_path / "0.json", monkeypatch)
    assert capsys.readouterr().err == "error: no such folder\n"
    speak_as(3, tmp_path / "3.json", monkeypatch)
    assert capsys.readouterr().err == ""
    failure = ProcessFailure(local_rank=3, pid=1, exitcode=2, error_file=str(tmp_path / "3.json"))
    assert "no such folder" in str(ChildFailedError("train_accelerate.py", {3: failure}))


def test_settings_are_read_as_a_sweeps_agent_writes_them_and_name_the_run_folder(tmp_path: Path) -> None:
    """W&B's agent puts `--` before each; the shipped sweep gives each trial a folder of its own."""
    sweep = yaml.safe_load((ROOT / "recipes/sweeps/smoke.yaml").read_text())
    trial = ["--optimizer.learning_rate=3e-05", "--optimizer.weight_decay=0.1"]
    fixed = [text for text in sweep["command"] if "=" in text]
    parsed = LaunchParser(None).read([str(ROOT / "recipes/smoke.yaml"), *trial, *fixed])
    assert str(run_dir_of(load_recipe(parsed.recipe, parsed.overrides))).endswith("lr3e-05-wd0.1")
