"""The matrix products of a training step, one by one: their sizes, their types, how they lie in memory, and tensors for them.

As the fused layers and the head multiply: outputs and input gradients into BF16, weight gradients added to their sum. `e4m3` and
`hybrid` are the formats of `fp8_config.fp8_format`; they differ in the gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.limits import BF16, E4M3, E5M2, FP32, stacked_products
from foundation.units import TERA
from pretrain.metrics.flops import ModelFlops
from pretrain.model.huggingface import build_on_meta, load_config
from pretrain.settings.recipe import Recipe

PRECISIONS = ("e4m3", "hybrid", "bf16")
HEAD_CHUNKS = (4096, 8192)  # tokens
RESIDUALS = ("o", "down")  # products whose output a residual is added to
COLD_BYTES = 2**28  # four times an H200's cache
GROUP_SECONDS = 1e-3  # what launches between two marks last at least
USUAL_RATE = {"bf16": 700 * TERA, "e4m3": 1350 * TERA, "hybrid": 1350 * TERA}
CHECKED_ROWS = 64
Launch = Callable[[int], object]  # with the tensors of this number


@dataclass(frozen=True)
class StepProduct:
    """d [n, m] = b [n, k] a [m, k]^T, in cublasLt's letters, `count` of it in a step."""

    model: str
    product: str
    which: str  # forward, dgrad or wgrad
    precision: str
    tokens: int
    m: int
    n: int
    k: int
    count: float
    output: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.model} {self.product} {self.which} {self.precision}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def types(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Of a, b and d. In cublasLt's order what multiplies from the left is named second, so gradients are b."""
        if self.precision == "bf16":
            return BF16, BF16, self.output
        return E4M3, E5M2 if self.precision == "hybrid" and self.which != "forward" else E4M3, self.output

    @property
    def transposed(self) -> tuple[bool, bool]:
        """What cublasLt is told of a and b: BF16 lies as the layers have it, FP8 always along the summed dimension."""
        if self.precision != "bf16":
            return True, False
        return {"forward": (True, False), "dgrad": (False, False), "wgrad": (False, True)}[self.which]

    @property
    def fast_accumulation(self) -> bool:
        return self.precision != "bf16" and self.which == "forward"

    @property
    def beta(self) -> float:
        """Weight gradients are added to the sum over microbatches."""
        return 1.0 if self.which == "wgrad" else 0.0

    @property
    def adds_residual(self) -> bool:
        return self.which == "forward" and self.product in RESIDUALS

    @property
    def repetitions(self) -> int:
        return math.ceil(GROUP_SECONDS / (self.flops / USUAL_RATE[self.precision]))

    @property
    def sets(self) -> int:
        """So many that by the time a tensor comes up again the cache has forgotten it."""
        a, b, d = (dtype.itemsize for dtype in self.types)
        return max(2, math.ceil(COLD_BYTES / (self.m * self.k * a + self.n * self.k * b + self.n * self.m * d)))


def products_of(recipe: Recipe, precisions: Sequence[str] = PRECISIONS) -> list[StepProduct]:
    """Of a microbatch of `recipe`, the head in chunks; forward of `hybrid` is that of `e4m3`."""
    packs = 1 if recipe.batch.microbatch == "auto" else recipe.batch.microbatch
    tokens = recipe.data.length * packs
    sums = BF16 if recipe.gradients_kept_in == "bf16" else FP32
    stacked = stacked_products(ModelFlops.of(build_on_meta(load_config(recipe.model))))
    found = []
    for precision, product in itertools.product(precisions, stacked):
        is_head = product.name == "head"
        for part in HEAD_CHUNKS if is_head else (tokens,):
            for which, (rows, inner, columns) in product.sizes(part).items():
                if precision == "hybrid" and which == "forward":
                    continue
                name = head_name(part) if is_head else product.name
                output = (FP32 if is_head else sums) if which == "wgrad" else BF16
                count = product.count * recipe.batch.tokens / part
                found.append(StepProduct(recipe.name, name, which, precision, part, columns, rows, inner, count, output))
    return found


def head_name(chunk: int) -> str:
    return f"head/{chunk}"


# ── Tensors ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Operands:
    """One set of a product's tensors, as they lie in memory. c [n, m]: what is added, where it is not d itself."""

    a: Tensor
    b: Tensor
    d: Tensor
    c: Tensor | None = None

    @classmethod
    def random(cls, product: StepProduct, seed: int, device: str = "cuda") -> Operands:
        """Normal values that fill the range of their type, as scaled tensors do; d is zero."""
        generator = torch.Generator(device).manual_seed(seed)
        shapes, along = ((product.m, product.k), (product.n, product.k)), (product.transposed[0], not product.transposed[1])
        a, b = (
            random_values(shape if inner_last else shape[::-1], dtype, generator)
            for shape, inner_last, dtype in zip(shapes, along, product.types[:2], strict=True)
        )
        d = torch.zeros(product.n, product.m, dtype=product.output, device=device)
        c = torch.randn(d.shape, dtype=d.dtype, device=device, generator=generator) if product.adds_residual else None
        return cls(a, b, d, c)


def random_values(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    values = torch.randn(*shape, dtype=BF16, device=generator.device, generator=generator)
    if dtype == BF16:
        return values
    return values.mul_(unit(dtype)).clamp_(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def unit(dtype: torch.dtype) -> float:
    """The code of 1, where the largest of some 10**8 normal values takes the largest code."""
    return torch.finfo(dtype).max / 6


def scales_of(product: StepProduct, device: str = "cuda") -> tuple[Tensor, Tensor] | None:
    """What the codes of a and b are multiplied by; None in BF16."""
    if product.precision == "bf16":
        return None
    a, b = (torch.full((1,), 1 / unit(dtype), dtype=FP32, device=device) for dtype in product.types[:2])
    return a, b


def checked_rows(product: StepProduct, operands: Operands, scales: tuple[Tensor, Tensor] | None) -> Tensor:
    """The first rows of d by FP32 arithmetic, where d was zero: [CHECKED_ROWS, m]."""
    a = operands.a.t() if product.transposed[0] else operands.a
    b = operands.b.t() if product.transposed[1] else operands.b
    rows = b[:CHECKED_ROWS].to(FP32) @ a.to(FP32)
    return rows if scales is None else rows * (scales[0] * scales[1])


# ── Transformer Engine's way ──────────────────────────────────────────────────────────────────────────────────────────────────


def by_transformer_engine(product: StepProduct, sets: Sequence[Operands], scales: tuple[Tensor, Tensor] | None) -> Launch:
    """Its `general_gemm` on the same tensors, with the arguments that the fused layers give it."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    types = {E4M3: te.DType.kFloat8E4M3, E5M2: te.DType.kFloat8E5M2}
    layout = {"forward": "TN", "dgrad": "NN", "wgrad": "NT"}[product.which]

    def operand(codes: Tensor, scale: Tensor, by_rows: bool) -> Any:
        raw = codes.view(torch.uint8)
        return te.Float8TensorStorage(
            data=raw if by_rows else None,
            data_transpose=None if by_rows else raw,
            fp8_scale_inv=scale,
            fp8_dtype=types[codes.dtype],
            fake_dtype=BF16,
        )

    if scales is None:
        pairs: list[tuple[Any, Any]] = [(operands.a, operands.b) for operands in sets]
    else:
        rows = layout[0] == "T", layout[1] == "N"
        pairs = [(operand(s.a, scales[0], rows[0]), operand(s.b, scales[1], rows[1])) for s in sets]
    options = {
        "layout": layout,
        "out_dtype": product.output,
        "accumulate": product.beta == 1.0,
        "grad": product.which != "forward",
    }
    options["use_split_accumulator"] = scales is not None and not product.fast_accumulation

    def launch(number: int) -> None:
        general_gemm(*pairs[number], out=sets[number].d, **options)

    return launch
