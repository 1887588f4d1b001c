"""Measure the limit of a machine for a model: the rate of each GEMM of the model.

    python -m benchmarks.speed.limits --recipe benchmarks/qwen3_1_7b.yaml

The measured rates give the minimum time of a training step: the time of all its GEMMs, each at its
measured rate. Attention, norms, the optimizer and idle time count as zero. No trainer can be
faster. The distance of a trainer from this minimum says more than its share of the peak in the data
sheet, which no GEMM reaches. GEMMs with the same input are stacked, as in a fast layer: q, k and v
are one GEMM, gate and up another. Layers that stay in BF16 by default, as in NVFP4, count as
quantized, so NVFP4's share of its limit is low. A precision whose GEMMs raise an error is recorded
with this error.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foundation.errors import InputError, one_line
from foundation.units import TERA
from pretrain.metrics.flops import ModelFlops
from pretrain.model.configuration import load_config
from pretrain.model.huggingface import build_on_meta
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

BF16 = torch.bfloat16
FP32 = torch.float32
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
# Size of a block and dtype of the scales of blocks, by precision.
BLOCK_SCALES = {"mxfp8": (32, torch.float8_e8m0fnu), "nvfp4": (16, E4M3)}


@dataclass(frozen=True)
class Product:
    """A linear of the model, or several linears with the same input, stacked to one GEMM.

    `count` is the number of times that this GEMM occurs in the model.
    """

    name: str
    inputs: int
    outputs: int
    count: int

    def sizes(self, tokens: int) -> dict[str, tuple[int, int, int]]:
        """Return the sizes (m, k, n) of each product [m, k] x [k, n], by the product's name."""
        return {
            "forward": (tokens, self.inputs, self.outputs),
            "dgrad": (tokens, self.outputs, self.inputs),
            "wgrad": (self.outputs, tokens, self.inputs),
        }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, required=True, help="recipe with the model")
    arguments = parser.parse_args()
    print(json.dumps({"status": "ok", **measure(load_recipe(arguments.recipe))}))


def measure(recipe: Recipe) -> dict[str, Any]:
    """Return the TFLOP/s of all products, and the minimum seconds of a step, by precision."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = recipe.data.length * (
        1 if recipe.batch.microbatch == "auto" else recipe.batch.microbatch
    )
    flops = ModelFlops.of(build_on_meta(load_config(recipe.model)))
    products = stacked_products(flops)
    seconds = {}
    failed = {}
    for precision in precisions(device):
        try:
            seconds[precision] = {
                product.name: timed(product, tokens, precision, device) for product in products
            }
        except RuntimeError as error:
            failed[precision] = one_line(error)
    return {
        "tokens": tokens,
        "failed": failed,
        "tflops": {
            precision: {
                product.name: {
                    gemm: 2 * m * k * n / seconds[precision][product.name][gemm] / TERA
                    for gemm, (m, k, n) in product.sizes(tokens).items()
                }
                for product in products
            }
            for precision in seconds
        },
        "floors": floors(products, seconds, recipe.batch.tokens / tokens),
    }


def stacked_products(flops: ModelFlops) -> list[Product]:
    """Return the products of a dense decoder such as Llama, Qwen and GPT-2.

    Raises InputError for other models.
    """
    shape = flops.shape
    # A gated MLP has three matrices instead of two.
    is_gated = flops.mlp_weights > 2.5 * shape.layers * shape.hidden * shape.feed_forward
    products = [
        Product(
            "qkv",
            shape.hidden,
            shape.query_width + 2 * shape.kv_heads * shape.head_dim,
            shape.layers,
        ),
        Product("o", shape.query_width, shape.hidden, shape.layers),
        Product(
            "gate+up" if is_gated else "up",
            shape.hidden,
            (1 + is_gated) * shape.feed_forward,
            shape.layers,
        ),
        Product("down", shape.feed_forward, shape.hidden, shape.layers),
        Product("head", shape.hidden, shape.vocabulary, 1),
    ]
    weights = sum(product.inputs * product.outputs * product.count for product in products)
    if 6 * weights != flops.per_token_matrix:
        raise InputError(
            "`model`: limits are only known for dense decoders (Llama, Qwen, Mistral, GPT-2); use "
            "one of them"
        )
    return products


def floors(
    products: Sequence[Product],
    seconds: dict[str, dict[str, dict[str, float]]],
    microbatches: float,
) -> dict[str, float]:
    """Return the minimum seconds of a step with `microbatches` microbatches, by precision.

    Only precisions that were measured are included.
    """

    def total(of_linears: str, of_head: str) -> float:
        step_seconds = 0.0
        for product in products:
            precision = of_head if product.name == "head" else of_linears
            step_seconds += product.count * sum(seconds[precision][product.name].values())
        return microbatches * step_seconds

    named = {
        "fp32": ("fp32", "fp32"),
        "bf16": ("bf16", "bf16"),
        "fp8": ("fp8", "bf16"),
        "fp8+head": ("fp8", "fp8"),
        "mxfp8": ("mxfp8", "bf16"),
        "nvfp4": ("nvfp4", "bf16"),
    }
    return {name: total(*parts) for name, parts in named.items() if seconds.keys() >= set(parts)}


def precisions(device: torch.device) -> tuple[str, ...]:
    """Return the precisions to measure: FP32 on a CPU, BF16 and all supported ones on a GPU."""
    if device.type == "cpu":
        return ("fp32",)
    capability = torch.cuda.get_device_capability()
    if capability >= (10, 0):
        return ("bf16", "fp8", *BLOCK_SCALES)
    return ("bf16", "fp8") if capability >= (8, 9) else ("bf16",)


def timed(product: Product, tokens: int, precision: str, device: torch.device) -> dict[str, float]:
    """Return the median seconds of each of the products "forward", "dgrad" and "wgrad"."""
    make = {"fp8": fp8_product, "mxfp8": block_product, "nvfp4": block_product}
    run = make.get(precision, plain_product)
    return {
        gemm: median_seconds(run(gemm, *sizes, precision, device), device)
        for gemm, sizes in product.sizes(tokens).items()
    }


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call of `run`.

    On a GPU, the time is measured with CUDA events. Before each call, the L2 cache is cleared.
    """
    if device.type == "cuda":
        # Imported late, because a CPU has no Triton.
        from triton.testing import do_bench

        return do_bench(run, return_mode="median") / 1e3
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def plain_product(
    gemm: str, m: int, k: int, n: int, precision: str, device: torch.device
) -> Callable[[], object]:
    """Return a call of torch.mm with operands in the memory layout of training.

    The product [m, k] x [k, n] has the name `gemm` in `Product.sizes`. Weights are [out, in] and
    activations are [tokens, features].
    """
    dtype = FP32 if precision == "fp32" else BF16
    if gemm == "wgrad":
        a = torch.randn(k, m, dtype=dtype, device=device).t()
    else:
        a = torch.randn(m, k, dtype=dtype, device=device)
    if gemm == "forward":
        b = torch.randn(n, k, dtype=dtype, device=device).t()
    else:
        b = torch.randn(k, n, dtype=dtype, device=device)
    return lambda: torch.mm(a, b)


def fp8_product(
    gemm: str, m: int, k: int, n: int, precision: str, device: torch.device
) -> Callable[[], object]:
    """Return a call of torch._scaled_mm with one scale per tensor and output in BF16.

    The arguments are those of `plain_product`. Forward operands are in E4M3 and gradients in E5M2,
    with fast accumulation. FP8 tensor cores before Blackwell need both operands with the summed
    dimension innermost. The time of the transposes that a training needs for this layout is not
    measured.
    """
    a = torch.randn(m, k, dtype=BF16, device=device).to(E4M3 if gemm == "forward" else E5M2)
    b = torch.randn(n, k, dtype=BF16, device=device).to(E4M3).t()
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        a, b, scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=True
    )


def block_product(
    gemm: str, m: int, k: int, n: int, precision: str, device: torch.device
) -> Callable[[], object]:
    """Return a call of torch._scaled_mm with a scale of 1 per block and output in BF16.

    The arguments are those of `plain_product`. All operands are in E4M3 (MXFP8) or in E2M1, two
    values a byte (NVFP4). The scales are padded to the tiles of 128 x 4 scales that the kernel
    reads.
    """
    block, dtype = BLOCK_SCALES[precision]

    def operand(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        if precision == "nvfp4":
            codes = torch.randint(256, (rows, k // 2), dtype=torch.uint8, device=device)
            values = codes.view(torch.float4_e2m1fn_x2)
        else:
            values = torch.randn(rows, k, dtype=BF16, device=device).to(E4M3)
        scales = 128 * math.ceil(rows / 128) * 4 * math.ceil(k / block / 4)
        return values, torch.ones(scales, device=device).to(dtype)

    a, scale_a = operand(m)
    b, scale_b = operand(n)
    return lambda: torch._scaled_mm(
        a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=BF16, use_fast_accum=False
    )


if __name__ == "__main__":
    main()
