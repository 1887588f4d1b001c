"""MXFP4: its codes and scales against ml_dtypes and torchao, what is rounded stochastically and transformed, and its messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from foundation.errors import InputError
from pretrain.precision.emulation import EmulationBackend
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.quantizers import E2M1, Quantized, blocks
from pretrain.precision.selection import Missing, missing_on, select_precision
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings

SameBits = Callable[[Tensor, Tensor], None]
MXFP4 = PRECISIONS["mxfp4"]
ROLES, ALONG = get_args(Role), get_args(Along)


def settings(**options: Any) -> LowPrecisionSettings:
    return LowPrecisionSettings(**options).resolved("mxfp4")


def quantized(x: Tensor, role: Role = "input", along: Along = "features", **options: Any) -> Quantized:
    return MXFP4.quantizer(settings(**options), role, along)(x, None, None)


def blocks_of(tensor: Tensor) -> Tensor:
    return tensor.unflatten(-1, (-1, 32))


def in_numpy(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finite FP32 blocks [..., 32] to their codes, FP32, and scales [..., 1], by exponents and ml_dtypes' conversions."""
    amax = np.abs(blocks).max(axis=-1, keepdims=True, initial=0)
    of_what = amax * (np.float32(1) / np.float32(6))
    mantissa, exponent = np.frexp(of_what)  # mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5)
    exponent[of_what == 0] = -127
    exponent = exponent.clip(-127, 127)
    codes = np.ldexp(blocks, -exponent).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return codes, (exponent + 127).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


@pytest.fixture(scope="module")
def check(assert_same_bits: SameBits) -> Callable[[Tensor], None]:
    """That finite x has the codes and the scales that NumPy finds."""

    def check(x: Tensor) -> None:
        ours = quantized(x)
        codes, scales = (torch.from_numpy(each) for each in in_numpy(blocks_of(x.float()).numpy()))
        assert ours.grid == E2M1 and ours.tensor_scale == 1
        assert_same_bits(blocks_of(ours.codes), codes)
        assert_same_bits(blocks_of(ours.block_scale), scales.expand(codes.shape))

    return check


def test_ten_million_values_have_the_codes_and_scales_that_ml_dtypes_finds(check: Callable, finite_bf16: Tensor) -> None:
    check(finite_bf16)


@given(
    values=npst.array_shapes(min_dims=2, max_dims=2, max_side=3).flatmap(
        lambda shape: npst.arrays(
            np.float32, (shape[0], 32 * shape[1]), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
        )
    ),
)
def test_any_values_agree_with_ml_dtypes(check: Callable, values: np.ndarray) -> None:
    check(torch.from_numpy(values))


def boundaries() -> Tensor:
    """FP32 blocks [n, 32] whose amax is 6 * 2^k, an ulp more or less."""
    exact = torch.tensor([6.0 * 2.0**k for k in range(-120, 124)], dtype=torch.float64).float()
    amax = torch.cat([exact, torch.nextafter(exact, torch.tensor(torch.inf)), torch.nextafter(exact, torch.tensor(0.0))])
    return amax[:, None] * torch.linspace(-1, 1, 32)


def test_torchao_has_the_same_codes_and_scales_but_under_the_smallest_scale(
    finite_bf16: Tensor, references: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under 2^-127 torchao does not scale, where decoding with 2^-127 wants 2^127."""
    monkeypatch.syspath_prepend(references)
    to_mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor").to_mx
    modes = pytest.importorskip("torchao.prototype.mx_formats.config").ScaleCalculationMode
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    for x in (finite_bf16, boundaries().bfloat16()):
        scales, packed = to_mx(x, torch.float4_e2m1fn_x2, 32, modes.RCEIL)
        codes = blocks_of(kernels.f4_unpacked_to_f32(kernels.unpack_uint4(packed)).view(x.shape))
        ours = quantized(x)
        ordinary = blocks_of(ours.block_scale)[..., 0] > 2.0**-127
        assert ordinary.float().mean() > 0.99
        assert torch.equal(blocks_of(ours.block_scale)[..., 0][ordinary], scales.float()[ordinary])
        assert torch.equal(blocks_of(ours.codes)[ordinary].view(torch.int32), codes[ordinary].view(torch.int32))


def test_the_largest_value_is_not_cut() -> None:
    x = torch.ones(2, 32)
    x[:, 5] = torch.tensor([6.0, 7.0])  # with a scale of one, 6 is the largest code
    assert quantized(x).dequantize()[:, 5].tolist() == [6.0, 8.0]


def test_blocks_lie_along_the_sum_and_only_the_weight_gradients_operands_are_transformed() -> None:
    x = (torch.randn(64, 96) * torch.exp2(torch.randint(-6, 7, (64, 96)).float())).bfloat16()
    for role, rotated in itertools.product(ROLES, (True, False)):
        options = {"disable_stochastic_rounding": True, "disable_rht": not rotated}
        assert not MXFP4.serves_both(settings(**options), role)
        along_rows = blocks.hadamard(x.t()) if rotated and role != "weight" else x.t()
        for along, values in zip(ALONG, (x, along_rows), strict=True):
            assert torch.equal(quantized(x, role, along, **options).operand, quantized(values.contiguous()).operand)


def test_gradients_are_rounded_stochastically_in_both_directions_and_right_on_average() -> None:
    torch.manual_seed(0)
    x = torch.rand(64, 64).bfloat16()
    x[:, ::16] = 1.0  # the same scale everywhere
    for role, along in itertools.product(ROLES, ALONG):
        first, second = (quantized(x, role, along).codes for _ in range(2))
        assert torch.equal(first, second) == (role != "grad_output")
    draws = torch.stack([quantized(x, "grad_output").dequantize() for _ in range(400)])
    assert (draws.mean(0) - x.float())[:, 1:16].mean().abs() < 1e-3
    assert (draws.mean(0) - x.float()).norm() < 0.2 * (quantized(x).dequantize() - x.float()).norm()
    to_nearest = (quantized(x, "grad_output", disable_stochastic_rounding=True).codes for _ in range(2))
    assert torch.equal(*to_nearest)


def test_operands_have_two_significant_bits() -> None:
    for role, along in itertools.product(ROLES, ALONG):
        quarters = 4 * quantized(torch.randn(64, 64).bfloat16(), role, along).operand.frexp().mantissa
        assert torch.equal(quarters, quarters.round()) and not torch.equal(quarters / 2, (quarters / 2).round())
        assert MXFP4.significant_bits(settings(), role) == 2
    active = ActivePrecision("mxfp4", MXFP4, "emulation", settings())
    assert EmulationBackend(active, torch.device("cuda")).operand_dtype == torch.bfloat16


def on_a_b200(precision: Any, settings: Any = None) -> str | None:
    missing = precision.hardware.missing((10, 0), (13, 0))
    return f"needs {missing}; this is a B200" if missing else None


@pytest.mark.parametrize("missing", [missing_on("cpu"), on_a_b200])
def test_every_device_has_it_in_emulation_and_none_on_transformer_engine(missing: Missing) -> None:
    with pytest.raises(
        InputError, match=r"`precision: mxfp4` needs emulation, because no release of Transformer Engine offers it"
    ):
        select_precision("mxfp4", LowPrecisionSettings(), missing)
    for options in ({"backend": "emulation"}, {"on_unsupported": "emulate"}):
        active = select_precision("mxfp4", LowPrecisionSettings(**options), missing)
        assert (active.precision, active.backend) == (MXFP4, "emulation")
    assert select_precision("mxfp4", LowPrecisionSettings(on_unsupported="fallback"), on_a_b200).precision.name == "delayed"


def test_a_value_takes_half_a_byte_and_its_share_of_a_scale() -> None:
    assert MXFP4.operand_bytes * 32 == 16 + 1
