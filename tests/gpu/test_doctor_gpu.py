"""Test the precisions of this GPU, the bits of Transformer Engine's operands, and `doctor`."""

from __future__ import annotations

import pytest
import torch

from benchmarks import operand_bits
from pretrain import __main__ as commands
from pretrain.precision.settings import PRECISIONS
from pretrain.precision.transformer_engine import unavailable_because
from tests.gpu.conftest import needs

AVAILABLE = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


@pytest.mark.parametrize("name", AVAILABLE)
def test_a_precision_is_available_if_transformer_engine_supports_it(name: str) -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    capability = torch.cuda.get_device_capability()
    # Transformer Engine accepts GPUs on which it does not train.
    trains = capability < (11, 0) or name not in ("mxfp8", "nvfp4")
    available = trains and getattr(te, AVAILABLE[name])()
    assert (PRECISIONS[name].hardware.missing(capability) is None) == available


@pytest.mark.parametrize("name", AVAILABLE)
def test_the_librarys_operands_equal_ours_bit_for_bit(name: str) -> None:
    """Covers each operand along each axis over which a GEMM sums, rounded to nearest.

    Stochastically rounded operands cannot be compared.
    """
    operands = operand_bits.compare(needs(name))
    assert len(operands) >= 3
    assert [operand for operand in operands if not operand_bits.equal(operand)] == []


def test_doctor_prints_engines_of_this_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    precisions = [
        "bf16",
        "mxfp4",
        *(name for name in ("current", "mxfp8") if not unavailable_because(PRECISIONS[name])),
    ]
    assert commands.main(["doctor", "--precisions", ",".join(precisions)]) == 0
    output = capsys.readouterr().out
    assert all(f"\n{name}: " in output for name in precisions)
    assert "Traceback" not in output
    assert "\nmxfp4: emulation; it needs" in output
