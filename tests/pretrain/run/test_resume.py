"""What a checkpoint says of the steps that were trained before it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pretrain.run.resume import ResumePoint


@pytest.mark.parametrize(
    ("tokens", "length", "packs_per_step", "shift"),
    [(1024, 256, 4, 0), (1024, 256, 8, -24), (2048, 256, 4, 24), (1024, 512, 4, -12)],
    ids=["the same steps", "larger steps", "smaller steps", "shorter packs now"],
)
def test_the_text_goes_on_where_the_checkpoints_ended(
    tokens: int, length: int, packs_per_step: int, shift: int
) -> None:
    data, recipe = (
        SimpleNamespace(stream=None),
        SimpleNamespace(data=SimpleNamespace(length=length)),
    )
    job = SimpleNamespace(
        data=data, recipe=recipe, plan=SimpleNamespace(packs_per_step=packs_per_step)
    )
    for place in ({"place": 6 * tokens // length}, {}):  # of which older checkpoints have none
        progress = {"step": 5, "left_out": 1, "shift": 0, **place}
        record = {"progress": progress, "identity": {"batch.tokens": tokens, "data.length": length}}
        source = ResumePoint(Path("step-00000005"), record, [])
        assert source.shift(job) == shift and source.place(job) == 6 * packs_per_step + shift
