"""On a GPU: Transformer Engine's operands beside ours, bit for bit, and the doctor's table."""

from __future__ import annotations

import pytest
import torch

from pretrain import __main__ as commands
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings
from pretrain.precision.transformer_engine import unavailable_because
from tests.gpu.operands import compare_operands

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
QUANTIZED = [name for name, precision in PRECISIONS.items() if precision.quantized]


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_librarys_operands_are_read_and_are_ours_bit_for_bit(name: str) -> None:
    if missing := unavailable_because(PRECISIONS[name]):
        pytest.skip(f"{name} needs {missing}")
    active = ActivePrecision(name, PRECISIONS[name], "transformer_engine", LowPrecisionSettings().resolved(name))
    differences = dict(compare_operands(active, torch.device("cuda")))
    assert len(differences) >= 3 and {name: each for name, each in differences.items() if each} == {}


def test_the_doctor_makes_its_table_on_this_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    precisions = ["bf16", "mxfp4", *(name for name in ("current", "mxfp8") if not unavailable_because(PRECISIONS[name]))]
    assert commands.main(["doctor", "--precisions", ",".join(precisions)]) == 0
    table = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{table}")
    assert all(f"| {name} " in table for name in precisions) and "Traceback" not in table
    assert "| emulation " in table, "mxfp4 is tried, not timed"
