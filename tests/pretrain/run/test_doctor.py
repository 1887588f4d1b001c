"""`python -m pretrain doctor` on a machine without a GPU prints a table."""

from __future__ import annotations

import pytest

from pretrain import __main__ as commands
from tests.pretrain.compare.made_runs import rows_of


@pytest.mark.long
def test_a_precision_has_a_row_with_speed_and_obstacle(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The trial is forked from a server that has imported the modules, as a user's is."""
    assert commands.main(["doctor", "--precisions", "nvfp4"]) == 0
    (row,) = rows_of(capsys.readouterr().out)["nvfp4"]
    assert row[0] == "emulation" and "compute capability 10.0" in row[-1]
    assert float(row[1]) > 0 and int(row[2].replace(",", "")) > 0
