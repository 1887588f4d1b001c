"""The benchmarks of several GPUs and of starts measure trainings of a tiny model on CPUs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import scaling, starts
from foundation.errors import InputError
from tests.conftest import ROOT
from tests.forked_commands import forking


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that runs a benchmark with arguments."""
    monkeypatch.chdir(ROOT)
    for key, value in (forking() | {"CUDA_VISIBLE_DEVICES": ""}).items():
        monkeypatch.setenv(key, value)

    def run(main: Callable[[], None], *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
        main()

    return run


@pytest.mark.nightly
@pytest.mark.multi
def test_the_lost_time_of_two_ranks_is_explained(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scaling.json"
    command = ["--gpus", "2", "--tiny", "--steps", "5", "--out", str(out)]
    # The result file names runs by their settings.
    small = ("model.config.num_hidden_layers=1", "batch.tokens=512")
    command += small
    command += ["--parts", "topologies", "--topologies", "one", "fsdp2", "hsdp"]
    run(scaling.main, *command)
    output = capsys.readouterr().out
    assert "hsdp: skipped, because 2 replicas of one GPU are DDP" in output
    result = json.loads(out.read_text())
    runs = {name: result["runs"][", ".join([name, *small])] for name in ("one", "fsdp2")}
    for ranks, measured in enumerate(runs.values(), start=1):
        explanation = measured["explanation"]
        assert len(measured["losses"]) == 5 and explanation["step_ms"] == measured["traced_step_ms"]
        by_rank = explanation["by_rank_ms"]
        for times in zip(*by_rank.values(), strict=True):
            assert sum(times) == pytest.approx(measured["traced_step_ms"], abs=0.01)
        assert len(by_rank["gemm"]) == ranks and min(by_rank["gemm"]) > 0
        assert (explanation["collectives"] > 0) == (ranks > 1)
    # Both ranks together have the GEMMs of one process.
    assert runs["fsdp2"]["explanation"]["gemms_slowed_ms"] is not None

    # The kept traces explain the runs again, without training.
    expected = json.loads(out.read_text())
    for measured in result["runs"].values():
        del measured["explanation"]
    out.write_text(json.dumps(result))
    run(scaling.main, *command, "--explain")
    assert json.loads(out.read_text()) == expected
    assert capsys.readouterr().out == output[output.index("| run") :]


@pytest.mark.nightly
def test_starts_and_the_cost_of_checks_are_measured(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "starts.json"
    command = ["--tiny", "--steps", "5", "--out", str(out)]
    command += ["model.config.num_hidden_layers=1", "parity=off"]
    run(starts.main, *command, "--starts", "1")
    run(starts.main, *command, "--starts", "0", "--microbatches", "2")
    result = json.loads(out.read_text())
    assert len(result["earlier_commands"]) == 1
    later = result["later_start"]
    assert 0 < later["first_step"] <= later["full_speed"] <= later["last_line"] <= later["end"]
    assert len(result["checks_by_microbatches"]["2"]["beyond_usual"]) == 2
    assert "2 microbatches: a step takes" in capsys.readouterr().out


def test_a_training_that_fails_is_reported(run: Callable[..., None], tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('first'); print(); raise SystemExit(3)"]
    (line, at), (status, end) = starts.timed_lines(command, {}, timeout=60)
    assert (line, status) == ("first\n", "3") and 0 < at <= end
    with pytest.raises(InputError, match="weights"):
        run(starts.main, "--tiny", "--out", str(tmp_path / "x.json"), "weights=no")
