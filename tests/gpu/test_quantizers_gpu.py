"""Our quantizers of per-tensor and block-wise FP8 against Transformer Engine's kernels, bit for bit.

Codes are compared as the FP32 values that TE's bytes stand for, which name the byte (all NaN count as one), scales by their bits.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pretrain.precision.quantizers import E4M3, E5M2, Grid, blocks, tensor

te = pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")

TORCH = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
INPUTS = ["ordinary", "fp32", "tiny", "with_nan", "with_infinity", "ragged"]

by_input = pytest.mark.parametrize("kind", INPUTS)
by_grid = pytest.mark.parametrize("grid", [E4M3, E5M2], ids=lambda grid: grid.name)


def values(kind: str) -> Tensor:
    """Inputs [rows, columns], BF16 unless named fp32: 12.6 million ordinary values, or fewer of a special kind."""
    every = (
        torch.arange(-(2**15), 2**15, device="cuda")
        .to(torch.int16)
        .view(torch.bfloat16)
        .view(256, 256)
    )
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


def check(ours: Tensor, theirs: Tensor) -> None:
    """The same bits, all NaN counting as one."""
    ours, theirs = ours.float().contiguous(), theirs.float().contiguous()
    assert ours.shape == theirs.shape
    wrong = (ours.view(torch.int32) != theirs.view(torch.int32)) & ~(ours.isnan() & theirs.isnan())
    places = tuple(wrong.nonzero()[:6].t())
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} differ: {ours[places]} at {places}, theirs {theirs[places]}"
    )


@by_input
@by_grid
def test_current_scaling_is_that_of_the_kernels(kind: str, grid: Grid):
    x = values(kind)
    theirs = te.Float8CurrentScalingQuantizer(te_dtype(grid), x.device, columnwise=False)(x)
    ours = tensor.quantize_by_amax(x, None, grid)
    check(ours.codes, decoded(theirs._data, grid))
    check(ours.tensor_scale.reshape(1), theirs._scale_inv.reshape(1))
    check(ours.dequantize(), theirs.dequantize(dtype=torch.float32))


@by_input
@by_grid
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0e38])
def test_delayed_scaling_is_that_of_the_kernels(kind: str, grid: Grid, scale: float):
    x, scale_tensor = values(kind), torch.tensor([scale], device="cuda")
    quantizer = te.Float8Quantizer(
        scale_tensor, torch.zeros(1, device="cuda"), te_dtype(grid), columnwise=True
    )
    theirs = quantizer(x)
    ours = tensor.quantize(x, scale_tensor, grid)
    check(ours.codes, decoded(theirs._data, grid))
    check(ours.tensor_scale.reshape(1), theirs._scale_inv.reshape(1))
    check(tensor.absolute_maximum(x).reshape(1), quantizer.amax)
    if theirs._transpose is not None:  # a kernel of its own, where FP8 products want it: Hopper
        check(ours.codes.t(), decoded(theirs._transpose, grid))


@by_input
@by_grid
@pytest.mark.parametrize("dimensions", [1, 2], ids=["rows", "squares"])
def test_block_scaling_is_that_of_the_kernels(kind: str, grid: Grid, dimensions: int):
    """TE pads scales to multiples of 4, and lists those of rows column by column: [blocks along the row, rows]."""
    x = values(kind)
    x = x[: x.shape[0] // 128 * 128, : x.shape[1] // 128 * 128].contiguous()
    options = {
        "rowwise": True,
        "columnwise": True,
        "force_pow_2_scales": True,
        "block_scaling_dim": dimensions,
    }
    theirs = te.Float8BlockQuantizer(te_dtype(grid), **options)(x)
    for values_along, data, scale_inv in (
        (x, theirs._rowwise_data, theirs._rowwise_scale_inv),
        (x.t(), theirs._columnwise_data, theirs._columnwise_scale_inv),
    ):
        ours = blocks.quantize_fp8(values_along, grid, two_dimensional=dimensions == 2)
        scales = (
            ours.block_scale[::128, ::128] if dimensions == 2 else ours.block_scale[:, ::128].t()
        )
        check(ours.codes, decoded(data, grid))
        check(scales, scale_inv[: scales.shape[0], : scales.shape[1]])


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
        for _ in range(5):
            newest = torch.exp(20 * torch.randn(1024, device="cuda", generator=generator))
            newest[::5], newest[1::50], newest[2::50], newest[3::50] = (
                0,
                torch.inf,
                torch.nan,
                1e-40,
            )
            history[0], their_history[0] = newest, newest
            history, scale = tensor.update_scale(history, scale, 448.0, margin, algorithm)
            tex.fused_amax_and_scale_update_after_reduction(
                newest.clone(),
                [their_history],
                [their_scale],
                algorithm,
                te.DType.kFloat8E4M3,
                margin,
            )
            check(history, their_history)
            check(scale, their_scale)
