"""What SwiGLU in the epilogue of a product would give, which the launcher does not do: by the kernels of quack-kernels, which
FlashAttention-4 brings with it, beside what the launcher runs, its fastest product and its own kernel for SwiGLU.

    python -m benchmarks.swiglu_in_products --out benchmarks/results/h200_swiglu_in_products.json

One layer of Qwen3-1.7B and a microbatch of 32,768 tokens. Forward: the product of gate and up, SwiGLU, and both written.
Backward: the input gradient of `down`, SwiGLU's gradient, and the activated values again. Their kernels want gate and up in
turns, column by column, which is given to them for nothing here. In FP8 they write codes by rows alone, round them without a
scale of their own and look for no largest value. The transposes that products of weight gradients read are timed apart, by
Transformer Engine's kernel.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import fused_kernels
from benchmarks.fused_kernels import TOKENS, WIDTH, quantizer_of, scaled
from benchmarks.gpu_log import gpu_log
from benchmarks.product_search import interleaved, warm_up
from pretrain.metrics.run_folder import describe_environment
from pretrain.model.fused import activation_kernel as kernel
from pretrain.precision import products

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
HIDDEN = fused_kernels.HIDDEN["Qwen3-1.7B"][1]
ROUNDS, UNCOUNTED, REPETITIONS = 12, 2, 4
# Tile's rows and columns, whether two warpgroups take turns with tiles of their own, and the cluster: the library's for Hopper.
CONFIGURATIONS = [
    (128, 256, False, 2, 1),
    (256, 128, False, 2, 1),
    (256, 192, False, 2, 1),
    (128, 192, True, 2, 1),
    (128, 160, True, 1, 2),
]
Launch = Callable[[], object]


@dataclass(frozen=True)
class Case:
    name: str
    ours: dict[str, Launch]  # one after another
    theirs: Callable[[Any], Launch] | None = None  # of a configuration
    error: Callable[[], float] | None = None  # of what theirs wrote last, relative


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    from quack.gemm_config import GemmConfig

    shapes = [
        GemmConfig(rows, columns, pingpong=pingpong, cluster_m=m, cluster_n=n, device_capacity=9, is_dynamic_persistent=False)
        for rows, columns, pingpong, m, n in CONFIGURATIONS
    ]
    warm_up()
    rows: list[dict[str, Any]] = []
    spans = []
    with gpu_log() as log:
        for case in cases():
            began = datetime.now()
            rows.append(measure(case, shapes))
            spans.append((began, datetime.now()))
            print(json.dumps(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    for row, span in zip(rows, spans, strict=True):
        row |= log.between(*span)
    report = {
        "command": shlex.join(["python", "-m", "benchmarks.swiglu_in_products", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "environment": describe_environment({}),
        "results": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(case: Case, shapes: list[Any]) -> dict[str, Any]:
    """Microseconds of ours, kernel by kernel and together, and of theirs by configuration, all in turns."""
    launches: dict[str, Launch] = {**case.ours, "ours": lambda: [launch() for launch in case.ours.values()]}
    failed, errors = {}, {}
    for shape in shapes if case.theirs else []:
        name = f"{shape.tile_m} x {shape.tile_n}{' in turns' * shape.pingpong}, cluster {shape.cluster_m} x {shape.cluster_n}"
        launch = case.theirs(shape)
        try:
            launch()
            torch.cuda.synchronize()
        except (TypeError, ValueError, RuntimeError, AssertionError, NotImplementedError) as error:  # it says as much as a time
            failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        errors[name] = case.error()
        launches[name] = launch
    numbered = [lambda _, launch=launch: launch() for launch in launches.values()]
    times = interleaved(numbered, ROUNDS + UNCOUNTED, REPETITIONS, 1)
    found = {name: statistics.median(each[UNCOUNTED:]) for name, each in zip(launches, times, strict=True)}
    return {"name": case.name, "microseconds": found, "errors": errors, "failed": failed}


def cases() -> Iterator[Case]:
    yield forward("BF16", BF16)
    yield backward("BF16", BF16)
    yield forward("FP8", E4M3)
    yield backward("FP8", E5M2)
    yield transposes()


def random(*shape: int, dtype: torch.dtype = BF16, factor: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * factor).to(dtype)


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


def activated_of(hidden: Tensor) -> Tensor:
    """Of gate and up in turns."""
    gate, up = hidden.float()[:, 0::2], hidden.float()[:, 1::2]
    return torch.nn.functional.silu(gate) * up


def forward(name: str, dtype: torch.dtype) -> Case:
    from quack.gemm_interface import gemm_gated

    x, weight = random(TOKENS, HIDDEN), random(2 * WIDTH, HIDDEN, factor=HIDDEN**-0.5)
    one, options = torch.ones(1, device="cuda"), {}
    if dtype == BF16:
        hidden = products.linear(x, weight)
        ours = {"product": partial(products.linear, x, weight), "SwiGLU": partial(kernel.forward_bf16, hidden)}
        left, right = x, weight
    else:
        quantizer = quantizer_of("current")
        quantizer.set_usage(columnwise=False)
        x8, w8 = quantizer(x), quantizer(weight)
        multiply = partial(products.multiply, w8, x8, fast_accumulation=True)
        hidden, written = multiply(), replace(scaled(E4M3, WIDTH, one), columns=None)
        ours = {"product": multiply, "SwiGLU": partial(kernel.forward, hidden, written)}
        left, right = x8._data.view(E4M3), w8._data.view(E4M3)
        options = {"alpha": x8._scale_inv * w8._scale_inv}
    made, activated = torch.empty_like(hidden), torch.empty(TOKENS, WIDTH, dtype=dtype, device="cuda")
    options |= {"activation": "swiglu", "preact_out": made, "postact_out": activated}
    return Case(
        f"{name} forward",
        ours,
        lambda shape: partial(gemm_gated, left, right.T, config=shape, **options),
        lambda: max(relative(made[:256], hidden[:256].float()), relative(activated[:256], activated_of(made[:256]))),
    )


def backward(name: str, dtype: torch.dtype) -> Case:
    from quack.gemm_interface import gemm_dgated

    dy, weight, hidden = random(TOKENS, HIDDEN), random(HIDDEN, WIDTH, factor=HIDDEN**-0.5), random(TOKENS, 2 * WIDTH)
    one = torch.ones(1, device="cuda")
    d_activated = products.input_gradient(dy, weight)
    if dtype == BF16:
        ours = {
            "product": partial(products.input_gradient, dy, weight),
            "SwiGLU's gradient": partial(kernel.backward_bf16, d_activated, hidden),
        }
        left, right, of_values = dy, weight, BF16
    else:
        dy8, w8 = dy.to(E5M2), weight.T.contiguous().to(E4M3)
        product = partial(torch._scaled_mm, dy8, w8.T, one, one, out_dtype=BF16)
        d_hidden, again = scaled(E5M2, 2 * WIDTH, one), replace(scaled(E4M3, WIDTH, one), rows=None, amax=None)
        ours = {"product": product, "SwiGLU's gradient": partial(kernel.backward, d_activated, hidden, d_hidden, again)}
        left, right, of_values = dy8, w8.T, E4M3
    made = torch.empty(TOKENS, 2 * WIDTH, dtype=dtype, device="cuda")
    activated = torch.empty(TOKENS, WIDTH, dtype=of_values, device="cuda")
    options = {"activation": "swiglu", "dx_out": made, "postact_out": activated, "dynamic_scheduler": False}
    return Case(
        f"{name} backward",
        ours,
        lambda shape: partial(gemm_dgated, left, right, hidden, config=shape, **options),
        lambda: relative(activated[:256], activated_of(hidden[:256])),
    )


def transposes() -> Case:
    """What FP8's weight gradients read, from codes by rows: of the gradient of gate and up, and of the activated values."""
    import transformer_engine_torch as tex

    codes = [torch.randint(0, 100, (TOKENS, width), dtype=torch.uint8, device="cuda") for width in (2 * WIDTH, WIDTH)]
    dtypes = tex.DType.kFloat8E5M2, tex.DType.kFloat8E4M3
    transpose = partial(tex.fp8_transpose, out=None)
    kernels = {str(each.shape[1]): partial(transpose, each, dtype) for each, dtype in zip(codes, dtypes, strict=True)}
    return Case("FP8 transposes", kernels)


if __name__ == "__main__":
    main()
