"""The grouped products of a mixture's experts on a Hopper GPU: BF16, and FP8 with sums in the tensor cores or outside of them.

    python -m benchmarks.experts --out experts.json

Of each: TFLOP/s, and how far the result is from that of the same codes in FP64, over its norm. Rounding to BF16, which no result
escapes, stands beside it. FP8 is E4M3 with a scale a tensor, as in `delayed` and `current`; all experts get as many tokens.
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

# how many, hidden size, width
EXPERTS = {"Qwen3-30B-A3B": (128, 2048, 768), "OLMoE-1B-7B": (64, 2048, 1024)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    out, products = parser.parse_args().out, {}
    for name, (experts, hidden, width) in EXPERTS.items():
        for tokens in (16_384, 32_768):  # of a microbatch
            rows = tokens * 8 // experts  # a token takes eight of them
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
    """Of a [rows, k] times b [experts, k, n]; or [m, rows] times [rows, n], which is a product an expert."""
    experts, by_rows, first = len(ends), b.ndim == 2, int(ends[0])
    (qa, scale_a), (qb, scale_b) = codes(a), codes(b)
    scales_a = scale_a.expand(len(a) * (experts if by_rows else 1)).contiguous()
    scales_b = scale_b.expand(
        (experts * b.shape[1],) if by_rows else (experts, b.shape[2])
    ).contiguous()
    scaled = partial(
        torch._scaled_grouped_mm, qa, qb, scales_a, scales_b, offs=ends, out_dtype=BF16
    )
    left, right = (qa[:, :first], qb[:first]) if by_rows else (qa[:first], qb[0])
    exact = left.double() @ right.double() * scale_a.double() * scale_b.double()

    def error(y: Tensor) -> float:
        return float((y.double() - exact).norm() / exact.norm())

    def tera(run: Callable[[], Tensor]) -> float:
        return 2 * a.numel() * b.shape[-1] / median_seconds(run, a.device) / TERA

    found = {
        "bf16": tera(partial(torch._grouped_mm, a, b, offs=ends)),
        "rounding to bf16": error(exact.bfloat16()),
    }
    for name, fast in (("outside", False), ("in the tensor cores", True)):
        y = scaled(use_fast_accum=fast)
        found[f"fp8, sums {name}"] = tera(partial(scaled, use_fast_accum=fast))
        found[f"error, sums {name}"] = error(y[0] if by_rows else y[:first])
    return found


def codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes, laid out as x is, and what they are to be multiplied by."""
    scale = x.abs().amax().float() / torch.finfo(E4M3).max
    return (x / scale).to(E4M3), scale


if __name__ == "__main__":
    sys.exit(run_command(main))
