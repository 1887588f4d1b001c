"""SwiGLU's kernels: what they compute against the formulas and autograd, how they quantize against our quantizers.

They run on a CPU too, under Triton's interpreter (TRITON_INTERPRET=1). Its conversions to BF16 and FP8 do not round to nearest
even, nor keep subnormals; they are replaced here by ones that do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pretrain.model.fused import activation_kernel as kernel
from pretrain.model.fused.fp8_tile import TensorScaled
from pretrain.precision.quantizers import E4M3, E5M2, Grid, tensor
from tests.gpu.conftest import DEVICE, INTERPRETED, cuda_only

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities and NaN
    pytest.mark.usefixtures("conversions_that_round"),
]

TORCH = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
# The sigmoid is a few FP32 ulps off, 2^-21 or so; an FP8 rounding spans 2^-4 of a value at least and is decided by less than
# that for one value in 2^17, and twice for a value that is rounded to BF16 in between.
FLIPPED = 1e-4


def close(ours: Tensor, theirs: Tensor, share: float = FLIPPED) -> bool:
    """Codes, uint8: at most one apart, and few of them: as the exponentials' last bits decide a rounding now and then."""
    ordered = [torch.where(codes < 128, codes.int(), 128 - codes.int()) for codes in (ours, theirs)]
    apart = (ordered[0] - ordered[1]).abs()
    return (
        ours.shape == theirs.shape
        and int(apart.max()) <= 1
        and int((apart > 0).sum()) <= 2 + share * apart.numel()
    )


def inputs(tokens: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """hidden [tokens, 2 width] and the gradient of the activated values [tokens, width], BF16."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    hidden = 3 * torch.randn(tokens, 2 * width, generator=generator, device=DEVICE)
    hidden[::7, ::5] *= 20
    d_activated = torch.randn(tokens, width, generator=generator, device=DEVICE)
    return hidden.bfloat16(), (
        d_activated * torch.exp(torch.randn(tokens, 1, generator=generator, device=DEVICE))
    ).bfloat16()


def by_autograd(hidden: Tensor, d_activated: Tensor) -> tuple[Tensor, Tensor]:
    """The activated values and the gradient of hidden, of FP64 and then FP32."""
    exact = hidden.double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    activated = torch.nn.functional.silu(gate) * up
    (gradient,) = torch.autograd.grad(activated, exact, d_activated.double())
    return activated.detach().float(), gradient.float()


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.full(shape, 99, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=DEVICE)


def tensor_scaled(
    grid: Grid, shape: tuple[int, ...], *, scale: float | Tensor | None
) -> TensorScaled:
    """To be written both ways: with a given scale, or current scaling's."""
    dtype, one = TORCH[grid.name], torch.zeros(1, device=DEVICE)
    if isinstance(scale, float):
        scale = torch.tensor([scale], device=DEVICE)
    both = empty(dtype, *shape), empty(dtype, *reversed(shape))
    return TensorScaled(dtype, *both, one.clone(), scale, one.clone(), one.clone())


def check_tensor_scaled(written: TensorScaled, exact: Tensor, grid: Grid) -> None:
    values = exact.bfloat16()
    amax = tensor.absolute_maximum(exact if written.scale is None else values)
    torch.testing.assert_close(
        written.amax, amax.reshape(1), rtol=1e-6 if written.scale is None else 2**-8, atol=0
    )
    scale = written.scale
    if written.scale is None:  # of the amax that was found, which may be an ulp from ours
        scale = tensor.scale_from_amax(written.amax, grid.maximum)
    assert torch.equal(written.scale_inv, tensor.decode_scale(scale))
    assert close(
        written.rows,
        tensor.quantize(values, scale, grid).codes.to(TORCH[grid.name]).view(torch.uint8),
    )


@settings(max_examples=3 if INTERPRETED else 10, deadline=None)
@given(
    rows=st.integers(1, 2),
    columns=st.integers(1, 3),
    formats=st.sampled_from([(E4M3, E4M3), (E4M3, E5M2)]),
    scales=st.sampled_from([(1.0, 1.0), (3.1, 700.0), (None, None)]),
)
def test_one_scale_for_the_tensor(
    rows: int, columns: int, formats: tuple[Grid, Grid], scales: tuple[float | None, float | None]
):
    """Delayed scaling with two scales, of which the larger ones saturate, and current scaling."""
    tokens, width = 32 * rows, 128 * columns
    hidden, d_activated = inputs(tokens, width, seed=tokens + width)
    exact, exact_gradient = by_autograd(hidden, d_activated)
    activated = tensor_scaled(formats[0], (tokens, width), scale=scales[0])
    kernel.write_swiglu(hidden, activated)
    check_tensor_scaled(activated, exact, formats[0])

    d_hidden = tensor_scaled(formats[1], (tokens, 2 * width), scale=scales[1])
    again = tensor_scaled(formats[0], (tokens, width), scale=activated.used)
    kernel.write_swiglu_backward(d_activated, hidden, d_hidden, again)
    check_tensor_scaled(d_hidden, exact_gradient, formats[1])
    assert torch.equal(d_hidden.columns, d_hidden.rows.t())
    assert torch.equal(again.rows, activated.rows) and torch.equal(
        again.columns, activated.rows.t()
    )
    assert torch.equal(again.scale_inv, activated.scale_inv) and again.amax == 0


@pytest.mark.parametrize(("tokens", "width"), [(64, 192), (10, 96), (1, 40)])
def test_bf16_is_written_as_it_is(tokens: int, width: int):
    hidden, d_activated = inputs(tokens, width)
    both = kernel.swiglu_backward(d_activated, hidden)
    assert torch.equal(kernel.swiglu(hidden), both[1])
    for ours, exact in zip(both, reversed(by_autograd(hidden, d_activated)), strict=True):
        torch.testing.assert_close(ours.float(), exact.bfloat16().float(), rtol=2**-7, atol=1e-30)
        assert (ours != exact.bfloat16()).sum() <= 2 + 1e-3 * ours.numel()


def test_extreme_gates_give_what_torchs_own_operations_give():
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
    for ours, theirs in zip(
        kernel.swiglu_backward(d_activated, hidden), (gradient, activated.detach()), strict=True
    ):
        # Below -87 a sigmoid is less than FP32's least normal number, and is zero here.
        torch.testing.assert_close(
            ours.float(), theirs.bfloat16().float(), rtol=2**-7, atol=1e-33, equal_nan=True
        )
    # Codes are those of the values in BF16: they saturate and keep what is not a number.
    values, written = kernel.swiglu(hidden), tensor_scaled(E4M3, (32, 128), scale=0.37)
    kernel.write_swiglu(hidden, written)
    codes, expected = (
        written.rows.view(TORCH["E4M3"]).float(),
        tensor.quantize(values, written.scale, E4M3).codes,
    )
    torch.testing.assert_close(codes, expected, rtol=0, atol=0, equal_nan=True)
    assert written.amax.item() == torch.inf


def quantizer(te: Any, recipe: str, role: str) -> Any:
    """As the recipe's quantizers are made, delayed scaling's with scales of which one saturates; E5M2 for gradients."""
    dtype = te.DType.kFloat8E5M2 if role == "gradient" else te.DType.kFloat8E4M3
    if recipe == "delayed":
        scale = torch.tensor([{"activated": 3.1, "gradient": 40.0}[role]], device="cuda")
        made = te.Float8Quantizer(
            scale, torch.zeros(1, device="cuda"), dtype, rowwise=True, columnwise=True
        )
    else:
        made = te.Float8CurrentScalingQuantizer(
            dtype, torch.device("cuda"), rowwise=True, columnwise=True
        )
    made.internal = True
    return made


@cuda_only
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_values_transposes_scales_and_amaxes_are_those_of_the_library(recipe: str) -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    if not te.is_fp8_available():
        pytest.skip("needs FP8")
    import transformer_engine_torch as tex

    hidden, d_activated = inputs(1024, 1536)
    hidden[128:256] = 0
    ours, theirs = (
        {role: quantizer(te, recipe, role) for role in ("activated", "gradient")} for _ in range(2)
    )
    activated, kept = kernel.quantized_swiglu(hidden, ours["activated"])
    if recipe == "delayed":  # which moves its scales between forward and backward
        ours["activated"].scale.fill_(1e3)
    d_hidden, again = kernel.quantized_swiglu_backward(
        d_activated, hidden, ours["gradient"], ours["activated"], kept
    )
    expected = tex.swiglu(hidden, theirs["activated"])
    expected_gradient = tex.dswiglu(d_activated, hidden, theirs["gradient"])
    # which the library quantizes from FP32, and we from BF16
    share = 0.05 if recipe == "delayed" else 1e-4
    assert activated._transpose is None and again._data is None
    assert close(activated._data, expected._data, share)
    assert close(again._transpose, expected._transpose, share)
    assert close(d_hidden._data, expected_gradient._data, share)
    assert close(d_hidden._transpose, expected_gradient._transpose, share)
    torch.testing.assert_close(activated._scale_inv, expected._scale_inv, rtol=1e-6, atol=0)
    torch.testing.assert_close(d_hidden._scale_inv, expected_gradient._scale_inv, rtol=1e-6, atol=0)
    if recipe == "delayed":
        for role in ("activated", "gradient"):
            torch.testing.assert_close(ours[role].amax, theirs[role].amax, rtol=2**-8, atol=0)
            assert ours[role].amax > 0
    assert torch.equal(again._transpose, activated._data.t()) and torch.equal(
        again._scale_inv, activated._scale_inv
    )
    assert torch.equal(d_hidden._transpose, d_hidden._data.t())
