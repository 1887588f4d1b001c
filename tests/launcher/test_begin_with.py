"""`train.begin_with`: a run that begins with another run's checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

BEGIN = "runs-{seed}/first/checkpoints/step-00000004"


@pytest.fixture
def first(train_here: Callable, tmp_path: Path) -> Callable:
    """A run of twelve steps with a checkpoint after the fourth, in a folder that names its seed."""
    finished = train_here("seed=5", f"run_dir={tmp_path}/runs-5/first")
    assert finished.status == 0, finished.output
    return finished


def last_checkpoint(run_dir: Path) -> dict[str, torch.Tensor]:
    files = sorted((run_dir / "checkpoints" / "step-00000012").glob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def everything_in(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_it_goes_on_as_the_other_did_in_a_folder_of_its_own(first: Callable, train_here: Callable, tmp_path: Path) -> None:
    before = everything_in(first.run_dir)
    begins = ["seed=5", f"run_dir={tmp_path}/second", f"train.begin_with={tmp_path}/{BEGIN}"]
    second = train_here(*begins)
    assert second.status == 0, second.output
    assert second.losses() == first.losses()[4:] and len(second.losses()) == 8
    ours, theirs = last_checkpoint(second.run_dir), last_checkpoint(first.run_dir)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert everything_in(first.run_dir) == before

    shutil.rmtree(first.run_dir)  # once it has checkpoints of its own, those are gone on from
    shutil.rmtree(tmp_path / "second" / "checkpoints" / "step-00000012")
    again = train_here(*begins)
    assert again.status == 0 and "resumed from " + str(tmp_path / "second/checkpoints/step-00000008") in again.output
    assert again.losses() == second.losses()


def test_another_precision_and_other_settings_take_over_from_there(first: Callable, train_here: Callable, tmp_path: Path) -> None:
    begins = ["seed=5", f"run_dir={tmp_path}/second", f"train.begin_with={tmp_path}/{BEGIN}"]
    changes = ["precision=delayed", "fp8_config.on_unsupported=emulate", "weights=bf16_exact", "parity=off"]
    planned = train_here(*begins, *changes, "--plan")
    assert planned.status == 0 and f"would resume from {tmp_path}/{BEGIN.format(seed=5)}" in planned.output
    second = train_here(*begins, *changes)
    assert second.status == 0, second.output
    assert 'precision: saved "fp32", now "delayed"' in second.output and "fp32 became bf16_exact" in second.output
    assert second.losses()[0] == pytest.approx(first.losses()[4], rel=0.02) and second.losses()[0] != first.losses()[4]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("{seed}/step-00000004", "`train.begin_with`: 1337/step-00000004: no such checkpoint; name a step-* folder of another"),
        ("{sed}/step-00000004", "`train.begin_with`: '{sed}/step-00000004' cannot be filled in; did you mean {seed}?"),
        ("", "`train.begin_with`"),
    ],
)
def test_what_is_no_checkpoint_is_refused_before_anything_is_made(
    train_here: Callable, tmp_path: Path, path: str, says: str
) -> None:
    refused = train_here("seed=1337", f"train.begin_with={path}", f"run_dir={tmp_path}/second")
    assert refused.status == 2 and says in refused.output
    assert not list((tmp_path / "second").rglob("step-*"))


def test_a_folder_that_is_no_checkpoint_is_told_apart(train_here: Callable, tmp_path: Path) -> None:
    (tmp_path / "step-00000004").mkdir()
    refused = train_here(f"train.begin_with={tmp_path}/step-00000004", f"run_dir={tmp_path}/second")
    assert refused.status == 2 and str(tmp_path / "step-00000004") in refused.output
