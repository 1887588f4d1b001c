"""Our quantizers of per-tensor and block-wise FP8 against Transformer Engine's kernels, bit for bit, plain and compiled.

Codes are compared as the FP32 values that TE's bytes stand for, which name the byte (all NaN count as one), scales by their bits.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pretrain.precision.quantizers import E4M3, E5M2, Grid, Quantized, blocks, tensor

if torch.cuda.is_available():
    te = pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")

TORCH = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
INPUTS = ["ordinary", "fp32", "tiny", "with_nan", "with_infinity", "ragged"]

by_input = pytest.mark.parametrize("kind", INPUTS)
by_grid = pytest.mark.parametrize("grid", [E4M3, E5M2], ids=lambda grid: grid.name)


def values(kind: str) -> Tensor:
    """Inputs [rows, columns], BF16 unless named fp32: 12.6 million ordinary values, or fewer of a special kind."""
    every = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16).view(256, 256)
    if kind == "with_nan":
        return every.masked_fill(every.isinf(), 0)
    if kind == "with_infinity":
        return every
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(3072, 4096, device="cuda", generator=generator)
    if kind == "tiny":  # around FP32's smallest normal value: every scale overflows
        return (x * 2.0**-125).bfloat16()
    x *= torch.exp(4 * torch.randn(3072, 1, device="cuda", generator=generator))
    x[5::97, 3::89] *= 1000
    x[128:256, 128:256], x[300, :256], x[301, ::2], x[302] = 0, -0.0, 1e-40, -1e-40
    if kind == "ragged":
        x = x[:304, :272].contiguous()
    return x if kind == "fp32" else x.bfloat16()


def te_dtype(grid: Grid) -> object:
    return te.DType.kFloat8E4M3 if grid is E4M3 else te.DType.kFloat8E5M2


def decoded(data: Tensor, grid: Grid) -> Tensor:
    return data.view(TORCH[grid.name]).float()


def differences(what: str, ours: Tensor, theirs: Tensor, x: Tensor | None = None) -> list[str]:
    """Nothing, or one line with how many differ and the first of them."""
    if ours.shape != theirs.shape:
        return [f"{what}: shape {tuple(ours.shape)}, theirs {tuple(theirs.shape)}"]
    ours, theirs = ours.float().contiguous(), theirs.float().contiguous()
    differ = (ours.view(torch.int32) != theirs.view(torch.int32)) & ~(ours.isnan() & theirs.isnan())
    count = int(differ.sum())
    if not count:
        return []
    columns = {"input": x, "ours": ours, "theirs": theirs}
    shown = [
        f"{place}: " + ", ".join(f"{name} {t[tuple(place)].item():.9g}" for name, t in columns.items() if t is not None)
        for place in differ.nonzero()[:6].tolist()
    ]
    return [f"{what}: {count} of {differ.numel()} differ, first at {'; '.join(shown)}"]


def report(lines: list[str]) -> None:
    assert not lines, "\n".join(lines)


@by_input
@by_grid
def test_current_scaling_is_that_of_the_kernels(kind: str, grid: Grid):
    x = values(kind)
    theirs = te.Float8CurrentScalingQuantizer(te_dtype(grid), x.device, columnwise=False)(x)
    ours = tensor.quantize_by_amax(x, None, grid)
    report(
        differences("codes", ours.codes, decoded(theirs._data, grid), x)
        + differences("scale_inv", ours.tensor_scale.reshape(1), theirs._scale_inv.reshape(1))
        + differences("dequantized", ours.dequantize(), theirs.dequantize(dtype=torch.float32), x)
    )


@by_input
@by_grid
@pytest.mark.parametrize("columnwise", [False, True], ids=["rows", "with_transpose"])
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0e38])
def test_delayed_scaling_is_that_of_the_kernels(kind: str, grid: Grid, columnwise: bool, scale: float):
    x, scale_tensor = values(kind), torch.tensor([scale], device="cuda")
    quantizer = te.Float8Quantizer(scale_tensor, torch.zeros(1, device="cuda"), te_dtype(grid), columnwise=columnwise)
    theirs = quantizer(x)
    ours, amax = tensor.quantize(x, scale_tensor, grid), tensor.absolute_maximum(x)
    lines = differences("codes", ours.codes, decoded(theirs._data, grid), x)
    lines += differences("scale_inv", ours.tensor_scale.reshape(1), theirs._scale_inv.reshape(1))
    lines += differences("amax", amax.reshape(1), quantizer.amax)
    if columnwise and theirs._transpose is not None:  # a kernel of its own, where FP8 products want it: Hopper
        lines += differences("transpose", ours.codes.t(), decoded(theirs._transpose, grid), x.t())
    report(lines)


@by_input
@by_grid
@pytest.mark.parametrize("dimensions", [1, 2], ids=["rows", "squares"])
def test_block_scaling_is_that_of_the_kernels(kind: str, grid: Grid, dimensions: int):
    """TE pads scales to multiples of 4, and lists those of rows column by column: [blocks along the row, rows]."""
    x = values(kind)
    options = {"rowwise": True, "columnwise": True, "force_pow_2_scales": True, "block_scaling_dim": dimensions}
    theirs = te.Float8BlockQuantizer(te_dtype(grid), **options)(x)
    lines = []
    for direction, values_along, data, scale_inv in (
        ("rows", x, theirs._rowwise_data, theirs._rowwise_scale_inv),
        ("columns", x.t(), theirs._columnwise_data, theirs._columnwise_scale_inv),
    ):
        ours = blocks.quantize_fp8(values_along, grid, two_dimensional=dimensions == 2)
        scales = ours.block_scale[::128, ::128] if dimensions == 2 else ours.block_scale[:, ::128].t()
        lines += differences(f"codes along {direction}", ours.codes, decoded(data, grid), values_along)
        lines += differences(f"scales along {direction}", scales, scale_inv[: scales.shape[0], : scales.shape[1]])
    report(lines)


QUANTIZERS: dict[str, Callable[[Tensor], Quantized]] = {
    "current": lambda x: tensor.quantize_by_amax(x, None, E4M3),
    "delayed": lambda x: tensor.quantize(x, torch.full((1,), 0.37, device=x.device), E5M2),
    "block_rows": lambda x: blocks.quantize_fp8(x, E4M3, two_dimensional=False),
    "block_columns": lambda x: blocks.quantize_fp8(x.t(), E5M2, two_dimensional=False),
    "block_squares": lambda x: blocks.quantize_fp8(x, E4M3, two_dimensional=True),
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_compiled_quantizers_have_the_bits_of_plain_ones(name: str):
    """Compilers for GPUs are free to divide approximately and to fuse what rounds between."""
    quantize, lines = QUANTIZERS[name], []
    torch.compiler.reset()
    compiled = torch.compile(quantize, fullgraph=True)
    for kind in INPUTS:
        x = values(kind)
        ours, plain = compiled(x), quantize(x)
        for part in ("codes", "block_scale", "tensor_scale"):
            lines += differences(f"{kind}: {part} of {name}", getattr(ours, part), getattr(plain, part))
    report(lines)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_the_delayed_update_is_that_of_the_fused_kernel(algorithm: str, margin: int):
    """Idle tensors, infinities, NaN and values so small that the scale overflows are among 1,024 columns; five steps."""
    import transformer_engine_torch as tex

    generator = torch.Generator("cuda").manual_seed(2)
    for length in (1, 7, 300):
        history = torch.exp(20 * torch.randn(length, 1024, device="cuda", generator=generator))
        scale = torch.ones(1024, device="cuda")
        their_history, their_scale = history.clone(), scale.clone()
        for step in range(5):
            newest = torch.exp(20 * torch.randn(1024, device="cuda", generator=generator))
            newest[::5], newest[1::50], newest[2::50], newest[3::50] = 0, torch.inf, torch.nan, 1e-40
            history[0], their_history[0] = newest, newest
            history, scale = tensor.update_scale(history, scale, 448.0, margin, algorithm)
            tex.fused_amax_and_scale_update_after_reduction(
                newest.clone(), [their_history], [their_scale], algorithm, te.DType.kFloat8E4M3, margin
            )
            report(
                differences(f"history of {length} after step {step}", history, their_history)
                + differences(f"scale from {length} after step {step}", scale, their_scale, newest)
            )
