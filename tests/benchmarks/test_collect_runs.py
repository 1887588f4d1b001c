"""What is kept of runs, read again as runs; of one machine alone, as a file has one environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.collect_runs import main
from pretrain.compare.comparison import RunComparison
from pretrain.compare.kept_runs import read_kept
from pretrain.compare.page import audits
from pretrain.metrics.run_record import read_run
from tests.pretrain.compare.made_runs import make_run


def test_runs_are_kept_with_their_losses_and_those_of_two_machines_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    audit = {"precision": "bf16", "effective": "bf16", "backend": "torch", "computed_by": "torch"}
    paths = [make_run(tmp_path / name, losses, audit=audit) for name, losses in (("a", (4.0, 3.0)), ("b", (4.0, 2.5)))]
    kept, past = tmp_path / "kept.json", {"changed": [{"step": 1, "was": {"seed": 7}}], "begin_with": None}
    for path, own in zip(paths, (past, {}), strict=True):
        (path / "environment.json").write_text(json.dumps({"data_fingerprint": "ab12", "past": own}))
    monkeypatch.setattr(sys, "argv", ["collect_runs", *map(str, paths), "--out", str(kept)])
    main()
    again, runs = read_kept(kept), [read_run(path) for path in paths]
    assert [run.name for run in again] == ["a", "b"] and [run.data_fingerprint for run in again] == ["ab12"] * 2
    assert [run.curve("loss")[1].tolist() for run in again] == [run.curve("loss")[1].tolist() for run in runs]
    assert [len(run.past.changed) for run in again] == [1, 0]
    kept.unlink()
    namesake = make_run(tmp_path / "other" / "a", (4.0, 3.0), audit=audit)
    monkeypatch.setattr(sys, "argv", ["collect_runs", str(paths[0]), str(namesake), "--out", str(kept)])
    with pytest.raises(SystemExit):
        main()
    assert "two runs are called a" in capsys.readouterr().err and not kept.exists()
    monkeypatch.setattr(sys, "argv", ["collect_runs", *map(str, paths), "--out", str(kept)])
    (paths[1] / "environment.json").write_text(json.dumps({"data_fingerprint": "ab12", "gpus": ["NVIDIA B200"]}))
    with pytest.raises(SystemExit):
        main()
    said = " ".join(capsys.readouterr().err.split())
    assert "1 × NVIDIA B200: b" in said and "collect those of each machine" in said and not kept.exists()


def test_the_audit_of_every_phase_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    low = {"precision": "nvfp4", "effective": "delayed", "backend": "emulation", "computed_by": "emulated"}
    high = {"precision": "bf16", "effective": "bf16", "backend": "torch", "computed_by": "torch"}
    course = {"schedule": "delayed to step 1, then bf16", "phases": {"1": "delayed", "2": "bf16"}}
    audit = high | course | {"precisions": {"delayed": low | {"products": []}, "bf16": high}}
    schedule = "precision=[{until: 0.5, use: nvfp4}, {use: bf16}]"
    path, kept = make_run(tmp_path / "a", (4.0, 3.0), schedule, audit=audit), tmp_path / "kept.json"
    monkeypatch.setattr(sys, "argv", ["collect_runs", str(path), "--out", str(kept)])
    main()
    titles = [title for title, _ in audits(RunComparison.over(read_kept(kept)).baseline)]
    assert titles == ["a, from step 1: delayed, nvfp4 asked for · emulated", "a, from step 2: bf16 · torch"]
