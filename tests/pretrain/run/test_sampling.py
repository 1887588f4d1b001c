"""`sample` names the folder that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.errors import InputError
from pretrain.run.sampling import load


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of two finished runs and an unfinished one, in the present folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("my-bf16-fp32/final", "my-fp32-fp32/final", "other-fp32-fp32/checkpoints"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    return Path("runs")


@pytest.mark.parametrize("given", ["runs/nowhere", "my.yaml", "runs/other-fp32-fp32", "runs"])
def test_sample_suggests_an_export_of_an_unfinished_run(given: str, runs: Path) -> None:
    with pytest.raises(InputError, match=r"choose a finished run, or .* export RUN_OR_CHECKPOINT"):
        load(Path(given))


def test_sample_names_the_folder_that_needs_a_tokenizer(runs: Path) -> None:
    (runs / "my-fp32-fp32/final/config.json").write_text("{}")
    with pytest.raises(InputError) as error:
        load(runs / "my-fp32-fp32")
    assert "the model has no tokenizer" in str(error.value)
    assert "runs/my-fp32-fp32/final: " in str(error.value)
