"""The benchmark of several GPUs trains a tiny model on CPUs, and explains the lost time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import scaling
from tests.conftest import ROOT
from tests.forked_commands import forking


@pytest.mark.nightly
@pytest.mark.multi
def test_the_lost_time_of_two_ranks_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)
    for key, value in (forking() | {"CUDA_VISIBLE_DEVICES": ""}).items():
        monkeypatch.setenv(key, value)
    out = tmp_path / "scaling.json"
    command = ["scaling", "--gpus", "2", "--tiny", "--steps", "5", "--out", str(out)]
    # The result file names runs by their settings.
    small = ("model.config.num_hidden_layers=1", "batch.tokens=512")
    command += small
    command += ["--parts", "topologies", "--topologies", "one", "fsdp2", "hsdp"]
    monkeypatch.setattr(sys, "argv", command)
    scaling.main()
    output = capsys.readouterr().out
    assert "hsdp: skipped, because 2 replicas of one GPU are DDP" in output
    result = json.loads(out.read_text())
    runs = {name: result["runs"][", ".join([name, *small])] for name in ("one", "fsdp2")}
    for ranks, run in enumerate(runs.values(), start=1):
        explanation = run["explanation"]
        assert len(run["losses"]) == 5 and explanation["step_ms"] == run["traced_step_ms"]
        by_rank = explanation["by_rank_ms"]
        for times in zip(*by_rank.values(), strict=True):
            assert sum(times) == pytest.approx(run["traced_step_ms"], abs=0.01)
        assert len(by_rank["gemm"]) == ranks and min(by_rank["gemm"]) > 0
        assert (explanation["collectives"] > 0) == (ranks > 1)
    # Both ranks together have the GEMMs of one process.
    assert runs["fsdp2"]["explanation"]["gemms_slowed_ms"] is not None

    # The kept traces explain the runs again, without training.
    expected = json.loads(out.read_text())
    for run in result["runs"].values():
        del run["explanation"]
    out.write_text(json.dumps(result))
    monkeypatch.setattr(sys, "argv", [*command, "--explain"])
    scaling.main()
    assert json.loads(out.read_text()) == expected
    assert capsys.readouterr().out == output[output.index("| run") :]
