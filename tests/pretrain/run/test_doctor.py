"""`python -m pretrain doctor` on a machine without a GPU: its table, and what fails while it looks."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

from foundation.errors import InputError
from pretrain import __main__ as commands
from pretrain.precision.emulation import EmulatedProduct
from pretrain.run import doctor
from pretrain.settings.recipe import ModelSettings

SOME = ["--cpu", "--tokens", "128"]
SETUP = doctor.LayerSetup(torch.device("cpu"), ModelSettings(config=doctor.SMALL), length=128, tokens=128)


def row_of(table: str, precision: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {precision} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_precision_asked_for_has_a_row_with_its_speed_and_what_the_device_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["doctor", *SOME, "--precisions", "bf16,nvfp4"]) == 0
    table = capsys.readouterr().out
    bf16, nvfp4 = row_of(table, "bf16"), row_of(table, "nvfp4")
    assert bf16[1] == "torch" and nvfp4[1] == "emulation"
    assert bf16[-1] == "" and "compute capability 10.0" in nvfp4[-1]
    assert all(float(row[2]) > 0 and int(row[3].replace(",", "")) > 0 for row in (bf16, nvfp4))
    assert float(bf16[4].rstrip("%")) < 3 < float(nvfp4[4].rstrip("%")) < 75


def test_a_product_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = EmulatedProduct.multiply
    monkeypatch.setattr(EmulatedProduct, "multiply", lambda *operands: -multiply(*operands))
    with pytest.raises(InputError, match="'current'"):
        doctor.try_precision(SETUP, "current", "emulation")


def test_a_precision_that_hangs_or_dies_is_a_row_and_emulation_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if command[-1] == "transformer_engine":
            raise subprocess.TimeoutExpired(command, 1)
        return subprocess.CompletedProcess(command, 139, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    row = doctor._row("mxfp8", None, [])
    assert row[1] == "nothing" and "transformer_engine fails: took longer" in row[-1] and "status 139" in row[-1]
