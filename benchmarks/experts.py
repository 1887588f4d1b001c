"""Measure the grouped GEMMs of a mixture of experts on a Hopper GPU.

    python -m benchmarks.experts --out experts.json

Compares BF16 with FP8. The sums of FP8 are accumulated in the tensor cores, or outside of them. For
each GEMM, the result has TFLOP/s and the error relative to the same codes multiplied in FP64. The
error of rounding the exact result to BF16 is listed too, as a lower bound. FP8 is E4M3 with
one scale per tensor, as in `delayed` and `current`. All experts get the same number of tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.limits import BF16, E4M3, median_seconds
from benchmarks.machine import measured_on
from foundation.command import run_command
from foundation.files import write_json
from foundation.units import TERA

# Number of experts, hidden size, and width of an expert.
EXPERTS = {"Qwen3-30B-A3B": (128, 2048, 768), "OLMoE-1B-7B": (64, 2048, 1024)}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="result file to write")
    out = parser.parse_args().out
    products = {}
    for name, (experts, hidden, width) in EXPERTS.items():
        # Tokens of a microbatch. Each token has eight experts.
        for tokens in (16_384, 32_768):
            rows = tokens * 8 // experts
            ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * rows
            for which, inputs, outputs in (
                ("gate and up", hidden, 2 * width),
                ("down", width, hidden),
            ):
                x, dy = (
                    torch.randn(experts * rows, size, device="cuda", dtype=BF16)
                    for size in (inputs, outputs)
                )
                w = torch.randn(experts, outputs, inputs, device="cuda", dtype=BF16)
                products[f"{name}, {tokens} tokens, {which}, forward"] = figures(x, w.mT, ends)
                gradient = figures(dy.t().contiguous(), x.t().contiguous().t(), ends)
                products[f"{name}, {tokens} tokens, {which}, wgrad"] = gradient
    write_json(out, {**measured_on(), "products": products})


def figures(a: Tensor, b: Tensor, ends: Tensor) -> dict[str, float]:
    """Return the speeds and errors of one grouped GEMM.

    The operands are a [rows, k] and b [experts, k, n] (forward), or a [m, rows] and b [rows, n]
    (wgrad). `ends` has the index after the last row of each expert.
    """
    experts = len(ends)
    by_rows = b.ndim == 2
    first = int(ends[0])
    qa, scale_a = codes(a)
    qb, scale_b = codes(b)
    scales_a = scale_a.expand(len(a) * (experts if by_rows else 1)).contiguous()
    scales_b = scale_b.expand(
        (experts * b.shape[1],) if by_rows else (experts, b.shape[2])
    ).contiguous()
    scaled = partial(
        torch._scaled_grouped_mm, qa, qb, scales_a, scales_b, offs=ends, out_dtype=BF16
    )
    if by_rows:
        left = qa[:, :first]
        right = qb[:first]
    else:
        left = qa[:first]
        right = qb[0]
    exact = left.double() @ right.double() * scale_a.double() * scale_b.double()

    def error(y: Tensor) -> float:
        return float((y.double() - exact).norm() / exact.norm())

    def tera(run: Callable[[], Tensor]) -> float:
        return 2 * a.numel() * b.shape[-1] / median_seconds(run, a.device) / TERA

    measured = {
        "bf16": tera(partial(torch._grouped_mm, a, b, offs=ends)),
        "rounding to bf16": error(exact.bfloat16()),
    }
    for name, fast in (("outside", False), ("in the tensor cores", True)):
        y = scaled(use_fast_accum=fast)
        measured[f"fp8, sums {name}"] = tera(partial(scaled, use_fast_accum=fast))
        measured[f"error, sums {name}"] = error(y[0] if by_rows else y[:first])
    return measured


def codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the E4M3 codes of x, in the memory layout of x, and the factor that restores x."""
    scale = x.abs().amax().float() / torch.finfo(E4M3).max
    return (x / scale).to(E4M3), scale


if __name__ == "__main__":
    sys.exit(run_command(main))
