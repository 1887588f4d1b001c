"""Checkpoints on real file systems: exact, verified, never half, never lost."""

from __future__ import annotations

import errno
import itertools
import json
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
from foundation.files import hash_of
from packing.order import splitmix64
from pretrain.checkpoint import checkpoint, format
from pretrain.checkpoint.checkpoint import Checkpoints, bytes_needed, check_space
from pretrain.checkpoint.state import step_seed
from tests.conftest import flip

MODEL, OPTIMIZER = (
    f"{kind}-00000-of-00001-part-000.safetensors" for kind in ("model", "optimizer")
)


def tensors_of(
    step: int, rows: int = 40
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A small model and optimizer whose values tell the step they are of."""
    generator = torch.Generator().manual_seed(step)
    model = {
        "embed.weight": torch.randn(rows, 16, generator=generator).bfloat16(),
        # an odd count of 2-byte values before wider ones
        "norm.weight": torch.randn(3, generator=generator).bfloat16(),
        "scale": torch.randn((), generator=generator),
    }
    optimizer = {
        f"exp_avg/{name}": torch.randn(tensor.shape, generator=generator)
        for name, tensor in model.items()
    }
    return model, optimizer


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 7) for name, tensor in tensors.items()}


def save(checkpoints: Checkpoints, step: int, rows: int = 40) -> Path:
    return checkpoints.save(step, *tensors_of(step, rows), {"step": step})


def assert_holds(path: Path, step: int, rows: int = 40) -> None:
    """The checkpoint at `path` verifies and holds exactly what was saved at `step`."""
    model, optimizer = tensors_of(step, rows)
    loaded_model, loaded_optimizer = blank(model), blank(optimizer)
    checkpoints = Checkpoints(path.parent, keep=1)
    checkpoints.load(path, loaded_model, loaded_optimizer)
    assert checkpoints.read_state(path) == {"step": step}
    assert all(torch.equal(loaded_model[name], model[name]) for name in model)
    assert all(torch.equal(loaded_optimizer[name], optimizer[name]) for name in optimizer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path, monkeypatch):
    path = save(Checkpoints(tmp_path, keep=2), 100)
    assert names(tmp_path) == ["step-00000100"]
    assert names(path) == ["manifest.json", MODEL, OPTIMIZER, "state.json"]
    assert_holds(path, 100)
    # plain safetensors under the parameters' names
    assert load_file(path / MODEL).keys() == tensors_of(100)[0].keys()
    monkeypatch.setattr(format, "PART_BYTES", 1000)
    parts = save(Checkpoints(tmp_path / "in parts", keep=1), 3)
    assert len(list(parts.glob("optimizer-*.safetensors"))) > 1
    assert_holds(parts, 3)


def test_tensors_that_do_not_fit_are_named_and_nothing_is_copied(tmp_path):
    path = save(Checkpoints(tmp_path, keep=1), 1)
    model, optimizer = tensors_of(1)
    wanted = blank(model)
    wanted["lm_head.weight"] = wanted.pop("norm.weight")
    wanted["embed.weight"] = torch.full((41, 16), 7.0)
    wanted["scale"] = torch.tensor(7)
    before = {name: tensor.clone() for name, tensor in wanted.items()}
    with pytest.raises(InputError) as error:
        Checkpoints(tmp_path, keep=1).load(path, wanted, blank(optimizer))
    for part in (
        str(path),
        "lacks lm_head.weight",
        "only it has norm.weight",
        "embed.weight is BF16 [40, 16] there and F32 [41, 16] here",
        "scale is F32 [] there and I64 [] here",
    ):
        assert part in str(error.value)
    assert all(torch.equal(wanted[name], before[name]) for name in wanted)


HARMS = {
    "bit of a weight": lambda path: flip(path / MODEL),
    "bit of the state": lambda path: flip(path / "state.json", 3),
    "bit of the manifest": lambda path: flip(path / "manifest.json", 200),
    "truncated": lambda path: os.truncate(path / OPTIMIZER, 100),
    "missing file": lambda path: (path / OPTIMIZER).unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_damaged_newest_checkpoint_is_reported_kept_and_the_one_before_it_taken(
    tmp_path, caplog, harm
):
    writer = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        newest = save(writer, step)
    harm(newest)
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() == tmp_path / "step-00000002"
    assert checkpoints.damaged == {newest}
    assert f"{newest} is DAMAGED" in caplog.text
    with pytest.raises(InputError, match="step-00000003"):
        checkpoints.load(newest, *map(blank, tensors_of(3)))

    save(checkpoints, 4)  # two intact ones are kept beside the damaged one
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    save(checkpoints, 5)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]


FORGERIES = {
    "a file that is not listed": lambda piece: piece.update(file=f"../../{piece['file']}"),
    "a tensor that is not filled": lambda piece: piece.update(shape=[1, *piece["shape"][1:]]),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_manifest_whose_pieces_do_not_fill_a_tensor_is_refused(tmp_path, forge):
    path = save(Checkpoints(tmp_path, keep=1), 1)
    content = json.loads((path / "manifest.json").read_text())
    forge(content["model"]["embed.weight"]["pieces"][0])
    del content["sha256"]
    (path / "manifest.json").write_text(json.dumps({**content, "sha256": hash_of(content)}))
    with pytest.raises(InputError, match=r"the pieces of embed\.weight in its files"):
        Checkpoints(tmp_path, keep=1).load(path, *map(blank, tensors_of(1)))


def test_a_file_system_that_refuses_modes_takes_checkpoints(tmp_path, monkeypatch):
    def chmod(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chmod", chmod)
    assert_holds(save(Checkpoints(tmp_path, keep=1), 1), 1)


def test_a_save_that_fails_is_a_message_without_our_class_names(tmp_path, monkeypatch):
    def fail(path: Path, tensors: object) -> None:
        raise InputError(f"{path.name}: cannot be written")

    monkeypatch.setattr(checkpoint, "write_tensors", fail)
    with pytest.raises(InputError, match=rf"saved: {MODEL}: cannot be written \(rank 0\); "):
        save(Checkpoints(tmp_path, keep=1), 1)


# Calls between which a process may die and leave something else behind.
FILE_CALLS = {"open", "write", "flush", "rename", "replace", "mkdir", "rmdir", "unlink"}


def _save_and_die(folder: Path, number: int) -> None:
    """Save step 3 and be killed just before the `number`-th of FILE_CALLS, in whichever thread it comes."""
    calls = itertools.count(1)

    def watch(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in FILE_CALLS and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    checkpoints = Checkpoints(folder, keep=2)
    threading.setprofile(watch)
    sys.setprofile(watch)
    save(checkpoints, 3, rows=2000)


def test_a_save_killed_at_any_moment_leaves_an_intact_newest_checkpoint_and_no_half_one(tmp_path):
    before = tmp_path / "before"
    for step in (1, 2):
        save(Checkpoints(before, keep=2), step, rows=2000)
    newest_steps, status = [], -signal.SIGKILL
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
        save(survivor, 4, rows=2000)  # and the next save clears away what this one left
        assert names(folder) == [newest.name, "step-00000004"]
        shutil.rmtree(folder)
        if status != -signal.SIGKILL:
            break
    assert status == 0
    assert (
        newest_steps == sorted(newest_steps)
        and newest_steps.count(2) > 9
        and newest_steps.count(3) > 5
    )


def test_space_is_checked_against_the_bytes_a_checkpoint_really_takes(tmp_path):
    model, optimizer = tensors_of(1, rows=20_000)
    path = save(Checkpoints(tmp_path, keep=1), 1, rows=20_000)
    taken = sum(file.stat().st_size for file in path.iterdir())
    assert 0 <= bytes_needed(model, optimizer) - taken <= 2**20
    check_space(tmp_path / "not" / "there" / "yet", bytes_needed(model, optimizer))
    with pytest.raises(InputError, match=r"not/there/yet: checkpoints need .* are free"):
        check_space(tmp_path / "not" / "there" / "yet", 2**60)


def test_a_step_just_saved_or_loaded_is_not_written_again(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = save(checkpoints, 4)
    resumed = Checkpoints(tmp_path, keep=1)
    resumed.load(resumed.newest(), *map(blank, tensors_of(4)))
    for same in (checkpoints, resumed):
        assert save(same, 4) == path
    assert names(tmp_path) == ["step-00000004"]


def test_the_last_checkpoint_before_the_decay_is_kept_however_old_it_becomes(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, before=25)
    for step in (10, 20, 30, 40):
        save(checkpoints, step)
    assert names(tmp_path) == ["step-00000020", "step-00000040"]


def test_checkpoints_after_the_step_that_a_run_goes_back_to_stay_until_its_next_one_is_whole(
    tmp_path,
):
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (1, 2, 3):
        save(checkpoints, step)
    checkpoints.abandon_newer(1)
    assert names(tmp_path) == [
        "abandoned-step-00000002",
        "abandoned-step-00000003",
        "step-00000001",
    ]
    assert checkpoints.newest() == tmp_path / "step-00000001"
    assert_holds(tmp_path / "abandoned-step-00000003", 3)
    save(checkpoints, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_seeds_are_chained_outputs_of_splitmix64():
    """As packing has it, whose test compares it with the published one."""
    state = 0
    for part in (7, 11, 3):
        state = int(splitmix64(np.array([state + part], np.uint64))[0])
    assert step_seed(7, 11, 3) == state
