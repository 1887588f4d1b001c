"""The matrices of the measured losses have valid settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.experiments.matrix_file import load_matrix
from tests.conftest import ROOT

MATRICES = sorted((ROOT / "benchmarks" / "evidence" / "matrices").glob("*.yaml"))


@pytest.mark.parametrize("path", MATRICES, ids=lambda path: path.stem)
def test_a_matrix_of_the_evidence_has_valid_settings(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # The recipes in a matrix are relative to the repository.
    matrix = load_matrix(path)
    assert matrix.settings.name == path.stem
    optimizers = {cell.recipe.optimizer.name for cell in matrix.cells}
    assert optimizers == ({"adamw", "muon"} if "muon" in path.stem else {"adamw"})
