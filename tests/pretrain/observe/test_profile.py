"""`--profile` leaves a table and a trace of one step, and is refused where that step never comes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any


def test_the_launcher_profiles_its_fifth_step(
    train_here: Callable, small_recipe: dict[str, Any]
) -> None:
    run = train_here("--profile", "train.steps=6", "parity=off", recipe=small_recipe)
    assert run.status == 0, run.output
    assert "aten::mm" in (run.run_dir / "profile.md").read_text() and "profile.md" in run.output
    with gzip.open(run.run_dir / "profile.json.gz") as file:
        assert json.load(file)["traceEvents"]


def test_a_run_that_ends_before_that_step_is_refused(
    train_here: Callable, small_recipe: dict[str, Any]
) -> None:
    run = train_here("--profile", "train.steps=4", recipe=small_recipe)
    assert run.status == 2 and "--profile" in run.err and "step 5" in run.err
