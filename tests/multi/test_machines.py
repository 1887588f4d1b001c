"""A run on two machines, each a process with a folder of its own, where `run_dir` is one path and two places."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

FSDP2 = ["--config_file", "accelerate_configs/fsdp2.yaml", "--mixed_precision", "no"]
RUN = Path("runs/shared-name")

pytestmark = pytest.mark.multi


@pytest.fixture
def machines(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    return folders


def steps_on(machine: Path) -> list[str]:
    return sorted(path.name for path in (machine / RUN / "checkpoints").glob("step-*"))


def weights(run_dir: Path) -> list[torch.Tensor]:
    return list(AutoModelForCausalLM.from_pretrained(run_dir / "final").parameters())


def test_machines_without_a_shared_disk_save_resume_and_say_what_is_missing(
    train_as_ranks: Callable, train_here: Callable, machines: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [f"run_dir={RUN}", "checkpoint.keep=2", "evaluate.every=100"]
    first = train_as_ranks(*settings, launch=FSDP2, machines=machines)
    assert first.status == 0, first.output
    assert "machines share no disk for the run folder" in first.output and f"{machines[1]}/{RUN}" in first.output
    assert [steps_on(machine) for machine in machines] == [["step-00000008", "step-00000012"]] * 2
    alone = weights(machines[0] / RUN)

    # As if the second machine had gone down before its part of the last checkpoint was there.
    shutil.rmtree(machines[1] / RUN / "checkpoints" / "step-00000012")
    again = train_as_ranks(*settings, launch=FSDP2, machines=machines)
    assert again.status == 0 and "at step 8" in again.output, again.output
    assert all(torch.equal(a, b) for a, b in zip(weights(machines[0] / RUN), alone, strict=True))
    assert all("step-00000012" in steps_on(machine) for machine in machines)

    # One machine alone is told what lacks, before a model is built.
    monkeypatch.chdir(machines[0])
    here = train_here(*settings)
    assert here.status == 2 and here.err.count("error: ") == 1, here.output
    error = here.err.partition("error: ")[2]
    assert "step-00000012: the shards of rank 1 are not here; copy all files of " in error
    assert f":{machines[1]}/{RUN}/checkpoints/step-00000012 into it" in error
