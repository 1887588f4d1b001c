"""Run the GPU tests of our Triton kernels on a CPU, under Triton's interpreter, in one process."""

from __future__ import annotations

import os
import re
import sys

import pytest

from tests.conftest import run_command

INTERPRETED = ["kernels", "attention", "triton_arithmetic", "exact_adamw"]


@pytest.mark.parametrize(
    "options",
    [
        # One small kernel in each commit.
        ["tests/gpu/test_kernels_gpu.py", "-k", "those_of_the_formula and experts"],
        pytest.param(
            [f"tests/gpu/test_{name}_gpu.py" for name in INTERPRETED], marks=pytest.mark.nightly
        ),
    ],
)
def test_the_gpu_kernels_interpreted_on_a_cpu_agree_with_the_references(options: list[str]) -> None:
    reason = (
        "earlier interpreters round an fma twice and convert in another function, and 3.6 has no "
        "range up to a tensor under NumPy 2.4"
    )
    pytest.importorskip("triton", minversion="3.9", reason=reason)
    command = [sys.executable, "-m", "pytest", "-v", "-x", "-p", "no:xdist", *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = run_command(command, env=environment, timeout=600)
    for file in options:
        if file.endswith(".py"):
            passed = rf"^{re.escape(file)}::.* PASSED"
            assert re.search(passed, finished.stdout, re.MULTILINE), finished.stdout
