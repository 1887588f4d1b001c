"""Where tests of Triton's kernels run: on a GPU, or on a CPU under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
GPU_OR_INTERPRETER = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device or TRITON_INTERPRET=1"),
]
cuda_only = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
