"""`python -m pretrain doctor` prints the engine of each precision."""

from __future__ import annotations

import pytest

from lab import doctor
from pretrain import __main__ as commands


@pytest.mark.long
def test_a_precision_has_a_line_with_its_engine_and_obstacle(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The trial is forked from a server that has imported the modules, as a user's is."""
    assert commands.main(["doctor", "--precisions", "nvfp4"]) == 0
    output = capsys.readouterr().out
    expected = "\nnvfp4: emulation; it needs a GPU of compute capability 10.0"
    assert expected in output


def test_a_failed_trial_has_a_line_with_its_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "STEPS", 0)
    assert commands.main(["doctor", "--precisions", "fp32"]) == 1
    assert "\nfp32: failed: error: " in capsys.readouterr().out
