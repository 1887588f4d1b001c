"""FP8 products of a step at the limit of power: each algorithm that cublasLt names, launched for a fifth of a second at a time.

    python -m benchmarks.products_under_load --out benchmarks/results/h200_products_under_load.json

`pretrain.precision.products` times six launches in a run's first step, in which the GPU is not yet at its limit of power. This
asks whether another algorithm would be chosen later, and what adding to FP32 sums costs. Operands are normal, E4M3 and for
gradients E5M2, larger than the cache; a weight's gradient adds to what is there. Algorithms take turns, forth and back.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.machine import measured_on, write
from foundation.units import TERA
from pretrain.precision.cublaslt import CublasLt
from pretrain.precision.products import WORKSPACE

E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
DEVIATION = {E4M3: 60, E5M2: 4000}
TOKENS = {"llama_3_1_8b": 8192, "qwen3_1_7b": 32768}  # of a microbatch; of the head's chunks, 4,096
SHAPES = {  # inputs, outputs
    "llama_3_1_8b": {
        "qkv": (4096, 6144),
        "o": (4096, 4096),
        "gate+up": (4096, 28672),
        "down": (14336, 4096),
        "head": (4096, 128256),
    },
    "qwen3_1_7b": {
        "qkv": (2048, 4096),
        "o": (2048, 2048),
        "gate+up": (2048, 12288),
        "down": (6144, 2048),
        "head": (2048, 151936),
    },
}
BURST, ROUNDS, ASKED = 0.2, 2, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.ones(16, 16, device="cuda", dtype=BF16) @ torch.ones(16, 16, device="cuda", dtype=BF16)  # loads the library
    library = CublasLt()
    report = {**measured_on(), "cublaslt": library.version, "products": []}
    for model, shapes in SHAPES.items():
        for name, (inputs, outputs) in shapes.items():
            tokens = 4096 if name == "head" else TOKENS[model]
            kinds = {
                "forward": ((outputs, tokens, inputs), (E4M3, E4M3, BF16), 0.0),
                "gradient of the input": ((inputs, tokens, outputs), (E4M3, E5M2, BF16), 0.0),
                "gradient of the weight, added in FP32": ((inputs, outputs, tokens), (E4M3, E5M2, FP32), 1.0),
                "gradient of the weight, added in BF16": ((inputs, outputs, tokens), (E4M3, E5M2, BF16), 1.0),
            }
            for kind, (sizes, types, beta) in kinds.items():
                report["products"].append({"model": model, "product": name, "which": kind} | study(library, sizes, types, beta))
                write(arguments.out, report)


def study(library: CublasLt, sizes: tuple[int, int, int], types: tuple[torch.dtype, ...], beta: float) -> dict[str, list]:
    """TFLOP/s of each algorithm in each round, in the heuristic's order, and whether it wrote the first one's bits."""
    m, n, k = sizes
    matmul = library.matmul(sizes, types, (True, False), fast_accumulation=types[1] == E4M3)
    sets = 2 if (m + n) * k > 6e7 else 4
    a, b = [codes(m, k, types[0]) for _ in range(sets)], [codes(n, k, types[1]) for _ in range(sets)]
    d, one = torch.zeros(n, m, device="cuda", dtype=types[2]), torch.ones(1, device="cuda")
    workspace, stream = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda"), torch.cuda.current_stream().cuda_stream
    matmul.set_scales(one, one)
    named, bits = matmul.named_by_heuristic(ASKED, WORKSPACE), []
    for algorithm in named:
        matmul.run(a[0], b[0], d.zero_(), d, beta, algorithm, workspace, stream)
        bits.append(d.view(torch.int64).sum().item())
    launches = max(8, int(BURST * 1.25e15 / (2 * m * n * k)))
    heat(0.3)
    rates: list[list[float]] = [[] for _ in named]
    for turn in range(ROUNDS):
        for index in range(len(named)) if turn % 2 == 0 else reversed(range(len(named))):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            for launch in range(launches):
                matmul.run(a[launch % sets], b[launch % sets], d, d, beta, named[index], workspace, stream)
            ended.record()
            ended.synchronize()
            rates[index].append(round(2 * m * n * k * launches / (begun.elapsed_time(ended) / 1e3) / TERA))
    return {"tflops": rates, "bits_of_the_first": [each == bits[0] for each in bits]}


def codes(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    made = torch.empty(rows, columns, device="cuda", dtype=dtype)
    for part in made.split(max(1, 2**27 // columns)):
        part.copy_(torch.randn(part.shape, device="cuda") * DEVIATION[dtype])
    return made


def heat(seconds: float) -> None:
    matrix, began = torch.randn(8192, 8192, device="cuda", dtype=BF16), time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
