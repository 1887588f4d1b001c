"""Saves that are written while training goes on: copies, their order, failures, and the parts of several ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.errors import InputError
from pretrain.checkpoint import saving, staging
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.folders import make_empty, partial_folder, step_folder
from pretrain.checkpoint.manifest import Manifest
from pretrain.checkpoint.saving import PendingSave
from pretrain.checkpoint.shards import write_tensors
from tests.pretrain.checkpoint.test_checkpoint import assert_holds, names, save, tensors_of


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no thread writes tensors."""
    go_on = threading.Event()

    def write_later(path: Path, *arguments: Any) -> object:
        assert go_on.wait(60)
        return write_tensors(path, *arguments)

    monkeypatch.setattr(saving, "write_tensors", write_later)
    return go_on


def begin(checkpoints: Checkpoints, step: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Begin to save `step`; returns the live tensors."""
    tensors = tensors_of(step)
    checkpoints.begin(step, *tensors, {"step": step})
    return tensors


def test_what_changes_after_a_save_was_begun_is_not_in_the_checkpoint(tmp_path: Path, held: threading.Event):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for group in begin(checkpoints, 1):
        for tensor in group.values():
            tensor.fill_(7)
    assert (checkpoints.current, checkpoints.latest) == (None, step_folder(tmp_path, 1))
    assert names(tmp_path) == [".partial-step-00000001"] and checkpoints.news() == []
    held.set()
    checkpoints.wait()
    assert checkpoints.current == step_folder(tmp_path, 1)
    assert_holds(checkpoints.current, 1)
    (line,) = checkpoints.news()
    assert str(checkpoints.current) in line and "training stopped for" in line and checkpoints.news() == []


@pytest.mark.parametrize("what", ["begin", "save", "newest", "abandon_newer"])
def test_whatever_comes_next_waits_for_the_save_under_way(tmp_path: Path, held: threading.Event, what: str):
    checkpoints = Checkpoints(tmp_path, keep=2)
    begin(checkpoints, 1)
    begun, done = threading.Event(), threading.Event()

    def next_one() -> None:
        begun.set()
        if what in ("begin", "save"):
            getattr(checkpoints, what)(2, *tensors_of(2), {"step": 2})
        else:
            getattr(checkpoints, what)(*([1] if what == "abandon_newer" else []))
        done.set()

    thread = threading.Thread(target=next_one)
    thread.start()
    assert begun.wait(60) and not done.wait(0.05)
    assert names(tmp_path) == [".partial-step-00000001"], "never two at once"
    held.set()
    thread.join()
    assert done.is_set(), "it was called, and came to its end"
    checkpoints.wait()
    assert_holds(step_folder(tmp_path, 1), 1)
    assert what not in ("begin", "save") or assert_holds(step_folder(tmp_path, 2), 2) is None


def test_a_full_disk_behind_the_training_is_known_and_said_once_with_nothing_lost(small_disk: Path):
    folder, rows = small_disk / "checkpoints", 20_000
    checkpoints = Checkpoints(folder, keep=2)
    for step in (1, 2):
        save(checkpoints, step, rows)
    checkpoints.begin(3, *tensors_of(3, rows), {"step": 3})
    checkpoints._pending.join()
    assert checkpoints.failed
    with pytest.raises(InputError, match=r"step 3 .*No space left.*00000002 is untouched"):
        checkpoints.begin(4, *tensors_of(4), {"step": 4})
    assert not checkpoints.failed and checkpoints.latest == step_folder(folder, 2)
    assert names(folder) == ["step-00000001", "step-00000002"]
    assert_holds(step_folder(folder, 2), 2, rows)


def test_without_room_for_copies_the_tensors_are_written_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(staging, "SHARE", 0.0)
    checkpoints = Checkpoints(tmp_path, keep=2)
    for group in begin(checkpoints, 1):
        for tensor in group.values():
            tensor.fill_(7)
    checkpoints.wait()
    assert_holds(step_folder(tmp_path, 1), 1)
    assert "no room for copies" in caplog.text


def test_copies_for_which_the_system_has_no_memory_are_not_made(monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 20 bytes")

    memory = staging.Staging()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", refuse)
        assert not memory.reserve(2**29, None)
    assert memory.reserve(2**10, None) and not memory.holds(2**29)


# ── Several ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pending(folder: Path, rank: int, files: list[str], world_size: int = 3) -> PendingSave:
    """What `rank` does of a save of step 5; any rank may come first."""
    final = step_folder(folder, 5)
    if rank == 0:
        make_empty(partial_folder(final))
    part = {file: {"a": torch.ones(5)} for file in files}
    manifest = Manifest(5, world_size, [], {}, {})
    return PendingSave(partial_folder(final), final, part, manifest, b"{}", rank, lambda: None)


def test_the_manifest_comes_when_every_rank_has_said_that_its_files_are_there(tmp_path: Path):
    first = pending(tmp_path, 0, ["model-0"])
    second = pending(tmp_path, 1, ["model-1"])
    second.written.result()
    assert not first.ended and not (tmp_path / "step-00000005").exists()
    pending(tmp_path, 2, []).written.result()  # it has nothing to write, and says so
    assert names(first.completed.result()) == ["manifest.json", "model-0", "model-1", "state.json"]
    files = json.loads((tmp_path / "step-00000005" / "manifest.json").read_text())["files"]
    assert files.keys() == {"model-0", "model-1", "state.json"}


def test_a_leader_that_names_the_folder_at_once_leaves_the_other_rank_nothing_to_miss(tmp_path: Path, monkeypatch):
    first, named = pending(tmp_path, 0, ["model-0"], world_size=2), os.replace

    def replace_and_sleep(source: Path, target: Path) -> None:
        named(source, target)
        first.completed.result()  # rank 1 is off its processor until the checkpoint is whole

    monkeypatch.setattr(os, "replace", replace_and_sleep)
    second = pending(tmp_path, 1, ["model-1"], world_size=2)
    assert [record.name for record in second.written.result()] == ["model-1"] and not second.failed
    assert names(first.completed.result()) == ["manifest.json", "model-0", "model-1", "state.json"]


def test_a_part_that_does_not_come_is_said_with_its_rank(tmp_path: Path):
    first = pending(tmp_path, 0, ["model-0"])
    first.patience = 0.05
    pending(tmp_path, 2, ["model-2"])
    with pytest.raises(OSError, match="rank 1"):
        first.completed.result()
    assert first.failed and names(tmp_path) == [".partial-step-00000005"]


def _die_before_reporting(rank: int, folder: str) -> None:
    """Rank 1 is killed when all of its part of step 2 is on the disk, but nobody knows of it."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    checkpoints, begun = Checkpoints(Path(folder) / "checkpoints", keep=2), Path(folder) / "begun"
    save(checkpoints, 1)

    def watch(event: str, values: tuple[object, ...]) -> None:
        if rank == 1 and event == "open" and ".unnamed-00001" in str(values[0]):
            while not begun.exists():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    begin(checkpoints, 2)
    if rank == 0:
        begun.touch()
        checkpoints._pending.patience = 0.2
        checkpoints._pending.join()
    checkpoints.close()
    os._exit(0 if checkpoints.failed else 1)


def test_a_rank_killed_within_a_save_leaves_the_checkpoint_before_it_and_ends_the_wait(tmp_path: Path):
    start = torch.multiprocessing.start_processes
    ranks = start(_die_before_reporting, args=(str(tmp_path),), nprocs=2, start_method="fork", join=False)
    for process in ranks.processes:
        process.join()
    assert [process.exitcode for process in ranks.processes] == [0, -signal.SIGKILL]
    folder = tmp_path / "checkpoints"
    assert names(folder) == [".partial-step-00000002", "step-00000001"]
    survivor = Checkpoints(folder, keep=2)
    assert survivor.newest() == step_folder(folder, 1)
    assert_holds(step_folder(folder, 1), 1)
    assert_holds(save(survivor, 2), 2)
    assert names(folder) == ["step-00000001", "step-00000002"]


def _run_out_of_memory_on_rank_1(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    checkpoints = Checkpoints(Path(folder) / "checkpoints", keep=2)
    save(checkpoints, 1)

    def fail(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        raise MemoryError("no memory for a header")

    if rank == 1:
        saving.write_tensors = fail
    begin(checkpoints, 2)
    with pytest.raises(InputError, match=r"step 2 .*no memory for a header.*step-00000001 is untouched"):
        checkpoints.wait()
    torch.distributed.destroy_process_group()


def test_any_error_of_one_ranks_thread_is_raised_on_all_ranks(tmp_path: Path):
    torch.multiprocessing.start_processes(_run_out_of_memory_on_rank_1, args=(str(tmp_path),), nprocs=2, start_method="fork")
    assert names(tmp_path / "checkpoints") == ["step-00000001"]
