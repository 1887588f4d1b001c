"""What benchmarks/equality.py keeps of runs is taken for those runs alone."""

from __future__ import annotations

import pytest

from benchmarks.equality import name_of

WANTED, LAUNCH = ["precision=fp32", "train.steps=50"], {"topology": "ddp", "processes": 2, "gpu": False}


@pytest.mark.parametrize(
    ("wanted", "launch"),
    [
        (WANTED, LAUNCH | {"topology": "fsdp2"}),
        (WANTED, LAUNCH | {"processes": 4}),
        (WANTED, LAUNCH | {"gpu": True}),
        (["precision=fp32", "train.steps=60"], LAUNCH),
        ([*WANTED, "model.attention=sdpa"], LAUNCH),
    ],
)
def test_a_run_of_another_launch_or_setting_has_another_folder(wanted: list[str], launch: dict[str, object]) -> None:
    assert name_of("fp32-on", WANTED, **LAUNCH) == name_of("fp32-on", list(WANTED), **LAUNCH)
    assert name_of("fp32-on", WANTED, **LAUNCH) != name_of("fp32-on", wanted, **launch)


def test_topologies_share_the_runs_in_one_process_in_the_order_that_they_have() -> None:
    alone = {"processes": 1, "gpu": False}
    ddp, fsdp2 = (name_of("fp32-on", WANTED, topology=each, **alone) for each in ("ddp", "fsdp2"))
    assert ddp == fsdp2 != name_of("fp32-on", WANTED, topology="ddp", backward_order=True, **alone)
