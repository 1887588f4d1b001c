"""What this machine can do at most: a model's matrix products, alone and one after another, and a copy on the device.

    python -m benchmarks.limits --recipe benchmarks/qwen3_1_7b.yaml

From the measured rates follows the floor of a training step: every matrix product that the step needs, at the rate that it has
by itself, and nothing else: no attention, no norm, no optimizer, no gap. No way can be faster, and how near a way comes says more
than a share of the data sheet's peak, which no product of any shape reaches. Products of one input are stacked, as a fast layer
stacks them: q, k and v are one product, gate and up another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foundation.errors import InputError
from foundation.units import TERA
from pretrain.metrics.flops import ModelFlops
from pretrain.model.huggingface import build_on_meta, load_config
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

BF16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Product:
    """A linear of the model, or several that share their input; `count` of it in the model."""

    name: str
    inputs: int
    outputs: int
    count: int

    def sizes(self, tokens: int) -> dict[str, tuple[int, int, int]]:
        """(m, k, n) of its three products, each [m, k] times [k, n]: the output, and the gradients of input and weight."""
        return {
            "forward": (tokens, self.inputs, self.outputs),
            "dgrad": (tokens, self.outputs, self.inputs),
            "wgrad": (self.outputs, tokens, self.inputs),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, required=True)
    arguments = parser.parse_args()
    print(json.dumps({"status": "ok", **measure(load_recipe(arguments.recipe))}))


def measure(recipe: Recipe) -> dict[str, Any]:
    """Rates of every product by precision, TFLOP/s; floors of a step, seconds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = recipe.data.length * (
        1 if recipe.batch.microbatch_is_searched else recipe.batch.microbatch
    )
    flops = ModelFlops.of(build_on_meta(load_config(recipe.model)))
    products = stacked_products(flops)
    seconds = {
        p: {product.name: timed(product, tokens, p, device) for product in products}
        for p in precisions(device)
    }
    return {
        "tokens": tokens,
        "tflops": {
            precision: {
                product.name: {
                    which: 2 * m * k * n / seconds[precision][product.name][which] / TERA
                    for which, (m, k, n) in product.sizes(tokens).items()
                }
                for product in products
            }
            for precision in seconds
        },
        "floors": floors(products, seconds, recipe.batch.tokens / tokens),
    }


def stacked_products(flops: ModelFlops) -> list[Product]:
    """The products of a decoder of dense layers, as Llama, Qwen and GPT-2 have. InputError for a model of another build."""
    shape = flops.shape
    products = [
        Product(
            "qkv",
            shape.hidden,
            shape.query_width + 2 * shape.kv_heads * shape.head_dim,
            shape.layers,
        ),
        Product("o", shape.query_width, shape.hidden, shape.layers),
        Product(
            "gate+up" if flops.gated else "up",
            shape.hidden,
            (1 + flops.gated) * shape.feed_forward,
            shape.layers,
        ),
        Product("down", shape.feed_forward, shape.hidden, shape.layers),
        Product("head", shape.hidden, shape.vocabulary, 1),
    ]
    if sum(6 * p.inputs * p.outputs * p.count for p in products) != flops.per_token_matrix:
        raise InputError(
            "`model`: limits are known for decoders of dense layers (Llama, Qwen, Mistral, GPT-2), and this is none"
        )
    return products


def floors(
    products: Sequence[Product],
    seconds: dict[str, dict[str, dict[str, float]]],
    microbatches: float,
) -> dict[str, float]:
    """Least seconds of a step of so many microbatches, by the precision of its products, as far as that was measured."""

    def total(of_linears: str, of_head: str) -> float:
        chosen = {
            p.name: seconds[of_head if p.name == "head" else of_linears][p.name] for p in products
        }
        return microbatches * sum(p.count * sum(chosen[p.name].values()) for p in products)

    named = {
        "fp32": ("fp32", "fp32"),
        "bf16": ("bf16", "bf16"),
        "fp8": ("fp8", "bf16"),
        "fp8+head": ("fp8", "fp8"),
    }
    return {name: total(*parts) for name, parts in named.items() if seconds.keys() >= set(parts)}


def precisions(device: torch.device) -> tuple[str, ...]:
    """What can be measured: FP32 on a CPU; BF16 on a GPU, and FP8 where its tensor cores have it."""
    if device.type == "cpu":
        return ("fp32",)
    return ("bf16", "fp8") if torch.cuda.get_device_capability() >= (8, 9) else ("bf16",)


def timed(product: Product, tokens: int, precision: str, device: torch.device) -> dict[str, float]:
    """Median seconds of each of the three products."""
    run = fp8_product if precision == "fp8" else plain_product
    dtype = FP32 if precision == "fp32" else BF16
    return {
        which: median_seconds(run(which, *sizes, dtype, device), device)
        for which, sizes in product.sizes(tokens).items()
    }


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a run: by CUDA events over caches that are cleared in between on a GPU, by the clock on a CPU."""
    if device.type == "cuda":
        from triton.testing import do_bench  # only here: a CPU has no Triton

        return do_bench(run, return_mode="median") / 1e3
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def plain_product(
    which: str, m: int, k: int, n: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """torch.mm of operands that lie in memory as they do in training: weights [out, in], activations [tokens, features]."""
    a = (
        torch.randn(k, m, dtype=dtype, device=device).t()
        if which == "wgrad"
        else torch.randn(m, k, dtype=dtype, device=device)
    )
    b = (
        torch.randn(n, k, dtype=dtype, device=device).t()
        if which == "forward"
        else torch.randn(k, n, dtype=dtype, device=device)
    )
    return lambda: torch.mm(a, b)


def fp8_product(
    which: str, m: int, k: int, n: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """torch._scaled_mm with a scale a tensor, output in `dtype`: E4M3 forward, gradients in E5M2, fast accumulation.

    FP8 tensor cores before Blackwell take both operands with the summed dimension innermost; the transposes that training needs
    for that are work of its own, not the product's.
    """
    a = torch.randn(m, k, dtype=dtype, device=device).to(E4M3 if which == "forward" else E5M2)
    b = torch.randn(n, k, dtype=dtype, device=device).to(E4M3).t()
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        a, b, scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=True
    )


if __name__ == "__main__":
    main()
