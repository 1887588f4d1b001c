"""Compile every Triton kernel of this project for a B200, and interpret kernels on a CPU.

Triton's interpreter checks the numbers of a kernel. A kernel that the interpreter accepts may still
fail to compile, need more shared memory than a GPU has, or spill to local memory. The compiler and
the assembler come with Triton. Only the driver is a stand-in: it reports the GPU and takes the
compiled code.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from packing.arrow import IGNORE
from pretrain.model.fused.formulas import HeadNorms, Heads
from pretrain.model.loss.logit_change import LogitChange
from pretrain.optimizer.adamw import Hyperparameters, ParameterTensors
from tests.conftest import run_command

reason = "earlier versions use other methods of the driver, and round an fma twice if interpreted"
triton = pytest.importorskip("triton", minversion="3.9", reason=reason)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled"
    ),
]

from triton.runtime import driver  # noqa: E402

# The compute capability times 10. tests/gpu cover an H200.
B200 = 100
# Largest number of bytes of shared memory of a program.
SHARED_MEMORY = 227 * 1024
TOKENS = 256
# Sizes of Qwen3-1.7B.
HIDDEN = 2048
WIDTH = 6144
VOCABULARY = 151_936
BF16 = torch.bfloat16
FP32 = torch.float32
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


class NoGPU:
    """Triton driver for a B200 that does not exist.

    `spilled` has the largest number of bytes of local memory per thread of each compiled kernel.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spilled: dict[str, int] = {}
        self.utils = self
        self.tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", B200, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY}

    def load_binary(
        self, name: str, code: bytes, shared: int, device: int
    ) -> tuple[None, None, int, int, int]:
        file = self.folder / f"{name}.cubin"
        file.write_bytes(code)
        usage = run_command([self.tools / "cuobjdump", "-res-usage", file]).stdout
        registers, stack, local = (
            int(re.search(rf"{resource}:(\d+)", usage)[1]) for resource in ("REG", "STACK", "LOCAL")
        )
        self.spilled[name] = max(self.spilled.get(name, 0), stack + local)
        return None, None, registers, stack + local, 1024

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *arguments: None


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=BF16)


def by_tensor(rows: int, columns: int, fp8: torch.dtype) -> Iterator[Any]:
    """Return outputs with one scale per tensor, for delayed and for current scaling."""
    from pretrain.model.fused.fp8_tile import TensorScaled

    one = torch.ones(1)
    codes = (
        torch.zeros(rows, columns, dtype=torch.uint8),
        torch.zeros(columns, rows, dtype=torch.uint8),
    )
    yield TensorScaled(fp8, *codes, one, scale=one, amax=one)
    yield TensorScaled(fp8, *codes, one, amax=one, applied_scale=one)


def activation(kernel: Any) -> None:
    gradient = bf16(TOKENS, WIDTH)
    for gated in (True, False):
        columns = 2 * WIDTH if gated else WIDTH
        hidden = bf16(TOKENS, columns)
        kernel.activate(hidden, gated=gated)
        for summed in (False, True):
            kernel.activate_backward(gradient, hidden, gated=gated, summed=summed)
        for activated, d_hidden in zip(
            by_tensor(TOKENS, WIDTH, E4M3), by_tensor(TOKENS, columns, E5M2), strict=True
        ):
            kernel.write_activated(hidden, activated, gated=gated)
            recomputed = replace(
                activated, scale=torch.ones(1), amax=None, applied_scale=None, rows=None
            )
            for summed in (False, True):
                kernel.write_activate_backward(
                    gradient, hidden, d_hidden, recomputed, gated=gated, summed=summed
                )


def norm(kernel: Any) -> None:
    for width in (768, 1000, 1024, HIDDEN, 5120):
        x = bf16(TOKENS, width)
        weight = bf16(width)
        for bias in (None, weight):
            _, rstd, mean = kernel.norm(x, weight, bias, 1e-6)
            for summed in (False, True):
                kernel.norm_backward(x, x, rstd, mean, weight, x, summed=summed)


def attention(kernel: Any) -> None:
    bounds = torch.zeros(2, TOKENS, dtype=torch.int32)
    for heads in (Heads(16, 8, 128), Heads(12, 12, 64), Heads(14, 2, 64)):
        q, k, v = (bf16(TOKENS, n, heads.dim) for n in (heads.query, heads.kv, heads.kv))
        output, log_sums = kernel.attend(q, k, v, bounds, 1.0)
        kernel.attend_backward(q, q, k, v, output, log_sums, bounds, 1.0)


def rotation(kernel: Any) -> None:
    for heads, normed in ((Heads(16, 8, 128), True), (Heads(14, 2, 64), False)):
        qkv = bf16(TOKENS, heads.width)
        angles = bf16(TOKENS, heads.dim)
        group = heads.query // heads.kv
        norms = HeadNorms(bf16(heads.dim), bf16(heads.dim), 1e-6) if normed else None
        gradients = [
            bf16(TOKENS, heads.query, heads.dim),
            *(bf16(TOKENS, heads.kv, group, heads.dim) for _ in range(2)),
        ]
        inputs = (*gradients, qkv if normed else None, angles, angles, heads, norms)
        kernel.rotate(qkv, angles, angles, heads, norms)
        unrotated = (*gradients, None, None, None, heads, None)
        for arguments, summed in ((inputs, False), (inputs, True), (unrotated, True)):
            kernel.rotate_backward(*arguments, summed=summed)
            written = next(by_tensor(TOKENS, heads.width, E5M2))
            kernel.rotate_backward(*arguments, written, summed=summed)


def loss(kernel: Any) -> None:
    labels = torch.zeros(64, dtype=torch.int64)
    logits = bf16(64, VOCABULARY)
    for scores in (logits, logits.float(), bf16(64, 50_257)):
        for with_gradient in (True, False):
            kernel.softmax_loss(scores, labels, IGNORE, with_gradient=with_gradient)
    changes = (LogitChange(), LogitChange(0.0625), LogitChange(cap=30.0))
    for scale, change in itertools.product((None, torch.ones(())), changes):
        kernel.softmax_loss(logits, labels, IGNORE, change=change, with_gradient=True)
        inputs = (logits, labels, IGNORE, E5M2, torch.zeros(1), scale, change)
        kernel.quantized_softmax_gradient(*inputs)


def update(kernel: Any) -> None:
    hyper = Hyperparameters(1e-3, 0.1, 0.9, 0.95, 1e-8, 1)
    for weight, moment in ((BF16, FP32), (BF16, BF16), (FP32, FP32)):
        remainder = torch.zeros(4096, dtype=torch.int16) if weight == BF16 else None
        moments = (torch.zeros(4096, dtype=moment) for _ in range(2))
        parameter = ParameterTensors(
            torch.zeros(4096, dtype=weight), remainder, torch.zeros(4096), *moments
        )
        kernel.prepare_update([(parameter, hyper)], None)()
        # Muon computes a direction from one moment. Its update has no moments.
        direction = parameter._replace(weight=bf16(4096), remainder=None, exp_avg_sq=None)
        kernel.prepare_update([(direction, hyper)], None)()
        parameter = parameter._replace(gradient=bf16(4096), exp_avg=None, exp_avg_sq=None)
        kernel.prepare_update([(parameter, hyper)], None)()


def experts(kernel: Any) -> None:
    rows = bf16(2 * TOKENS, HIDDEN)
    weights = torch.zeros(TOKENS, 2)
    place = torch.zeros(2 * TOKENS, dtype=torch.int64)
    kernel.combine(rows, place, weights, TOKENS)
    kernel.combine(rows, place, None, TOKENS)
    kernel.combine_backward(bf16(TOKENS, HIDDEN), rows, place, weights)


def orthogonalization(kernel: Any) -> None:
    # Torch multiplies FP16 matrices slowly on a CPU.
    tall = torch.zeros(1, 64, 256, dtype=torch.half)
    for matrices in (tall, tall.mT.contiguous().mT):
        kernel.newton_schulz(matrices, (3.0, 4.0, 5.0))


LAUNCHES = {
    "model.attention_kernel": attention,
    "model.experts_kernel": experts,
    "model.fused.activation_kernel": activation,
    "model.fused.norm_kernel": norm,
    "model.fused.rotary_kernel": rotation,
    "model.loss.softmax_kernel": loss,
    "optimizer.adamw_kernel": update,
    "optimizer.muon_kernel": orthogonalization,
}


def launched_in(file: Path) -> set[str]:
    """Return the names of the kernels in a file: the Triton functions that no other one calls."""
    functions = [
        node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    kernels = {
        function.name: function
        for function in functions
        if "triton.jit" in map(ast.unparse, function.decorator_list)
    }
    calls = [
        node
        for kernel in kernels.values()
        for node in ast.walk(kernel)
        if isinstance(node, ast.Call)
    ]
    return kernels.keys() - {ast.unparse(call.func) for call in calls}


@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_compile_for_a_gpu_that_is_not_there_and_none_spills(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_active", gpu := NoGPU(tmp_path))
    kernel = importlib.import_module(f"pretrain.{name}")
    # Triton refuses a kernel that needs more shared memory than the driver reports.
    LAUNCHES[name](kernel)
    assert set(gpu.spilled) == launched_in(Path(kernel.__file__))
    assert not any(gpu.spilled.values()), gpu.spilled


INTERPRETED = ["kernels", "kernel_table", "attention", "triton_arithmetic", "exact_adamw", "muon"]


@pytest.mark.parametrize(
    "options",
    [
        # One small kernel in each commit, and the sizes in the table of kernels.
        [
            "tests/gpu/test_kernels_gpu.py",
            "tests/gpu/test_kernel_table_gpu.py",
            "-k",
            "those_of_the_formula and experts and not 2048 or optimizer_reads",
        ],
        pytest.param(
            [f"tests/gpu/test_{name}_gpu.py" for name in INTERPRETED], marks=pytest.mark.nightly
        ),
    ],
)
def test_the_gpu_kernels_interpreted_on_a_cpu_agree_with_the_references(options: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-v", "-x", "-p", "no:xdist", *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = run_command(command, env=environment, timeout=600)
    for file in options:
        if file.endswith(".py"):
            passed = rf"^{re.escape(file)}::.* PASSED"
            assert re.search(passed, finished.stdout, re.MULTILINE), finished.stdout
