"""Runs whose precision is a schedule, beside others: a precision of its own, by its label."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.errors import InputError
from pretrain.compare.appearance import colour_of, looks_of
from pretrain.compare.fairness import Variants
from pretrain.compare.report import grid_tables
from pretrain.plan.targets import MeasuredRun
from tests.pretrain.compare.made_runs import trained

SCHEDULE = "precision=[{until: 0.75, use: delayed}, {use: bf16}]"
LABEL = "delayed to 75 %, then bf16"


def test_a_schedule_is_a_precision_of_its_own_in_tables_and_pictures(tmp_path: Path) -> None:
    found = {"schedule": LABEL, "effective": "bf16", "backend": "torch"}
    found["precisions"] = {"delayed": {"backend": "emulation"}, "bf16": {"backend": "torch"}}
    runs = [
        trained(tmp_path / "bf16"),
        trained(tmp_path / "delayed", (4.0, 3.1, 2.6, 2.3), "precision=delayed", audit={"backend": "emulation"}),
        trained(tmp_path / "both", (4.0, 3.1, 2.6, 2.25), SCHEDULE, audit=found),
        trained(tmp_path / "wider", (4.0, 3.1, 2.6, 2.26), SCHEDULE, "fp8_config.scope=linear+head", audit=found),
    ]
    assert [run.precision for run in runs] == ["bf16", "delayed", LABEL, LABEL]
    assert [run.emulated for run in runs] == [False, True, True, True]
    assert [Variants.is_quantized(run) for run in runs] == [False, True, True, True]
    assert Variants(runs).names == ["scope linear", "scope linear+head"]
    assert LABEL in grid_tables(runs)[0].splitlines()[0] and colour_of(LABEL) == colour_of("delayed")
    assert len({(look.colour, look.kind) for look in looks_of(runs)}) == 4
    fallen_back = trained(tmp_path / "fallen", (4.0, 3.0, 2.5, 2.2), SCHEDULE, audit={"effective": "bf16", "backend": "torch"})
    assert fallen_back.precision == f"{LABEL} (ran bf16)" and not fallen_back.emulated


def test_only_phases_that_steps_were_in_say_what_a_run_computed_in(tmp_path: Path) -> None:
    found = {"schedule": "bf16", "phases": {"3": "bf16"}, "backend": "torch"}
    found["precisions"] = {"delayed": {"backend": "emulation"}, "bf16": {"backend": "torch"}}
    branch = trained(tmp_path / "branch", (4.0, 3.1, 2.6, 2.25), SCHEDULE, audit=found)
    assert branch.precision == f"{LABEL} (ran bf16)" and branch.phases == {3: "bf16"} and not branch.emulated
    to_come = found | {"phases": {"1": "bf16", "5": "delayed"}, "backend": "emulation"}
    begun = trained(tmp_path / "begun", (4.0, 3.1, 2.6, 2.25), SCHEDULE, audit=to_come)
    assert begun.phases == {1: "bf16"} and begun.audited.keys() == {"bf16"} and begun.backend == "torch"


def test_the_speed_of_a_schedule_is_that_of_no_precision(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", (4.0, 3.0, 2.5, 2.2), SCHEDULE, audit={"schedule": LABEL, "backend": "torch"})
    with pytest.raises(InputError, match=f"its precision was {LABEL}, so its speed is that of several"):
        MeasuredRun.of(run)
