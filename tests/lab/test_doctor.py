"""`python -m pretrain doctor` prints the engine of each precision."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import doctor
from pretrain import __main__ as commands


@pytest.mark.nightly
def test_a_precision_has_a_line_with_its_engine_and_obstacle(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The training is forked from a server that has imported the modules, as a user's is."""
    assert commands.main(["doctor", "--precisions", "nvfp4"]) == 0
    output = capsys.readouterr().out
    expected = "\nnvfp4: emulation; it needs a GPU of compute capability 10.0"
    assert expected in output


def test_a_failed_precision_has_a_line_and_the_end_of_its_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The attention heads are not divisible by the heads of keys and values."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(doctor.RECIPE.read_text().replace("key_value_heads: 2", "key_value_heads: 3"))
    monkeypatch.setattr(doctor, "RECIPE", recipe)
    assert commands.main(["doctor", "--precisions", "fp32"]) == 1
    output = capsys.readouterr().out
    assert "| error: " in output and "\nfp32: failed\n" in output
