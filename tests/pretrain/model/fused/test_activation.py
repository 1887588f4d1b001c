"""SwiGLU's kernels and the stores of tiles through Triton's interpreter; what Transformer Engine is needed for runs on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


def test_the_kernels_interpreted_on_a_cpu_agree_with_the_formulas_and_our_quantizers() -> None:
    pytest.importorskip("triton", minversion="3.9", reason="earlier interpreters convert elsewhere")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/gpu/test_activation_kernel_gpu.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0 and "passed" in finished.stdout, finished.stdout + finished.stderr
