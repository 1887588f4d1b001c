"""`python -m pretrain doctor` on a machine without a GPU: its table."""

from __future__ import annotations

import pytest

from pretrain import __main__ as commands


def cells_of(table: str, precision: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {precision} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_precision_asked_for_has_a_row_with_its_speed_and_what_the_device_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["doctor", "--cpu", "--precisions", "bf16,nvfp4"]) == 0
    table = capsys.readouterr().out
    bf16, nvfp4 = cells_of(table, "bf16"), cells_of(table, "nvfp4")
    assert bf16[1] == "torch" and nvfp4[1] == "emulation"
    assert bf16[-1] == "" and "compute capability 10.0" in nvfp4[-1]
    assert all(float(row[2]) > 0 and int(row[3].replace(",", "")) > 0 for row in (bf16, nvfp4))
