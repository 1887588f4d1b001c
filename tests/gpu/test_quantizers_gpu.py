"""Compare our quantizers of per-tensor and block-wise FP8 with Transformer Engine's kernels.

Codes are compared as FP32 values. A value identifies the byte, except that all NaN are equal.
Scales are compared bit for bit.
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
    """Return inputs [rows, columns], in FP32 if `kind` is fp32 and else in BF16.

    Ordinary inputs have 12.6 million values, special kinds fewer.
    """
    bits = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16)
    all_bf16_values = bits.view(torch.bfloat16).view(256, 256)
    if kind == "with_nan":
        return all_bf16_values.masked_fill(all_bf16_values.isinf(), 0)
    if kind == "with_infinity":
        return all_bf16_values
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(3072, 4096, device="cuda", generator=generator)
    if kind == "tiny":  # Values are close to FP32's smallest normal value. Every scale overflows.
        return (x * 2.0**-125).bfloat16()
    x *= torch.exp(4 * torch.randn(3072, 1, device="cuda", generator=generator))
    x[5::97, 3::89] *= 1000
    x[128:256, 128:256] = 0
    x[300, :256] = -0.0
    x[301, ::2] = 1e-40
    x[302] = -1e-40
    if kind == "ragged":
        x = x[:304, :272].contiguous()
    return x if kind == "fp32" else x.bfloat16()


def te_dtype(grid: Grid) -> object:
    return te.DType.kFloat8E4M3 if grid is E4M3 else te.DType.kFloat8E5M2


def decoded(data: Tensor, grid: Grid) -> Tensor:
    return data.view(TORCH[grid.name]).float()


def check(actual: Tensor, expected: Tensor) -> None:
    """Assert that both tensors have the same bits. All NaN are equal."""
    actual = actual.float().contiguous()
    expected = expected.float().contiguous()
    assert actual.shape == expected.shape
    both_nan = actual.isnan() & expected.isnan()
    wrong = (actual.view(torch.int32) != expected.view(torch.int32)) & ~both_nan
    places = tuple(wrong.nonzero()[:6].t())
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} differ: "
        f"{actual[places]} at {places} should be {expected[places]}"
    )


@by_input
@by_grid
def test_current_scaling_equals_the_kernels(kind: str, grid: Grid):
    x = values(kind)
    expected = te.Float8CurrentScalingQuantizer(te_dtype(grid), x.device, columnwise=False)(x)
    quantized = tensor.quantize_by_amax(x, None, grid)
    check(quantized.codes, decoded(expected._data, grid))
    check(quantized.tensor_scale.reshape(1), expected._scale_inv.reshape(1))
    check(quantized.dequantize(), expected.dequantize(dtype=torch.float32))


@by_input
@by_grid
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0e38])
def test_delayed_scaling_equals_the_kernels(kind: str, grid: Grid, scale: float):
    x = values(kind)
    scale_tensor = torch.tensor([scale], device="cuda")
    quantizer = te.Float8Quantizer(
        scale_tensor, torch.zeros(1, device="cuda"), te_dtype(grid), columnwise=True
    )
    expected = quantizer(x)
    quantized = tensor.quantize(x, scale_tensor, grid)
    check(quantized.codes, decoded(expected._data, grid))
    check(quantized.tensor_scale.reshape(1), expected._scale_inv.reshape(1))
    check(tensor.absolute_maximum(x).reshape(1), quantizer.amax)
    # Hopper's FP8 GEMMs read the transpose, which another kernel writes.
    if expected._transpose is not None:
        check(quantized.codes.t(), decoded(expected._transpose, grid))


@by_input
@by_grid
@pytest.mark.parametrize("dimensions", [1, 2], ids=["rows", "squares"])
def test_block_scaling_equals_the_kernels(kind: str, grid: Grid, dimensions: int):
    """Transformer Engine pads scales to multiples of 4.

    It stores the scales of rows column by column: [blocks along the row, rows].
    """
    x = values(kind)
    x = x[: x.shape[0] // 128 * 128, : x.shape[1] // 128 * 128].contiguous()
    options = {
        "rowwise": True,
        "columnwise": True,
        "force_pow_2_scales": True,
        "block_scaling_dim": dimensions,
    }
    expected = te.Float8BlockQuantizer(te_dtype(grid), **options)(x)
    for values_along, data, scale_inv in (
        (x, expected._rowwise_data, expected._rowwise_scale_inv),
        (x.t(), expected._columnwise_data, expected._columnwise_scale_inv),
    ):
        quantized = blocks.quantize_fp8(values_along, grid, two_dimensional=dimensions == 2)
        if dimensions == 2:
            scales = quantized.block_scale[::128, ::128]
        else:
            scales = quantized.block_scale[:, ::128].t()
        check(quantized.codes, decoded(data, grid))
        check(scales, scale_inv[: scales.shape[0], : scales.shape[1]])


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_the_delayed_update_equals_the_fused_kernel(algorithm: str, margin: int):
    """Covers idle tensors, infinities, NaN and values so small that the scale overflows."""
    import transformer_engine_torch as tex

    generator = torch.Generator("cuda").manual_seed(2)
    for length in (1, 7, 300):
        history = torch.exp(20 * torch.randn(length, 1024, device="cuda", generator=generator))
        scale = torch.ones(1024, device="cuda")
        expected_history, expected_scale = history.clone(), scale.clone()
        for _ in range(5):
            newest = torch.exp(20 * torch.randn(1024, device="cuda", generator=generator))
            newest[::5] = 0
            newest[1::50] = torch.inf
            newest[2::50] = torch.nan
            newest[3::50] = 1e-40
            history[0] = newest
            expected_history[0] = newest
            history, scale = tensor.update_scale(history, scale, 448.0, margin, algorithm)
            tex.fused_amax_and_scale_update_after_reduction(
                newest.clone(),
                [expected_history],
                [expected_scale],
                algorithm,
                te.DType.kFloat8E4M3,
                margin,
            )
            check(history, expected_history)
            check(scale, expected_scale)
