from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from foundation.memory import free_memory

MIB = 2**20


def group_at(folder: Path, limit: str, used: int, cached: int, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), 2: ("memory.max", "memory.current", "")}[version]
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    cache = f"{names[2]}inactive_file {cached // 4}\n{names[2]}active_file {cached - cached // 4}\n"
    (folder / "memory.stat").write_text(f"anon 4096\n{cache}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def test_a_job_of_slurm_has_what_the_groups_around_it_leave(root: Path):
    (root / "proc/self/cgroup").write_text("0::/system.slice/job_7/step_0\n")
    groups = root / "sys/fs/cgroup/system.slice"
    group_at(groups / "job_7/step_0", "max", 50 * MIB, 0, 2)
    group_at(groups / "job_7", str(64 * MIB), 50 * MIB, 8 * MIB, 2)
    assert free_memory(root) == 22 * MIB


def test_a_container_that_sees_its_group_as_the_root_has_what_that_leaves(root: Path):
    (root / "proc/self/cgroup").write_text("5:devices:/docker/1\n4:memory:/docker/1\n0::/docker/1\n")
    group_at(root / "sys/fs/cgroup/memory", str(32 * MIB), 30 * MIB, MIB, 1)
    assert free_memory(root) == 3 * MIB


def test_where_no_group_has_a_limit_it_is_what_the_machine_has(root: Path):
    assert free_memory(root) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    (root / "proc/self/cgroup").write_text("0::/\n")
    group_at(root / "sys/fs/cgroup", "max", MIB, 0, 2)
    assert free_memory(root) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert 0 < free_memory() <= psutil.virtual_memory().total
