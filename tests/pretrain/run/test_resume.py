"""What a checkpoint says of the steps that were trained before it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pretrain.run.resume import precision_before, shift_of


@pytest.mark.parametrize(("step", "before"), [(0, "nvfp4"), (8, "nvfp4"), (9, "mxfp8"), (15, "mxfp8"), (25, "bf16")])
def test_the_precision_before_a_checkpoint_is_that_of_its_last_step(step: int, before: str) -> None:
    record = {"course": {"1": "nvfp4", "9": "mxfp8", "16": "bf16"}, "progress": {"step": step}}
    assert precision_before(record) == before


@pytest.mark.parametrize(
    ("tokens", "length", "packs_per_step", "shift"),
    [(1024, 256, 4, 0), (1024, 256, 8, -24), (2048, 256, 4, 24), (1024, 512, 4, -12)],
    ids=["the same steps", "larger steps", "smaller steps", "shorter packs now"],
)
def test_the_text_goes_on_where_the_checkpoints_ended(tokens: int, length: int, packs_per_step: int, shift: int) -> None:
    progress = {"step": 5, "left_out": 1, "shift": 0}
    record = {"identity": {"batch.tokens": tokens, "data.length": length}, "progress": progress}
    data, recipe = SimpleNamespace(stream=None), SimpleNamespace(data=SimpleNamespace(length=length if length == 256 else 512))
    job = SimpleNamespace(data=data, recipe=recipe, plan=SimpleNamespace(packs_per_step=packs_per_step))
    assert shift_of(record, job) == shift
