"""benchmarks/kill_resume.py: where the kills fall."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.kill_resume import phases


@pytest.mark.parametrize("kills", [1, 2, 3, 4, 20, 50])
def test_as_many_kills_are_made_as_are_asked_for(kills: int) -> None:
    found = phases(kills, random.Random(0))
    assert len(found) == kills
    assert Counter(found)["exporting"] == min(kills, max(2, kills // 10)) and found[-1] == "exporting"
