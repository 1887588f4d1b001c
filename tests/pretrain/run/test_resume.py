"""What a checkpoint says of the steps that were trained before it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pretrain.run.resume import ResumePoint


def point(step: int, **record: Any) -> ResumePoint:
    progress = {"step": step, "left_out": 1, "shift": 0}
    return ResumePoint(Path("step-00000005"), {"progress": progress, **record}, [])


@pytest.mark.parametrize(
    ("tokens", "length", "packs_per_step", "shift"),
    [(1024, 256, 4, 0), (1024, 256, 8, -24), (2048, 256, 4, 24), (1024, 512, 4, -12)],
    ids=["the same steps", "larger steps", "smaller steps", "shorter packs now"],
)
def test_the_text_goes_on_where_the_checkpoints_ended(tokens: int, length: int, packs_per_step: int, shift: int) -> None:
    data, recipe = SimpleNamespace(stream=None), SimpleNamespace(data=SimpleNamespace(length=length))
    job = SimpleNamespace(data=data, recipe=recipe, plan=SimpleNamespace(packs_per_step=packs_per_step))
    assert point(5, identity={"batch.tokens": tokens, "data.length": length}).shift(job) == shift
