"""Saves in the background: copies, order, failures, and several ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from foundation.errors import InputError
from foundation.files import find_damage
from pretrain.checkpoint import checkpoint
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.folders import step_folder
from pretrain.checkpoint.format import read_manifest, write_tensors
from tests.pretrain.checkpoint.test_checkpoint import assert_holds, names, save, tensors_of


@pytest.fixture
def blocked_writing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event. No thread writes tensors until it is set."""
    go_on = threading.Event()

    def write_later(path: Path, *arguments: Any) -> object:
        assert go_on.wait(60)
        return write_tensors(path, *arguments)

    monkeypatch.setattr(checkpoint, "write_tensors", write_later)
    return go_on


def begin_and_change(checkpoints: Checkpoints, step: int) -> None:
    """Begin to save `step`, then change the tensors at once, as training does."""
    tensors = tensors_of(step)
    checkpoints.save(step, *tensors, {"step": step}, in_background=True)
    assert checkpoints.latest == step_folder(checkpoints.folder, step), "a run can roll back to it"
    for tensor in (*tensors[0].values(), *tensors[1].values()):
        tensor.fill_(7)


NEXT = {
    "behind": lambda checkpoints: checkpoints.save(
        2, *tensors_of(2), {"step": 2}, in_background=True
    ),
    "save": lambda checkpoints: checkpoints.save(2, *tensors_of(2), {"step": 2}),
    "newest": Checkpoints.newest,
    "set_aside_newer": lambda checkpoints: checkpoints.set_aside_newer(1),
}


@pytest.mark.parametrize("method", NEXT)
def test_the_next_method_waits_for_the_running_save(tmp_path, blocked_writing, method, capsys):
    checkpoints = Checkpoints(tmp_path, keep=2)
    begin_and_change(checkpoints, 1)
    thread = threading.Thread(target=NEXT[method], args=(checkpoints,))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert not any("00000002" in name for name in names(tmp_path)), "only one save at a time"
    blocked_writing.set()
    thread.join()
    checkpoints.wait()
    path = step_folder(tmp_path, 1)
    assert_holds(path, 1)
    assert f"saved {path} in" in capsys.readouterr().out
    if method in ("behind", "save"):
        assert_holds(step_folder(tmp_path, 2), 2)


def test_without_room_for_copies_the_tensors_are_written_first(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "SHARE", 0.0)
    checkpoints = Checkpoints(tmp_path, keep=2)
    begin_and_change(checkpoints, 1)
    checkpoints.wait()
    assert_holds(step_folder(tmp_path, 1), 1)
    assert "no room for copies" in caplog.text


def test_free_memory_is_limited_by_the_tightest_control_group(tmp_path, monkeypatch):
    """Cached files of a group count as free. Without groups the machine is the limit."""
    assert 0 < checkpoint.free_memory() <= psutil.virtual_memory().total
    monkeypatch.setattr(checkpoint, "GROUPS", tmp_path)
    unlimited = checkpoint.free_memory()
    for limit, expected in (("max", unlimited), (20 * 2**20, 14 * 2**20)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{9 * 2**20}\n")
        (tmp_path / "memory.stat").write_text(
            f"anon {2**20}\nactive_file {2**20}\ninactive_file {2 * 2**20}\n"
        )
        assert checkpoint.free_memory() == pytest.approx(expected, rel=0.2)


# ── Several ranks ──


def in_a_group(rank: int, folder: str, work: Callable[[int, Checkpoints, Path], None]) -> None:
    """Save step 1 and call `work`, in one of two processes."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    checkpoints = Checkpoints(Path(folder) / "checkpoints", keep=2)
    save(checkpoints, 1)
    work(rank, checkpoints, Path(folder))


def die_while_writing(rank: int, checkpoints: Checkpoints, folder: Path) -> None:
    """Kill rank 1 while it writes its files of step 2."""
    if rank == 1:
        checkpoint.write_tensors = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    begin_and_change(checkpoints, 2)
    checkpoints.close()
    os._exit(0)


def complete_when_all_have_written(rank: int, checkpoints: Checkpoints, folder: Path) -> None:
    """Let rank 1 write only after rank 0 has written and called `settle`."""
    final = step_folder(checkpoints.folder, 2)
    go_on = threading.Event()
    if rank == 1:
        checkpoint.write_tensors = lambda *arguments: go_on.wait(60) and write_tensors(*arguments)
    begin_and_change(checkpoints, 2)
    checkpoints.settle()
    assert not final.exists()
    go_on.set()
    checkpoints.wait()
    torch.distributed.barrier()
    assert find_damage(final, read_manifest(final).files) == []
    assert_holds(final, 2)
    torch.distributed.destroy_process_group()


def start_two(work: Callable[..., None], folder: Path, *, join: bool = True) -> Any:
    """Run `in_a_group` in two processes."""
    start = torch.multiprocessing.start_processes
    return start(in_a_group, (str(folder), work), nprocs=2, start_method="fork", join=join)


def test_a_checkpoint_is_complete_when_all_ranks_have_written(tmp_path: Path):
    start_two(complete_when_all_have_written, tmp_path)


def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before_it(tmp_path: Path):
    ranks = start_two(die_while_writing, tmp_path, join=False)
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


def run_out_of_memory_on_rank_1(rank: int, checkpoints: Checkpoints, folder: Path) -> None:
    def fail(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        raise MemoryError("no memory for a header")

    if rank == 1:
        checkpoint.write_tensors = fail
    begin_and_change(checkpoints, 2)
    with pytest.raises(
        InputError, match=r"step-00000002: .*no memory for a header.*rank 1.*earlier checkpoints"
    ):
        checkpoints.wait()
    torch.distributed.destroy_process_group()


def test_an_error_in_one_ranks_thread_is_raised_on_all_ranks(tmp_path: Path):
    start_two(run_out_of_memory_on_rank_1, tmp_path)
    assert names(tmp_path / "checkpoints") == ["step-00000001"]
