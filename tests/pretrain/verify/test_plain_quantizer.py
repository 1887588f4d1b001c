"""The plain quantizers, against published tables and against the quantizers that run."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.registry import PRECISIONS
from pretrain.precision.settings import ActivePrecision, LowPrecisionSettings
from pretrain.verify.plain_quantizer import PlainQuantizer, by_chance, nearest, values_of

DTYPES = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2, "E2M1": ml_dtypes.float4_e2m1fn}
QUANTIZED = [name for name, precision in PRECISIONS.items() if precision.quantized]
VARIANTS = [(name, {}) for name in QUANTIZED] + [
    ("current", {"use_power_2_scales": True}),
    ("block", {"use_f32_scales": True}),
    ("mxfp8", {"scale_rounding": "floor"}),
    ("mxfp8", {"enable_2d_quantization": True, "fp8_format": "HYBRID"}),
    ("nvfp4", {"disable_2d_quantization": True, "disable_rht": True}),
]


@pytest.mark.parametrize("name", DTYPES)
def test_tables_and_rounding_are_ml_dtypes(name: str) -> None:
    bits = 4 if name == "E2M1" else 8
    codes = np.arange(2 ** (bits - 1), dtype=np.uint8).view(DTYPES[name]).astype(np.float32)
    assert list(values_of(name)) == sorted(codes[np.isfinite(codes)].tolist())
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    between = torch.tensor(values_of(name)).unfold(0, 2, 1).mean(1)
    x = torch.cat([x, between, -between]).clamp(-values_of(name)[-1], values_of(name)[-1])
    assert torch.equal(nearest(x, name), torch.from_numpy(x.numpy().astype(DTYPES[name]).astype(np.float32)))


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_by_chance_is_right_in_the_mean_and_takes_a_neighbour(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1.2, 1.2, 25) * 3
    drawn = torch.stack([by_chance(x, name, generator) for _ in range(4000)])
    table = torch.tensor(values_of(name))
    assert torch.isin(drawn.abs(), table).all()
    widest = (drawn.amax(0) - drawn.amin(0)).clamp(min=1e-9)
    assert ((drawn.mean(0) - x).abs() < 5 * widest / 2 / 4000**0.5 + 1e-6).all()
    exact = table[:6]
    assert torch.equal(by_chance(exact, name, generator), exact)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("along", ["features", "rows"])
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_it_makes_what_the_quantizers_of_the_run_make(name: str, options: dict, role: Role, along: Along) -> None:
    precision = PRECISIONS[name]
    nearest_only = {"disable_stochastic_rounding": True} if precision.takes("disable_stochastic_rounding", True) else {}
    settings = LowPrecisionSettings(**options, **nearest_only).resolved(name)
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(256, 1, generator=generator).mul(6).exp()
    x = (torch.randn(256, 384, generator=generator) * rows).bfloat16()
    scale = torch.tensor(3.7) if precision.keeps_history else None
    plain = PlainQuantizer(ActivePrecision(name, precision, "emulation", settings), role, along)
    laid_out = plain.laid_out(x)
    found = plain(laid_out, laid_out.abs().amax(), scale, generator)
    theirs = precision.quantizer(settings, role, along)(x, scale, None).dequantize()
    # Products of scales in another order pick another code for a few values in a thousand.
    assert ((found - theirs).abs() > 1e-5 * theirs.abs() + 1e-12).float().mean() < 0.01
    assert (found - theirs).norm() < 0.4 * (theirs - laid_out.float()).norm()
