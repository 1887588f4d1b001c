"""`--profile` writes a table and a trace of step 5 and needs a run that reaches it."""

from __future__ import annotations

import gzip
import json


def test_profile_writes_a_table_and_a_trace(train_here, small_recipe):
    run = train_here("--profile", "train.steps=6", "parity=off", recipe=small_recipe)
    assert run.status == 0, run.output
    assert "aten::mm" in (run.run_dir / "profile.md").read_text() and "profile.md" in run.output
    with gzip.open(run.run_dir / "profile.json.gz") as file:
        assert json.load(file)["traceEvents"]


def test_profile_rejects_a_run_of_four_steps(train_here, small_recipe):
    run = train_here("--profile", "train.steps=4", recipe=small_recipe)
    assert run.status == 2 and "--profile" in run.err and "step 5" in run.err
