"""Compare our quantizers with Transformer Engine's kernels, and the emulation with that on a CPU.

Codes are compared as FP32 values. A value identifies the byte, except that all NaN are equal.
Scales are compared bit for bit.
"""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import get_args

import pytest
import torch
from torch import Tensor

from benchmarks import operand_bits
from pretrain.precision.emulation import EmulationEngine, Operand, multiply
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.quantizers import E4M3, E5M2, Grid, blocks, tensor
from pretrain.precision.settings import PRECISIONS
from tests.gpu.conftest import needs, te_dtype
from tests.pretrain.conftest import ON_TE, active_in
from tests.pretrain.precision.quantizers.conftest import assert_same_bits

FP8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
INPUTS = ["ordinary", "fp32", "tiny", "with_nan", "with_infinity", "ragged"]

by_input = pytest.mark.parametrize("kind", INPUTS)
by_grid = pytest.mark.parametrize("grid", FP8, ids=lambda grid: grid.name)


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


def decoded(data: Tensor, grid: Grid) -> Tensor:
    return data.view(FP8[grid]).float()


def check(actual: Tensor, expected: Tensor) -> None:
    """Assert that both tensors have the same bits in FP32. All NaN are equal."""
    assert_same_bits(actual.float(), expected.float())


# ── Transformer Engine's kernels ──


@by_input
@by_grid
@pytest.mark.parametrize("scale", [None, 1.0, 0.37, 3.0e38])
def test_scaling_of_tensors_equals_the_kernels(
    te: ModuleType, kind: str, grid: Grid, scale: float | None
) -> None:
    """Delayed scaling has a `scale`. Current scaling computes it from the amax."""
    x = values(kind)
    if scale is None:
        quantizer = te.Float8CurrentScalingQuantizer(
            te_dtype(te, FP8[grid]), x.device, columnwise=False
        )
        expected = quantizer(x)
        quantized = tensor.quantize_by_amax(x, None, grid)
        check(quantized.dequantize(), expected.dequantize(dtype=torch.float32))
    else:
        scale_and_amax = (torch.full((1,), value, device="cuda") for value in (scale, 0.0))
        quantizer = te.Float8Quantizer(*scale_and_amax, te_dtype(te, FP8[grid]), columnwise=True)
        expected = quantizer(x)
        quantized = tensor.quantize(x, quantizer.scale, grid)
        check(tensor.absolute_maximum(x).reshape(1), quantizer.amax)
        # Hopper's FP8 GEMMs read the transpose, which another kernel writes.
        if expected._transpose is not None:
            check(quantized.codes.t(), decoded(expected._transpose, grid))
    check(quantized.codes, decoded(expected._data, grid))
    check(quantized.tensor_scale.reshape(1), expected._scale_inv.reshape(1))


@by_input
@by_grid
@pytest.mark.parametrize("dimensions", [1, 2], ids=["rows", "squares"])
def test_block_scaling_equals_the_kernels(
    te: ModuleType, kind: str, grid: Grid, dimensions: int
) -> None:
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
    expected = te.Float8BlockQuantizer(te_dtype(te, FP8[grid]), **options)(x)
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
def test_the_delayed_update_equals_the_fused_kernel(
    te: ModuleType, algorithm: str, margin: int
) -> None:
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


@pytest.mark.parametrize("name", ON_TE)
def test_the_librarys_operands_equal_ours_bit_for_bit(name: str) -> None:
    """Covers each operand along each axis over which a GEMM sums, rounded to nearest.

    Stochastically rounded operands cannot be compared.
    """
    operands = operand_bits.compare(needs(name))
    assert len(operands) >= 3
    assert [operand for operand in operands if not operand_bits.equal(operand)] == []


AVAILABLE = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


@pytest.mark.parametrize("name", AVAILABLE)
def test_a_precision_is_available_if_transformer_engine_supports_it(
    te: ModuleType, name: str
) -> None:
    capability = torch.cuda.get_device_capability()
    # Transformer Engine accepts GPUs on which it does not train.
    trains = capability < (11, 0) or name not in ("mxfp8", "nvfp4")
    available = trains and getattr(te, AVAILABLE[name])()
    assert (PRECISIONS[name].hardware.unmet_need(capability) is None) == available


# ── The emulation ──

# Turn off stochastic rounding and the Hadamard transform, whose sums may come in another order.
PRECISE = {"nvfp4": {"disable_stochastic_rounding": True, "disable_rht": True}}


def engine(name: str, device: str) -> EmulationEngine:
    return EmulationEngine(active_in(name, **PRECISE.get(name, {})), torch.device(device))


@pytest.mark.parametrize("name", ON_TE)
def test_compiled_quantization_gives_the_cpus_operands_bit_for_bit(name: str) -> None:
    """The values' magnitudes vary over 17 binades, and one value in ten is zero."""
    torch.manual_seed(0)
    x = torch.randn(1024, 768) * torch.exp2(torch.randint(-8, 9, (1024, 768)).float())
    x = x.masked_fill(torch.rand(x.shape) < 0.1, 0).bfloat16()
    scale = torch.tensor(1.7)
    on_cpu = engine(name, "cpu")
    on_gpu = engine(name, "cuda")
    for role, along in itertools.product(get_args(Role), get_args(Along)):
        *fields, expected_amax = on_cpu.operand_quantizer(role, along)(x, scale)
        expected = Operand(*fields)
        *fields, amax = on_gpu.operand_quantizer(role, along)(x.cuda(), scale.cuda())
        operand = Operand(*fields)
        assert operand.values.dtype == on_gpu.operand_dtype
        assert torch.equal(operand.values.float().cpu(), expected.values), (role, along)
        for actual, reference in ((operand.scale, expected.scale), (amax, expected_amax)):
            assert (actual is None) == (reference is None)
            assert actual is None or torch.equal(actual.cpu(), reference)


def test_a_gemm_is_summed_in_fp32_and_rounded_once() -> None:
    """BF16 cannot represent the scale or the sum exactly."""
    emulation = engine("current", "cuda")
    x = torch.full((64, 4096), 7.0, device="cuda").bfloat16()
    x[:, 0] = 5.0
    *fields, _ = emulation.operand_quantizer("input", "features")(x, None)
    operand = Operand(*fields)
    exact = operand.values.double() @ operand.values.double().t() * operand.scale.double() ** 2
    assert torch.equal(multiply(operand, operand, torch.bfloat16), exact.bfloat16())
    torch.testing.assert_close(
        multiply(operand, operand, torch.float32).double(), exact, rtol=2**-22, atol=0
    )
    bias = torch.randn(64, device="cuda").bfloat16()
    biased = multiply(operand, operand, torch.bfloat16, bias)
    torch.testing.assert_close(biased.double(), exact + bias.double(), rtol=2**-8, atol=0)
