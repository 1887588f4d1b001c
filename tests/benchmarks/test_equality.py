"""What benchmarks/equality.py keeps of runs is taken for those runs alone."""

from __future__ import annotations

from benchmarks.equality import name_of

WANTED, LAUNCH = ["precision=fp32", "train.steps=50"], {"topology": "ddp", "processes": 2, "gpu": False}


def test_each_launch_and_setting_has_a_folder_and_topologies_share_runs_in_one_process() -> None:
    launches = [LAUNCH, LAUNCH | {"topology": "fsdp2"}, LAUNCH | {"processes": 4}, LAUNCH | {"gpu": True}]
    names = [name_of("fp32-on", WANTED, **launch) for launch in launches]
    names += [name_of("fp32-on", [*WANTED, "model.attention=sdpa"], **LAUNCH)]
    assert len(set(names)) == len(names) and names[0] == name_of("fp32-on", list(WANTED), **LAUNCH)
    ddp, fsdp2 = (name_of("fp32-on", WANTED, topology=each, processes=1, gpu=False) for each in ("ddp", "fsdp2"))
    assert ddp == fsdp2 != name_of("fp32-on", WANTED, topology="ddp", processes=1, gpu=False, backward_order=True)
