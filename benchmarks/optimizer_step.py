"""How long an optimizer step takes on this GPU, against the time that moving its bytes once would take.

    python -m benchmarks.optimizer_step --out benchmarks/results/h200_optimizer_step.json

The tensors are those of Qwen3-1.7B: 1,720,574,976 values in 310 tensors, most of them small. The floor is the bytes that an
update must read and write, at the bandwidth that copying 8 GiB on the same device has just shown. Steps are timed by the device,
from the end of one to the end of the next, so what the host cannot hide counts.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.device_time import median_ms
from benchmarks.limits import COPIED
from benchmarks.machine import measured_on, write
from pretrain.metrics.profile import copy_bandwidth
from pretrain.model.huggingface import build_on_meta, load_config
from pretrain.optimizer.adamw import ExactAdamW
from pretrain.optimizer.adamw_kernel import FusedUpdate
from pretrain.run.trial import QWEN3_1_7B
from pretrain.settings.recipe import ModelSettings

FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Variant:
    weights: str  # fp32, bf16, bf16_exact
    gradient: torch.dtype
    moments: torch.dtype
    ours: bool = True  # or torch's fused AdamW
    count: bool = True  # frozen updates
    block: int = 1024
    warps: int = 4

    @property
    def bytes_per_value(self) -> int:
        """Bytes that an update reads and writes: gradient read; weight, moments and remainder read and written."""
        stored = {"fp32": 4, "bf16": 2, "bf16_exact": 4}[self.weights] + 2 * self.moments.itemsize
        return self.gradient.itemsize + 2 * stored

    @property
    def name(self) -> str:
        kind = "ExactAdamW" if self.ours else "torch.optim.AdamW(fused=True)"
        counting = "" if self.count else ", not counting frozen updates"
        gradient, moments = (str(dtype).removeprefix("torch.") for dtype in (self.gradient, self.moments))
        launch = f", blocks of {self.block} in {self.warps} warps" if self.ours else ""
        return f"{kind}: weights {self.weights}, gradients {gradient}, moments {moments}{counting}{launch}"


VARIANTS = [
    Variant("bf16_exact", BF16, FP32),
    Variant("bf16_exact", BF16, FP32, count=False),
    Variant("bf16_exact", BF16, FP32, block=2048, warps=8),
    Variant("bf16_exact", BF16, FP32, block=512, warps=2),
    Variant("bf16_exact", BF16, FP32, block=512, warps=4),
    Variant("bf16_exact", FP32, FP32),
    Variant("bf16_exact", BF16, BF16),
    Variant("fp32", FP32, FP32),
    Variant("fp32", FP32, FP32, ours=False),
    Variant("bf16", BF16, BF16),
    Variant("bf16", BF16, BF16, count=False),
    Variant("bf16", BF16, BF16, ours=False),
]


def main() -> None:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    bandwidth = copy_bandwidth(torch.device("cuda"), COPIED)
    print(f"device copy: {bandwidth / 1e12:.2f} TB/s")
    results = []
    for variant in VARIANTS:
        results.append(measure(variant, bandwidth, arguments.steps))
        print("{name}: {step_ms:.2f} ms, floor {floor_ms:.2f} ms, ratio {ratio:.3f}".format(**results[-1]), flush=True)
    report = {
        **measured_on(),
        "copy_bytes_per_second": bandwidth,
        "values": sum(shape.numel() for shape in shapes()),
        "tensors": len(shapes()),
        "results": results,
    }
    write(arguments.out, report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="timed steps; the median counts")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def shapes() -> list[torch.Size]:
    """Return the shape of every parameter of Qwen3-1.7B, its head tied."""
    return [parameter.shape for parameter in build_on_meta(load_config(ModelSettings(config=QWEN3_1_7B))).parameters()]


def measure(variant: Variant, bandwidth: float, steps: int) -> dict[str, Any]:
    """Step time of one variant, its floor and the memory that it holds, gradients included."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    weight = FP32 if variant.weights == "fp32" else BF16
    parameters = [nn.Parameter(torch.empty(shape, device="cuda", dtype=weight).normal_(std=0.02)) for shape in shapes()]
    for parameter in parameters:
        parameter.grad_dtype = variant.gradient
        parameter.grad = torch.empty_like(parameter, dtype=variant.gradient).normal_(std=1e-3)
    coefficient = torch.full((), 0.5, device="cuda")
    if variant.ours:
        optimizer = ExactAdamW(parameters, lr=2e-5, exact=variant.weights == "bf16_exact", moments=variant.moments)
        optimizer._fused = FusedUpdate(variant.block, variant.warps, variant.count)
        step_ms = median_ms(lambda: optimizer.step(clip_coefficient=coefficient), steps)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=2e-5, fused=True)
        step_ms = median_ms(optimizer.step, steps)
    frozen, total = optimizer.frozen_counts().tolist() if variant.ours else (0, 1)
    floor_ms = sum(p.numel() for p in parameters) * variant.bytes_per_value / bandwidth * 1e3
    return {
        "name": variant.name,
        "step_ms": step_ms,
        "floor_ms": floor_ms,
        "ratio": step_ms / floor_ms,
        "bytes_per_value": variant.bytes_per_value,
        "memory_gib": (torch.cuda.memory_allocated() - before) / 2**30,
        "frozen_updates": frozen / total if variant.ours and variant.count else None,
    }


if __name__ == "__main__":
    main()
