"""What emulating a precision costs on this GPU, against BF16: the linears of one Qwen3-1.7B layer, forward and backward.

    python -m benchmarks.emulation_speed --out benchmarks/results/h200_emulation_speed.json

A step has several microbatches, and only the first quantizes the weights, so both kinds are timed; the ratio is that of a step
of four. Attention, norms, the loss and the optimizer cost the same in both and are left out: a whole step's ratio is lower, and
`benchmarks.training_speed` measures it. Times are the device's, from the end of one pass to the end of the next.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.device_time import median_ms
from benchmarks.machine import measured_on, write
from pretrain.precision.emulation import EmulationBackend
from pretrain.precision.registry import PRECISIONS
from pretrain.precision.settings import ActivePrecision, LowPrecisionSettings
from pretrain.run.trial import QWEN3_1_7B

HIDDEN, INTERMEDIATE = QWEN3_1_7B["hidden_size"], QWEN3_1_7B["intermediate_size"]
KEY_VALUE = QWEN3_1_7B["num_key_value_heads"] * QWEN3_1_7B["head_dim"]
# name: (which input it takes, in_features, out_features). Linears that share an input keep it once for backward.
LINEARS = {
    "q_proj": ("normed", HIDDEN, HIDDEN),
    "k_proj": ("normed", HIDDEN, KEY_VALUE),
    "v_proj": ("normed", HIDDEN, KEY_VALUE),
    "o_proj": ("attended", HIDDEN, HIDDEN),
    "gate_proj": ("normed again", HIDDEN, INTERMEDIATE),
    "up_proj": ("normed again", HIDDEN, INTERMEDIATE),
    "down_proj": ("gated", INTERMEDIATE, HIDDEN),
}
MICROBATCHES = 4  # of a step
QUANTIZED = [name for name, recipe in PRECISIONS.items() if recipe.quantized]

Multiply = Callable[[str, Tensor, Tensor], Tensor]  # (name, x, weight) -> y


def main() -> None:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    layer = Layer(arguments.tokens)
    bf16 = measure_bf16(layer, arguments.steps)
    print("bf16: {ms:.2f} ms, {peak_gib:.1f} GiB".format(**bf16), flush=True)
    results = [bf16]
    for recipe in arguments.recipe or QUANTIZED:
        results.append(measure_emulated(layer, recipe, bf16["ms"], arguments.steps))
        print(
            "{name}: {ratio:.2f} x bf16 over a step; {first_microbatch_ms:.2f} ms in its first microbatch, {ms:.2f} ms in each "
            "other, {peak_gib:.1f} GiB, compiled in {first_pass_seconds:.0f} s".format(**results[-1]),
            flush=True,
        )
    report = {
        **measured_on(),
        "tokens": arguments.tokens,
        "microbatches": MICROBATCHES,
        "linears": {name: [in_features, out_features] for name, (_, in_features, out_features) in LINEARS.items()},
        "results": results,
    }
    write(arguments.out, report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", action="append", choices=QUANTIZED, help="of these only; all if left out")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a microbatch")
    parser.add_argument("--steps", type=int, default=20, help="timed passes; the median counts")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


class Layer:
    """Inputs, weights and gradients of the linears, BF16, random."""

    def __init__(self, tokens: int) -> None:
        torch.manual_seed(0)
        widths = {source: in_features for source, in_features, _ in LINEARS.values()}
        self.inputs = {source: _random(tokens, width).requires_grad_() for source, width in widths.items()}
        self.weights = {name: nn.Parameter(_random(outs, ins) / 32) for name, (_, ins, outs) in LINEARS.items()}
        self.gradients = {name: _random(tokens, outs) / 1024 for name, (_, _, outs) in LINEARS.items()}

    def forward_and_backward(self, multiply: Multiply, forward: Callable[[], AbstractContextManager[Any]]) -> None:
        with forward():
            outputs = {name: multiply(name, self.inputs[source], self.weights[name]) for name, (source, _, _) in LINEARS.items()}
        for tensor in (*self.inputs.values(), *self.weights.values()):
            tensor.grad = None
        torch.autograd.backward(list(outputs.values()), [self.gradients[name] for name in outputs])


def measure_bf16(layer: Layer, steps: int) -> dict[str, Any]:
    def multiply(name: str, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    return {"name": "bf16", **measure(lambda: layer.forward_and_backward(multiply, nullcontext), steps)}


def measure_emulated(layer: Layer, recipe: str, bf16_ms: float, steps: int) -> dict[str, Any]:
    settings = LowPrecisionSettings().resolved(recipe)
    backend = EmulationBackend(ActivePrecision(recipe, PRECISIONS[recipe], "emulation", settings), torch.device("cuda"))
    products = {name: backend.product(name, ins, outs, bias=False) for name, (_, ins, outs) in LINEARS.items()}

    def microbatch(first: bool) -> None:
        def multiply(name: str, x: Tensor, weight: Tensor) -> Tensor:
            return products[name](x, weight, None, first_microbatch=first)

        layer.forward_and_backward(multiply, backend.forward)

    began = time.perf_counter()
    microbatch(first=True)
    torch.cuda.synchronize()
    compiling = time.perf_counter() - began
    first, later = (measure(lambda kind=kind: microbatch(kind), steps) for kind in (True, False))
    step_ms = first["ms"] + (MICROBATCHES - 1) * later["ms"]
    return {
        "name": recipe,
        "first_microbatch_ms": first["ms"],
        **later,
        "ratio": step_ms / (MICROBATCHES * bf16_ms),
        "first_pass_seconds": compiling,
    }


def measure(microbatch: Callable[[], None], steps: int) -> dict[str, float]:
    """Median time of a pass, and the most memory that it takes beside inputs, weights and what was kept of earlier passes."""
    microbatch()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ms = median_ms(microbatch, steps)
    return {"ms": ms, "peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30}


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
