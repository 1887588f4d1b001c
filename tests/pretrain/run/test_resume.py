"""What a checkpoint says of the steps that were trained before it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pretrain.run.resume import precisions_around, shift_of


@pytest.mark.parametrize(
    ("step", "around"),
    [
        (0, ("nvfp4", "nvfp4")),
        (1, ("nvfp4", "nvfp4")),
        (7, ("nvfp4", "nvfp4")),
        (8, ("nvfp4", "mxfp8")),
        (15, ("mxfp8", "bf16")),
        (20, ("bf16", "bf16")),
        (25, ("bf16", "bf16")),
    ],
)
def test_the_precisions_around_a_checkpoint_are_those_of_its_own_schedule(step: int, around: tuple[str, str]) -> None:
    phases = [{"until": 0.4, "use": "nvfp4"}, {"until": 15, "use": "mxfp8"}, {"use": "bf16"}]
    record = {"identity": {"precision": phases}, "progress": {"step": step, "steps": 20}}
    assert precisions_around(record) == around


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
