"""What is kept of runs, read again as runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.collect_runs import main
from pretrain.compare.page import audit_of
from pretrain.compare.report import read_kept
from pretrain.metrics.run_record import read_run
from tests.pretrain.compare.made_runs import make_run


def test_runs_are_kept_with_their_losses_settings_and_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    paths = [make_run(tmp_path / name, losses) for name, losses in (("a", (4.0, None, 3.0)), ("b", (4.0, 2.5)))]
    kept, past = tmp_path / "kept.json", {"changed": [{"step": 1, "was": {"seed": 7}}]}
    (paths[0] / "environment.json").write_text(json.dumps({"data_fingerprint": "ab12", "past": past}))
    monkeypatch.setattr(sys, "argv", ["collect_runs", *map(str, paths), "--out", str(kept)])
    main()
    again, runs = read_kept(kept), [read_run(path) for path in paths]
    assert [run.name for run in again] == ["a", "b"] and [len(run.past.changed) for run in again] == [1, 0]
    for one, other in zip(again, runs, strict=True):
        assert str(one.curve("loss")) == str(other.curve("loss")) and str(one.held_out_curve()) == str(other.held_out_curve())
        assert (one.config, one.environment, one.summary) == (other.config, other.environment, other.summary)
    namesake = make_run(tmp_path / "other" / "a", (4.0, 3.0))
    monkeypatch.setattr(sys, "argv", ["collect_runs", str(paths[0]), str(namesake), "--out", str(tmp_path / "new.json")])
    with pytest.raises(SystemExit):
        main()
    assert "two runs are called alike" in capsys.readouterr().err and not (tmp_path / "new.json").exists()


def test_the_audit_of_every_phase_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    low = {"precision": "nvfp4", "effective": "delayed", "backend": "emulation", "computed_by": "emulated"}
    high = {"precision": "bf16", "effective": "bf16", "backend": "torch", "computed_by": "torch"}
    course = {"schedule": "delayed to step 1, then bf16", "phases": {"1": "delayed", "2": "bf16"}}
    audit = high | course | {"precisions": {"delayed": low | {"products": [{"effective": "delayed"}]}, "bf16": high}}
    schedule = "precision=[{until: 0.5, use: nvfp4}, {use: bf16}]"
    path, kept = make_run(tmp_path / "a", (4.0, 3.0), schedule, audit=audit), tmp_path / "kept.json"
    monkeypatch.setattr(sys, "argv", ["collect_runs", str(path), "--out", str(kept)])
    main()
    [run] = read_kept(kept)
    assert [line.partition(":")[0] for line in audit_of(run)] == ["delayed by emulated", "bf16 by torch"]
