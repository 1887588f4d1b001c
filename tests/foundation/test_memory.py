"""The memory that a job may take."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from foundation import memory

MIB = 2**20


def test_a_job_has_what_the_tightest_of_its_groups_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group what its files in the cache take counts as free; a machine without groups is a limit by itself."""
    assert 0 < memory.free_memory() <= psutil.virtual_memory().total
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    whole = memory.free_memory()
    for limit, left in (("max", whole), (20 * MIB, 14 * MIB)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{9 * MIB}\n")
        (tmp_path / "memory.stat").write_text(f"anon {MIB}\nactive_file {MIB}\ninactive_file {2 * MIB}\n")
        assert memory.free_memory() == pytest.approx(left, rel=0.2)
