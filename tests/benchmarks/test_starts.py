"""The benchmark of starts measures real trainings of a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import starts
from foundation.errors import InputError
from tests.conftest import ROOT
from tests.forked_commands import forking


@pytest.mark.nightly
def test_starts_and_the_cost_of_checks_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)
    for key, value in forking().items():
        monkeypatch.setenv(key, value)
    out = tmp_path / "starts.json"
    command = ["starts", "--tiny", "--steps", "5", "--out", str(out)]
    command += ["model.config.num_hidden_layers=1", "parity=off"]
    monkeypatch.setattr(sys, "argv", [*command, "--starts", "1"])
    starts.main()
    monkeypatch.setattr(sys, "argv", [*command, "--starts", "0", "--microbatches", "2"])
    starts.main()
    result = json.loads(out.read_text())
    assert len(result["earlier_commands"]) == 1
    later = result["later_start"]
    assert 0 < later["first_step"] <= later["full_speed"] <= later["last_line"] <= later["end"]
    assert len(result["checks_by_microbatches"]["2"]["beyond_usual"]) == 2
    assert "2 microbatches: a step takes" in capsys.readouterr().out


def test_a_training_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = [sys.executable, "-c", "print('first'); print(); raise SystemExit(3)"]
    (line, at), (status, end) = starts.timed_lines(command, {}, timeout=60)
    assert (line, status) == ("first\n", "3") and 0 < at <= end
    monkeypatch.setattr(
        sys, "argv", ["starts", "--tiny", "--out", str(tmp_path / "x.json"), "weights=no"]
    )
    with pytest.raises(InputError, match="weights"):
        starts.main()
