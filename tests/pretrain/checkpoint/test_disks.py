"""Machines with and without a shared disk: processes whose folders have one name and lie in different places."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from foundation.errors import InputError
from pretrain.checkpoint import disks
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.disks import Disks, find_disks, look_at_disks, name_ranks
from pretrain.model.distributed import local_part

RUN = Path("run")  # of every process, from where it is
WEIGHT, NORM = torch.arange(30.0).reshape(10, 3), torch.arange(4.0)


def _as_rank(rank: int, places: list[Path], machines: list[int], store: str, work: Callable[..., Any], queue: Any) -> None:
    torch.set_num_threads(1)
    os.chdir(places[rank])
    os.environ["LOCAL_RANK"] = str(machines[:rank].count(machines[rank]))
    disks.SECONDS = 0.2
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, len(places)), rank=rank, world_size=len(places)
    )
    try:
        queue.put((rank, work(rank)))
    except InputError as error:
        queue.put((rank, str(error)))
    torch.distributed.destroy_process_group()


def on_machines(tmp_path: Path, work: Callable[[int], Any], places: list[str], machines: list[int]) -> list[Any]:
    """What `work` returns, or says, as each rank, whose run folder lies in the folder named by `places`."""
    folders = [tmp_path / place for place in places]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    store = str(tmp_path / f"store-{len(list(tmp_path.iterdir()))}")
    arguments = (folders, machines, store, work, queue)
    torch.multiprocessing.start_processes(_as_rank, args=arguments, nprocs=len(places), start_method="fork")
    return [result for _, result in sorted((queue.get() for _ in places), key=lambda each: each[0])]


def prove(rank: int) -> Disks:
    if rank == 0:
        RUN.mkdir()
    return find_disks(RUN, lambda: RUN.mkdir(exist_ok=True))


def test_processes_that_see_one_folder_find_one_disk_and_leave_nothing(tmp_path: Path):
    found = on_machines(tmp_path, prove, ["a", "a", "a"], [0, 0, 1])
    assert [(each.are_one, each.leads, each.members) for each in found] == [(True, rank == 0, [0, 1, 2]) for rank in range(3)]
    assert list((tmp_path / "a" / RUN).iterdir()) == []


def test_machines_with_disks_of_their_own_are_found_with_who_leads_each(tmp_path: Path):
    found = on_machines(tmp_path, prove, ["a", "b", "b"], [0, 1, 1])
    assert [each.leaders for each in found] == [(0, 1, 1)] * 3
    assert [each.leads for each in found] == [True, True, False] and not found[0].are_one
    assert f"{tmp_path}/b/run" in found[0].describe() and "ranks 1, 2" in found[0].describe()
    assert [list((tmp_path / place / RUN).iterdir()) for place in "ab"] == [[], []]


def test_a_process_that_sees_no_folder_of_its_machine_is_named_with_host_and_path_on_all(tmp_path: Path):
    said = on_machines(tmp_path, prove, ["a", "b", "c"], [0, 1, 1])
    assert len(set(said)) == 1
    assert said[0].startswith(f"{tmp_path}/c/run: rank 2 on {os.uname().nodename} sees no run folder there; rank 0 on ")
    assert "Mount that disk" in said[0]


def test_a_machine_that_cannot_make_the_folder_is_named_with_the_reason(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / RUN).write_text("a file")
    said = on_machines(tmp_path, prove, ["a", "b"], [0, 1])
    assert said[0] == said[1] and "rank 1 on" in said[0] and "cannot make one: File exists" in said[0]


@pytest.mark.parametrize(
    ("ranks", "name"), [([3], "rank 3"), ([8, 9, 10], "ranks 8 to 10"), ([1, 3], "ranks 1, 3"), ([1, 2, 4], "ranks 1, 2, 4")]
)
def test_ranks_are_named_as_people_do(ranks: list[int], name: str):
    assert name_ranks(ranks) == name


# ── Checkpoints on several disks ──────────────────────────────────────────────────────────────────────────────────────────────


def tensors(fill: float | None = None) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A sharded weight and a replicated norm with their moments, or the same filled with a number."""
    if torch.distributed.is_initialized():
        weight = distribute_tensor(WEIGHT, init_device_mesh("cpu", (torch.distributed.get_world_size(),)), [Shard(0)])
    else:
        weight = WEIGHT.clone()
    group = {"weight": weight, "norm": NORM.clone()}
    if fill is not None:
        for each in group.values():
            local_part(each).fill_(fill)
    return group, {f"exp_avg/{name}": each.clone() for name, each in group.items()}


def saving(rank: int) -> list[str]:
    RUN.mkdir(exist_ok=True)
    checkpoints = Checkpoints(RUN / "checkpoints", keep=1, disks=find_disks(RUN, lambda: None))
    for step in (1, 2):
        checkpoints.begin(step, *tensors(), {"step": step})
    checkpoints.save(3, *tensors(), {"step": 3})
    return sorted(path.relative_to(RUN).as_posix() for path in RUN.glob("checkpoints/*/*"))


def loading(rank: int) -> int:
    """The step of the newest checkpoint that all ranks can load, loaded and compared."""
    checkpoints = Checkpoints(RUN / "checkpoints", keep=1, disks=find_disks(RUN, lambda: RUN.mkdir(exist_ok=True)))
    newest = checkpoints.newest()
    if newest is None:
        raise InputError("; ".join(problem for problems in checkpoints.damaged.values() for problem in problems))
    (model, optimizer), (saved, moments) = tensors(fill=7), tensors()
    checkpoints.load(newest, model, optimizer)
    for name in model:
        assert torch.equal(local_part(model[name]), local_part(saved[name]))
        assert torch.equal(local_part(optimizer[f"exp_avg/{name}"]), local_part(moments[f"exp_avg/{name}"]))
    return checkpoints.read_state(newest)["step"]


def test_each_machine_keeps_what_its_ranks_need_and_resumes_without_the_others_files(tmp_path: Path):
    machines = (["a", "b", "b"], [0, 1, 1])
    mine, theirs, _ = on_machines(tmp_path, saving, *machines)
    assert mine == [
        "checkpoints/step-00000003/manifest.json",
        "checkpoints/step-00000003/model-00000-of-00003.safetensors",
        "checkpoints/step-00000003/optimizer-00000-of-00003.safetensors",
        "checkpoints/step-00000003/state.json",
    ]
    assert "checkpoints/step-00000003/manifest-00001.json" in theirs and len(theirs) == 6
    assert on_machines(tmp_path, loading, *machines) == [3, 3, 3]

    # On other machines it is said what lacks, and where it lies; with those files in one folder any number of ranks goes on.
    for said in on_machines(tmp_path, loading, ["a"], [0]):
        assert (
            f"the shards of ranks 1, 2 are not here; copy all files of {os.uname().nodename}:{tmp_path}/b/run/checkpoints/"
            in said
        )
    shutil.copytree(tmp_path / "b", tmp_path / "a", dirs_exist_ok=True)
    assert on_machines(tmp_path, loading, ["a"], [0]) == [3]
    assert on_machines(tmp_path, loading, ["a", "a"], [0, 0]) == [3, 3]
    assert on_machines(tmp_path, lambda rank: look_at_disks(RUN).are_one, ["a", "a"], [0, 0]) == [True, True]


def test_a_step_that_one_machine_has_not_completed_is_not_resumed_from(tmp_path: Path):
    machines = (["a", "b"], [0, 1])
    on_machines(tmp_path, saving, *machines)
    assert [found.leaders for found in on_machines(tmp_path, lambda rank: look_at_disks(RUN), *machines)] == [(0, 1)] * 2
    shutil.copytree(tmp_path / "a/run/checkpoints/step-00000003", tmp_path / "a/run/checkpoints/step-00000004")
    assert on_machines(tmp_path, loading, *machines) == [3, 3]
