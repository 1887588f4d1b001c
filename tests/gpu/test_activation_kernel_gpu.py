"""Compare activations' kernels with autograd, and their codes with our quantizers.

The tests also run on a CPU, under Triton's interpreter (TRITON_INTERPRET=1). Its conversions to
BF16 and FP8 neither round to nearest even nor keep subnormals, so a fixture replaces them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pretrain.model.fused import activation_kernel as kernel
from pretrain.model.fused.fp8_tile import TensorScaled
from pretrain.precision.quantizers import E4M3, E5M2, Grid, tensor
from tests.gpu.conftest import DEVICE, INTERPRETED, cuda_only

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy on infinities and NaN
    pytest.mark.usefixtures("conversions_that_round"),
]

TORCH = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
# Share of codes that may round the other way. The kernel's sigmoid is a few FP32 ulps off, about
# 2^-21. An FP8 rounding interval spans at least 2^-4 of a value, so the error decides one rounding
# in 2^17, and two for a value that is first rounded to BF16.
FLIPPED = 1e-4
# Absolute errors of the derivative of GELU in FP32. In the library, 1 - tanh(x)^2 causes the error.
# If x is far below zero, the derivative is smaller than the errors. E5M2 has codes for such small
# values, so the codes differ by more than one. Values that are a little larger than the errors
# round the other way more often.
OUR_ERROR = 2e-7
LIBRARY_ERROR = 4e-6
FLIPPED_IN_GELU = 2e-3


def close(codes: Tensor, expected: Tensor, share: float = FLIPPED) -> bool:
    """Return True if uint8 codes differ by at most one, in at most `share` of the values.

    The last bits of the exponentials sometimes decide a rounding.
    """
    ordered = [
        torch.where(tensor < 128, tensor.int(), 128 - tensor.int()) for tensor in (codes, expected)
    ]
    distance = (ordered[0] - ordered[1]).abs()
    return (
        codes.shape == expected.shape
        and int(distance.max()) <= 1
        and int((distance > 0).sum()) <= 2 + share * distance.numel()
    )


def without_negligible(
    codes: Tensor, expected: Tensor, dtype: torch.dtype, scale_inv: Tensor, negligible: Tensor
) -> Tensor:
    """Return `codes`. A code is replaced by the expected one if the values are close.

    Two values are close if they differ by at most `negligible`.
    """
    values, expected_values = (
        scale_inv * tensor.view(dtype).float() for tensor in (codes, expected)
    )
    differs = (values - expected_values).abs() > negligible
    return torch.where(differs, codes, expected)


def inputs(tokens: int, width: int, seed: int = 0, gated: bool = True) -> tuple[Tensor, Tensor]:
    """Draw the activation's input and the gradient of its result [tokens, width], in BF16.

    The input is [tokens, 2 width] with a gate, and [tokens, width] without a gate.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)
    columns = 2 * width if gated else width
    hidden = 3 * torch.randn(tokens, columns, generator=generator, device=DEVICE)
    hidden[::7, ::5] *= 20
    d_activated = torch.randn(tokens, width, generator=generator, device=DEVICE)
    sizes = torch.exp(torch.randn(tokens, 1, generator=generator, device=DEVICE))
    return hidden.bfloat16(), (d_activated * sizes).bfloat16()


def by_autograd(hidden: Tensor, d_activated: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """Return the activated values and the gradient of hidden, computed in FP64, as FP32."""
    exact = hidden.double().requires_grad_()
    gate, *up = exact.chunk(2, dim=1) if gated else [exact]
    activated = F.silu(gate) * up[0] if gated else F.gelu(gate, approximate="tanh")
    (gradient,) = torch.autograd.grad(activated, exact, d_activated.double())
    return activated.detach().float(), gradient.float()


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.full(shape, 99, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=DEVICE)


def tensor_scaled(
    grid: Grid, shape: tuple[int, ...], *, scale: float | Tensor | None
) -> TensorScaled:
    """Return an empty TensorScaled of both layouts. Without a `scale`, it uses current scaling."""
    dtype = TORCH[grid.name]
    zero = torch.zeros(1, device=DEVICE)
    if isinstance(scale, float):
        scale = torch.tensor([scale], device=DEVICE)
    rows = empty(dtype, *shape)
    columns = empty(dtype, *reversed(shape))
    return TensorScaled(dtype, rows, columns, zero.clone(), scale, zero.clone(), zero.clone())


def check_tensor_scaled(
    written: TensorScaled,
    exact: Tensor,
    grid: Grid,
    rtol: float = 1e-6,
    negligible: Tensor | None = None,
) -> None:
    """Compare the amax, scale and codes that a kernel wrote with our quantizer on `exact`.

    `rtol` is the error of an amax of current scaling. Codes whose values differ by at most
    `negligible` count as equal.
    """
    values = exact.bfloat16()
    amax = tensor.absolute_maximum(exact if written.scale is None else values)
    torch.testing.assert_close(
        written.amax, amax.reshape(1), rtol=rtol if written.scale is None else 2**-8, atol=0
    )
    scale = written.scale
    if written.scale is None:
        # Use the kernel's amax. It may be an ulp from ours.
        scale = tensor.scale_from_amax(written.amax, grid.maximum)
    assert torch.equal(written.scale_inv, tensor.decode_scale(scale))
    dtype = TORCH[grid.name]
    expected = tensor.quantize(values, scale, grid).codes.to(dtype).view(torch.uint8)
    codes = written.rows
    share = FLIPPED
    if negligible is not None:
        codes = without_negligible(codes, expected, dtype, written.scale_inv, negligible)
        share = FLIPPED_IN_GELU
    assert close(codes, expected, share)


@settings(max_examples=3 if INTERPRETED else 10, deadline=None)
@given(
    rows=st.integers(1, 2 if INTERPRETED else 16),
    columns=st.integers(1, 3),
    formats=st.sampled_from([(E4M3, E4M3), (E4M3, E5M2)]),
    scales=st.sampled_from([(1.0, 1.0), (3.1, 700.0), (None, None)]),
    gated=st.booleans(),
)
def test_tensor_scaled_codes_are_those_of_the_formulas(
    rows: int,
    columns: int,
    formats: tuple[Grid, Grid],
    scales: tuple[float | None, float | None],
    gated: bool,
):
    """Covers delayed scaling with two scales, the larger one saturating, and current scaling."""
    tokens = 32 * rows
    width = 128 * columns
    hidden, d_activated = inputs(tokens, width, seed=tokens + width, gated=gated)
    exact, exact_gradient = by_autograd(hidden, d_activated, gated=gated)
    activated = tensor_scaled(formats[0], (tokens, width), scale=scales[0])
    kernel.write_activated(hidden, activated, gated=gated)
    check_tensor_scaled(activated, exact, formats[0])

    d_hidden = tensor_scaled(formats[1], tuple(hidden.shape), scale=scales[1])
    recomputed = tensor_scaled(formats[0], (tokens, width), scale=activated.applied_scale)
    total = kernel.write_activate_backward(
        d_activated, hidden, d_hidden, recomputed, gated=gated, summed=True
    )
    torch.testing.assert_close(total, exact_gradient.sum(0), rtol=1e-4, atol=1e-3)
    negligible = None if gated else OUR_ERROR * d_activated.float().abs()
    rtol = 1e-6 if gated else LIBRARY_ERROR
    check_tensor_scaled(d_hidden, exact_gradient, formats[1], rtol, negligible)
    assert torch.equal(d_hidden.columns, d_hidden.rows.t())
    assert torch.equal(recomputed.rows, activated.rows)
    assert torch.equal(recomputed.columns, activated.rows.t())
    assert torch.equal(recomputed.scale_inv, activated.scale_inv)
    assert recomputed.amax == 0


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("tokens", "width"), [(64, 192), (10, 96), (1, 40)])
def test_bf16_values_and_gradients_are_those_of_autograd(
    tokens: int, width: int, gated: bool
) -> None:
    hidden, d_activated = inputs(tokens, width, gated=gated)
    *results, total = kernel.activate_backward(d_activated, hidden, gated=gated, summed=True)
    assert torch.equal(kernel.activate(hidden, gated=gated), results[1])
    exact, exact_gradient = by_autograd(hidden, d_activated, gated=gated)
    # The sum 1 + tanh(x) in FP64 has an absolute error.
    atol = 1e-30 if gated else 1e-12
    for actual, expected in zip(results, (exact_gradient, exact), strict=True):
        rounded = expected.bfloat16()
        torch.testing.assert_close(actual.float(), rounded.float(), rtol=2**-7, atol=atol)
        differs = (actual != rounded) & (expected.abs() > 1e3 * atol)
        assert differs.sum() <= 2 + 1e-3 * actual.numel()
    torch.testing.assert_close(total, exact_gradient.sum(0), rtol=1e-4, atol=1e-3)
    unsummed = kernel.activate_backward(d_activated, hidden, gated=gated, summed=False)
    assert unsummed[2] is None
    assert all(torch.equal(a, b) for a, b in zip(unsummed[:2], results, strict=True))


def test_extreme_gates_give_the_results_of_torchs_operations():
    special = [
        torch.nan,
        torch.inf,
        -torch.inf,
        3e38,
        -3e38,
        200.0,
        -200.0,
        90.0,
        -90.0,
        88.0,
        -87.0,
        1e-38,
        -1e-40,
        0.0,
        -0.0,
    ]
    hidden, d_activated = inputs(32, 128)
    hidden[:, :128] = torch.tensor(special * 3, device=DEVICE)[:32, None]
    gate, up = (half.float().requires_grad_() for half in hidden.chunk(2, dim=1))
    activated = torch.nn.functional.silu(gate) * up
    gradient = torch.cat(torch.autograd.grad(activated, (gate, up), d_activated.float()), dim=1)
    for actual, expected in zip(
        kernel.activate_backward(d_activated, hidden, gated=True, summed=False)[:2],
        (gradient, activated.detach()),
        strict=True,
    ):
        # Below -87 a sigmoid is less than FP32's smallest normal number. The kernel returns zero.
        torch.testing.assert_close(
            actual.float(), expected.bfloat16().float(), rtol=2**-7, atol=1e-33, equal_nan=True
        )
    # The codes are quantized from the BF16 values: they saturate, and NaN stays NaN.
    values = kernel.activate(hidden, gated=True)
    written = tensor_scaled(E4M3, (32, 128), scale=0.37)
    kernel.write_activated(hidden, written, gated=True)
    codes = written.rows.view(TORCH["E4M3"]).float()
    expected = tensor.quantize(values, written.scale, E4M3).codes
    torch.testing.assert_close(codes, expected, rtol=0, atol=0, equal_nan=True)
    assert written.amax.item() == torch.inf


def quantizer(te: Any, recipe: str, role: str) -> Any:
    """Return the library's quantizer of a role, E5M2 for gradients.

    With delayed scaling, the scale of the gradient saturates.
    """
    dtype = te.DType.kFloat8E5M2 if role == "gradient" else te.DType.kFloat8E4M3
    if recipe == "delayed":
        scale = torch.tensor([{"activated": 3.1, "gradient": 40.0}[role]], device="cuda")
        quantizer = te.Float8Quantizer(
            scale, torch.zeros(1, device="cuda"), dtype, rowwise=True, columnwise=True
        )
    else:
        quantizer = te.Float8CurrentScalingQuantizer(
            dtype, torch.device("cuda"), rowwise=True, columnwise=True
        )
    quantizer.internal = True
    return quantizer


@cuda_only
@pytest.mark.parametrize(("name", "gated"), [("swiglu", True), ("gelu", False)])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_codes_scales_and_amaxes_are_those_of_the_library(
    recipe: str, name: str, gated: bool
) -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    if not te.is_fp8_available():
        pytest.skip("needs FP8")
    import transformer_engine_torch as tex

    hidden, d_activated = inputs(1024, 1536, gated=gated)
    hidden[128:256] = 0
    quantizers, library_quantizers = (
        {role: quantizer(te, recipe, role) for role in ("activated", "gradient")} for _ in range(2)
    )
    activated, used_scale = kernel.quantized_activate(hidden, quantizers["activated"], gated=gated)
    if recipe == "delayed":  # delayed scaling changes its scales between forward and backward
        quantizers["activated"].scale.fill_(1e3)
    d_hidden, recomputed, _ = kernel.quantized_activate_backward(
        d_activated,
        hidden,
        quantizers["gradient"],
        quantizers["activated"],
        used_scale,
        gated=gated,
        summed=False,
    )
    expected = getattr(tex, name)(hidden, library_quantizers["activated"])
    expected_gradient = getattr(tex, f"d{name}")(
        d_activated, hidden, library_quantizers["gradient"]
    )
    # With delayed scaling, the library quantizes from FP32 and our kernel from BF16.
    share = 0.05 if recipe == "delayed" else FLIPPED
    assert activated._transpose is None
    assert recomputed._data is None
    assert close(activated._data, expected._data, share)
    assert close(recomputed._transpose, expected._transpose, share)
    gradient_codes = d_hidden._data
    if not gated:
        gradient_codes = without_negligible(
            gradient_codes,
            expected_gradient._data,
            TORCH["E5M2"],
            d_hidden._scale_inv,
            LIBRARY_ERROR * d_activated.float().abs(),
        )
        share = max(share, FLIPPED_IN_GELU)
    assert close(gradient_codes, expected_gradient._data, share)
    assert torch.equal(expected_gradient._transpose, expected_gradient._data.t())
    torch.testing.assert_close(activated._scale_inv, expected._scale_inv, rtol=1e-6, atol=0)
    rtol = 1e-6 if gated else LIBRARY_ERROR
    torch.testing.assert_close(d_hidden._scale_inv, expected_gradient._scale_inv, rtol=rtol, atol=0)
    if recipe == "delayed":
        for role in ("activated", "gradient"):
            torch.testing.assert_close(
                quantizers[role].amax, library_quantizers[role].amax, rtol=2**-8, atol=0
            )
            assert quantizers[role].amax > 0
    assert torch.equal(recomputed._transpose, activated._data.t())
    assert torch.equal(recomputed._scale_inv, activated._scale_inv)
    assert torch.equal(d_hidden._transpose, d_hidden._data.t())
