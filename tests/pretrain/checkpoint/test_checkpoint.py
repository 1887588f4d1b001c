"""Checkpoints on real file systems: exact, verified, complete or absent, and pruned."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foundation.errors import InputError
from packing.order import splitmix64
from pretrain.checkpoint import checkpoint, format
from pretrain.checkpoint.checkpoint import Checkpoints, bytes_needed, check_space
from pretrain.checkpoint.state import step_seed
from tests.conftest import flip

MODEL, OPTIMIZER = (
    f"{kind}-00000-of-00001-part-000.safetensors" for kind in ("model", "optimizer")
)


Tensors = dict[str, torch.Tensor]


def tensors_of(step: int, rows: int = 40) -> tuple[Tensors, Tensors]:
    """Return tensors of a small model and optimizer, with different values for each step."""
    generator = torch.Generator().manual_seed(step)
    model = {
        "embed.weight": torch.randn(rows, 16, generator=generator).bfloat16(),
        # An odd number of 2-byte values comes before wider ones.
        "norm.weight": torch.randn(3, generator=generator).bfloat16(),
        "scale": torch.randn((), generator=generator),
    }
    optimizer = {
        f"exp_avg/{name}": torch.randn(tensor.shape, generator=generator)
        for name, tensor in model.items()
    }
    return model, optimizer


def all_tensors_of(step: int, rows: int = 40) -> Tensors:
    model, optimizer = tensors_of(step, rows)
    return model | optimizer


def blank(tensors: Tensors) -> Tensors:
    return {name: torch.full_like(tensor, 7) for name, tensor in tensors.items()}


def save(checkpoints: Checkpoints, step: int, rows: int = 40) -> Path:
    return checkpoints.save(step, *tensors_of(step, rows), {"step": step})


def assert_holds(path: Path, step: int, rows: int = 40) -> None:
    """Assert that the checkpoint at `path` is intact and holds the tensors of `step`."""
    expected = all_tensors_of(step, rows)
    loaded = blank(expected)
    checkpoints = Checkpoints(path.parent, keep=1)
    checkpoints.load(path, loaded)
    assert checkpoints.read_state(path) == {"step": step}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_tensors_are_loaded_bit_for_bit(tmp_path, monkeypatch):
    path = save(Checkpoints(tmp_path, keep=2), 100)
    assert names(tmp_path) == ["step-00000100"]
    assert names(path) == ["manifest.json", MODEL, OPTIMIZER, "state.json"]
    assert_holds(path, 100)
    # The files are plain safetensors with the names of the parameters.
    assert load_file(path / MODEL).keys() == tensors_of(100)[0].keys()
    wider = {name: tensor.double() for name, tensor in blank(all_tensors_of(100)).items()}
    Checkpoints(tmp_path, keep=2).load(path, wider)
    assert all(wider[name].equal(saved.double()) for name, saved in all_tensors_of(100).items())
    monkeypatch.setattr(format, "PART_BYTES", 1000)
    parts = save(Checkpoints(tmp_path / "in parts", keep=1), 3)
    assert len(list(parts.glob("optimizer-*.safetensors"))) > 1
    assert_holds(parts, 3)


def test_mismatches_are_named_and_nothing_is_copied(tmp_path):
    path = save(Checkpoints(tmp_path, keep=1), 1)
    model, optimizer = tensors_of(1)
    targets = blank(model)
    targets["lm_head.weight"] = targets.pop("norm.weight")
    targets["embed.weight"] = torch.full((41, 16), 7.0)
    targets["scale"] = torch.tensor(7)
    before = {name: tensor.clone() for name, tensor in targets.items()}
    with pytest.raises(InputError) as error:
        Checkpoints(tmp_path, keep=1).load(path, targets | blank(optimizer))
    for part in (
        str(path),
        "lacks lm_head.weight",
        "only the checkpoint has norm.weight",
        "embed.weight is BF16 [40, 16] in the checkpoint, and has another ",
        "scale is F32 [] in the checkpoint, and has another ",
    ):
        assert part in str(error.value)
    assert all(torch.equal(targets[name], before[name]) for name in targets)


HARMS = {
    "bit of a weight": lambda path: flip(path / MODEL),
    "bit of the state": lambda path: flip(path / "state.json", 3),
    "bit of the manifest": lambda path: flip(path / "manifest.json", 200),
    "truncated": lambda path: os.truncate(path / OPTIMIZER, 100),
    "missing file": lambda path: (path / OPTIMIZER).unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_damaged_checkpoint_is_kept_and_the_one_before_it_used(tmp_path, caplog, harm):
    writer = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        newest = save(writer, step)
    harm(newest)
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() == tmp_path / "step-00000002"
    assert checkpoints.damaged == {newest}
    assert f"{newest} cannot be used" in caplog.text
    with pytest.raises(InputError, match="step-00000003"):
        checkpoints.load(newest, blank(all_tensors_of(3)))

    save(checkpoints, 4)  # keeps two intact ones beside the damaged one
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    save(checkpoints, 5)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]
    save(checkpoints, 3)  # replaces the damaged one, which counts again
    save(checkpoints, 6)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]


def test_a_file_system_without_modes_is_supported(tmp_path, monkeypatch):
    def chmod(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chmod", chmod)
    assert_holds(save(Checkpoints(tmp_path, keep=1), 1), 1)


def test_the_message_of_a_failed_save_has_no_class_name(tmp_path, monkeypatch):
    def fail(path: Path, tensors: object) -> None:
        raise InputError(f"{path.name}: cannot be written")

    monkeypatch.setattr(checkpoint, "write_tensors", fail)
    with pytest.raises(InputError, match=rf"saved: {MODEL}: cannot be written \(rank 0\); "):
        save(Checkpoints(tmp_path, keep=1), 1)


# Calls that change the files which a killed process leaves behind.
FILE_CALLS = {"open", "write", "flush", "rename", "replace", "mkdir", "rmdir", "unlink"}


def _save_and_die(folder: Path, number: int) -> None:
    """Save step 3 and die just before the `number`-th call of FILE_CALLS, in any thread."""
    calls = itertools.count(1)

    def watch(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in FILE_CALLS and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    checkpoints = Checkpoints(folder, keep=2)
    threading.setprofile(watch)
    sys.setprofile(watch)
    save(checkpoints, 3, rows=2000)


def test_a_save_killed_at_any_moment_leaves_an_intact_checkpoint(tmp_path):
    before = tmp_path / "before"
    for step in (1, 2):
        save(Checkpoints(before, keep=2), step, rows=2000)
    newest_steps = []
    status = -signal.SIGKILL
    for number in itertools.count(1):
        folder = shutil.copytree(before, tmp_path / str(number))
        writer = multiprocessing.get_context("fork").Process(
            target=_save_and_die, args=(folder, number)
        )
        writer.start()
        writer.join()
        status = writer.exitcode
        for path in folder.glob("step-*"):
            assert_holds(path, int(path.name[5:]), rows=2000)
        survivor = Checkpoints(folder, keep=2)
        newest = survivor.newest()
        newest_steps.append(int(newest.name[5:]))
        save(survivor, 4, rows=2000)  # also deletes what the killed save has left
        assert names(folder) == [newest.name, "step-00000004"]
        shutil.rmtree(folder)
        if status != -signal.SIGKILL:
            break
    assert status == 0
    assert newest_steps == sorted(newest_steps)
    assert newest_steps.count(2) > 9
    assert newest_steps.count(3) > 5


def test_bytes_needed_are_those_that_a_checkpoint_takes(tmp_path):
    model, optimizer = tensors_of(1, rows=20_000)
    path = save(Checkpoints(tmp_path, keep=1), 1, rows=20_000)
    actual = sum(file.stat().st_size for file in path.iterdir())
    assert 0 <= bytes_needed(model | optimizer) - actual <= 2**20
    check_space(tmp_path / "not" / "there" / "yet", bytes_needed(model | optimizer))
    with pytest.raises(InputError, match=r"not/there/yet: checkpoints need .* are free"):
        check_space(tmp_path / "not" / "there" / "yet", 2**60)


def test_a_step_that_was_just_saved_or_loaded_is_not_saved_again(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = save(checkpoints, 4)
    resumed = Checkpoints(tmp_path, keep=1)
    resumed.load(resumed.newest(), blank(all_tensors_of(4)))
    for unchanged in (checkpoints, resumed):
        assert save(unchanged, 4) == path
    assert names(tmp_path) == ["step-00000004"]


@pytest.mark.parametrize(
    ("options", "saved", "kept"),
    [
        # The last checkpoint before the decay is never deleted.
        ({"keep": 1, "before_decay": 20}, [10, 20, 30, 40], [20, 40]),
        # Checkpoints to average outlive those of interruptions.
        ({"keep": 3, "merge": 3, "every": 10}, [10, 20, 30, 33, 36, 40], [20, 30, 33, 36, 40]),
        ({"keep": 3, "merge": 3, "every": 10}, [10, 20, 30, 33, 36, 40, 50], [30, 36, 40, 50]),
    ],
)
def test_checkpoints_before_a_decay_and_for_an_average_are_kept(tmp_path, options, saved, kept):
    checkpoints = Checkpoints(tmp_path, **options)
    for step in saved:
        save(checkpoints, step)
    assert names(tmp_path) == [f"step-{step:08}" for step in kept]


def test_abandoned_checkpoints_stay_until_the_next_save(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (1, 2, 3):
        save(checkpoints, step)
    checkpoints.set_aside_newer(1)
    assert names(tmp_path) == [
        "abandoned-step-00000002",
        "abandoned-step-00000003",
        "step-00000001",
    ]
    assert checkpoints.newest() == tmp_path / "step-00000001"
    assert_holds(tmp_path / "abandoned-step-00000003", 3)
    foreign = [".partial-thesis", "abandoned-step-00000002-to-keep"]
    for name in foreign:
        (tmp_path / name).mkdir()
    save(checkpoints, 2)
    assert names(tmp_path) == [*foreign, "step-00000001", "step-00000002"]


def test_seeds_are_chained_outputs_of_splitmix64():
    """The splitmix64 of packing is tested against published values."""
    state = 0
    for part in (7, 11, 3):
        state = int(splitmix64(np.array([state + part], np.uint64))[0])
    assert step_seed(7, 11, 3) == state
