"""RMSNorm's kernels: the sum and the statistic against FP64, what is quantized against our quantizers, to the bit.

They run on a CPU too, under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pretrain.model.fused import norm_kernel as kernel
from pretrain.precision.fp8_tile import BlockScaled, TensorScaled
from pretrain.precision.quantizers import block, tensor
from pretrain.precision.quantizers.grid import E4M3, E5M2, Grid
from tests.gpu.interpreted import DEVICE, GPU_OR_INTERPRETER, INTERPRETED

pytestmark = [
    *GPU_OR_INTERPRETER,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities and NaN
    pytest.mark.usefixtures("conversions_that_round"),
]

EPS = 1e-6
TORCH = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
whether = st.booleans()


def inputs(tokens: int, width: int, *, add: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """x and what is added to it [tokens, width], and the norm's weight [width]; BF16, some rows small and some large."""
    generator = torch.Generator(DEVICE).manual_seed(tokens + width)
    x, residual = torch.randn(2, tokens, width, generator=generator, device=DEVICE)
    spread = torch.exp(3 * torch.randn(tokens, 1, generator=generator, device=DEVICE))
    weight = 1 + torch.randn(width, generator=generator, device=DEVICE) / 4
    return (spread * x).bfloat16(), (spread * residual).bfloat16() if add else None, weight.bfloat16()


def check_sum(x: Tensor, rstd: Tensor, before: Tensor, residual: Tensor | None) -> None:
    """x is torch's sum to the bit, and rstd that of FP64 but for its last bits."""
    assert torch.equal(x, before if residual is None else before + residual)
    exact = torch.rsqrt(x.double().square().mean(dim=1) + EPS)
    torch.testing.assert_close(rstd.double(), exact, rtol=3 * 2**-23, atol=0)


def normed(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """In FP32, rounded after each multiplication."""
    return weight.float() * (rstd[:, None] * x.float())


def tensor_scaled(grid: Grid, tokens: int, width: int, scale: float | None, *, power_of_two: bool, columns: bool) -> TensorScaled:
    one = torch.zeros(1, device=DEVICE)
    codes = [torch.full(shape, 99, dtype=torch.uint8, device=DEVICE) for shape in ((tokens, width), (width, tokens))]
    given = None if scale is None else torch.tensor([scale], device=DEVICE)
    rows, transposed = codes[0], codes[1] if columns else None
    return TensorScaled(TORCH[grid.name], rows, transposed, one.clone(), given, one.clone(), power_of_two=power_of_two)


def as_codes(values: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    return tensor.quantize(values, scale, grid).codes.to(TORCH[grid.name]).view(torch.uint8)


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.sampled_from([16, 48, 64]),
    width=st.sampled_from([64, 192, 512]),
    add=whether,
    grid=st.sampled_from([E4M3, E5M2]),
    scale=st.sampled_from([1.0, 130.0, None]),
    power_of_two=whether,
    columns=whether,
)
def test_one_scale_for_the_tensor(
    tokens: int, width: int, add: bool, grid: Grid, scale: float | None, power_of_two: bool, columns: bool
):
    """Delayed scaling with two scales, of which one saturates, and current scaling."""
    x, residual, weight = inputs(tokens, width, add=add)
    before = x.clone()
    written = tensor_scaled(grid, tokens, width, scale, power_of_two=power_of_two, columns=columns)
    rstd = kernel.rms_norm_scaled(x, residual, weight, EPS, written)
    check_sum(x, rstd, before, residual)
    values = normed(x, weight, rstd)
    if scale is None:
        values = values.bfloat16()
    assert torch.equal(written.amax, tensor.absolute_maximum(values).reshape(1).float())
    used = written.scale if scale else tensor.scale_from_amax(written.amax, grid.maximum, power_of_two=power_of_two)
    assert torch.equal(written.rows, as_codes(values, used, grid))
    assert torch.equal(written.scale_inv, tensor.decode_scale(used))
    assert written.columns is None or torch.equal(written.columns, written.rows.t())


@settings(max_examples=4, deadline=None)
@given(rows=st.integers(1, 2), columns=st.integers(1, 2), add=whether, power_of_two=whether)
def test_a_scale_for_every_128_values(rows: int, columns: int, add: bool, power_of_two: bool):
    tokens, width = 128 * rows, 128 * columns
    x, residual, weight = inputs(tokens, width, add=add)
    before = x.clone()
    codes = [torch.full(shape, 99, dtype=torch.uint8, device=DEVICE) for shape in ((tokens, width), (width, tokens))]
    scales = [torch.zeros(shape, device=DEVICE) for shape in ((width // 128, tokens), (rows, width))]
    written = BlockScaled(TORCH["E4M3"], codes[0], scales[0], codes[1], scales[1], power_of_two=power_of_two)
    rstd = kernel.rms_norm_blocks(x, residual, weight, EPS, written)
    check_sum(x, rstd, before, residual)
    values = normed(x, weight, rstd).bfloat16()
    for along, ours, scale_inv in zip((values, values.t()), codes, scales, strict=True):
        theirs = block.quantize(along, E4M3, two_dimensional=False, power_of_two=power_of_two)
        assert torch.equal(ours, theirs.codes.to(TORCH["E4M3"]).view(torch.uint8))
        assert torch.equal(scale_inv, theirs.block_scale[:, ::128].t())


@pytest.mark.parametrize("width", [64, 192, 1024])
@pytest.mark.parametrize("add", [False, True])
def test_bf16_is_written_as_it_is(width: int, add: bool):
    x, residual, weight = inputs(16, width, add=add)
    before = x.clone()
    y, rstd = kernel.rms_norm(x, residual, weight, EPS)
    check_sum(x, rstd, before, residual)
    assert torch.equal(y, normed(x, weight, rstd).bfloat16())


@pytest.mark.parametrize(("width", "tile"), [(128, (8, 128)), (2048, (2, 2048)), (5120, (4, 1024)), (8192, (1, 8192))])
def test_a_tile_in_bf16_leaves_registers_free(width: int, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    """128 threads with 255 registers at most: 8 rows of 2,048 values would take 128 in each for x alone."""
    x, _, weight = inputs(16, width, add=False)
    tiles, sized = [], kernel._tile
    monkeypatch.setattr(kernel, "_tile", lambda *given: tiles.append(sized(*given)) or tiles[-1])
    kernel.rms_norm(x, None, weight, EPS)
    assert tiles[0][:2] == tile


@settings(max_examples=8, deadline=None)
@given(
    tokens=st.sampled_from([1, 24, 72] if INTERPRETED else [1, 24, 1030, 4096]),
    width=st.sampled_from([64, 192, 2560]),
    add=whether,
)
def test_the_gradient_is_that_of_the_formula_in_fp64(tokens: int, width: int, add: bool):
    """Of widths and numbers of tokens that are no powers of two, with a row or more for each program."""
    tokens = min(tokens, 24) if INTERPRETED and width > 64 else tokens
    x, residual, weight = inputs(tokens, width, add=add)
    dy = inputs(tokens, width + 1, add=False)[0][:, :width].contiguous()
    _, rstd = kernel.rms_norm(x.clone(), None, weight, EPS)
    dx, of_weight = kernel.rms_norm_backward(dy, x, rstd, weight, residual)
    leaves = [each.double().requires_grad_() for each in (x, weight)]
    exact = leaves[0] * torch.rsqrt(leaves[0].square().mean(-1, keepdim=True) + EPS) * leaves[1]
    expected, expected_of_weight = torch.autograd.grad(exact, leaves, dy.double())
    expected = expected if residual is None else expected + residual
    assert dx.dtype == torch.bfloat16 and of_weight.dtype == torch.float32
    # One rounding, of a row's values at their largest where they cancel.
    assert ((dx - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * expected.abs().amax(1, keepdim=True)).all()
    terms = (dy.double() * leaves[0] * rstd[:, None]).abs().sum(0)
    assert ((of_weight - expected_of_weight).abs() <= 1e-5 * terms).all()
    again = kernel.rms_norm_backward(dy, x, rstd, weight, residual)
    assert torch.equal(dx, again[0]) and torch.equal(of_weight, again[1])


def test_every_tiling_writes_the_same():
    x, residual, weight = inputs(64, 256, add=True)
    found = []
    for tiling in (kernel.NormTiling(16, 64, 2), kernel.NormTiling(32, 256, 8), kernel.NormTiling(64, 128, 8, stages=3)):
        summed, written = x.clone(), tensor_scaled(E4M3, 64, 256, 3.0, power_of_two=False, columns=True)
        rstd = kernel.rms_norm_scaled(summed, residual, weight, EPS, written, tiling)
        check_sum(summed, rstd, x, residual)
        assert torch.equal(written.rows, as_codes(normed(summed, weight, rstd), written.scale, E4M3))
        assert torch.equal(written.columns, written.rows.t())
        found.append(summed)
    assert all(torch.equal(found[0], each) for each in found[1:])


def test_nan_and_infinity_stay_to_be_seen_and_spare_the_amax():
    x, residual, weight = inputs(16, 128, add=True)
    x[3, 5], residual[9, 7] = torch.nan, torch.inf
    written = tensor_scaled(E4M3, 16, 128, 1.0, power_of_two=False, columns=True)
    rstd = kernel.rms_norm_scaled(x, residual, weight, EPS, written)
    values = written.rows.view(TORCH["E4M3"]).float()
    assert x[3, 5].isnan() and x[9, 7] == torch.inf and rstd[3].isnan() and rstd[9] == 0
    assert values[3].isnan().all() and values[9, 7].isnan() and values.isnan().sum() == 129
    rest = [row for row in range(16) if row not in (3, 9)]
    assert torch.equal(written.amax, normed(x, weight, rstd)[rest].abs().max().reshape(1))


def test_rows_alone_have_the_bits_of_rows_with_columns():
    x, residual, weight = inputs(32, 512, add=True)
    found = []
    for columns in (False, True):
        written = tensor_scaled(E4M3, 32, 512, 1.0, power_of_two=False, columns=columns)
        rstd = kernel.rms_norm_scaled(x.clone(), residual, weight, EPS, written)
        found.append((rstd, written.rows, written.amax))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_same_input_gives_the_same_bits():
    x, residual, weight = inputs(128, 256, add=True)
    runs = []
    for _ in range(3):
        summed, written = x.clone(), tensor_scaled(E4M3, 128, 256, 1.0, power_of_two=False, columns=True)
        rstd = kernel.rms_norm_scaled(summed, residual, weight, EPS, written)
        runs.append((summed, rstd, written.rows, written.columns, written.amax, written.scale_inv))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_shapes_and_dtypes_of_no_whole_tiles_are_not_taken():
    takes = {
        shape: [kernel.divides(torch.zeros(shape, dtype=torch.bfloat16), to) for to in (None, TensorScaled, BlockScaled)]
        for shape in ((128, 128), (48, 576), (7, 192), (128, 80))
    }
    assert takes == {
        (128, 128): [True] * 3,
        (48, 576): [True, True, False],
        (7, 192): [True, False, False],
        (128, 80): [False] * 3,
    }
    assert not kernel.divides(torch.zeros(128, 128), None)
    assert not kernel.divides(torch.zeros(128, 256, dtype=torch.bfloat16)[:, ::2], None)
