"""SwiGLU's kernels: what they compute against the formulas and autograd, how they quantize against our quantizers.

They run on a CPU too, under Triton's interpreter (TRITON_INTERPRET=1). Its conversions to BF16 and FP8 do not round to nearest
even, nor keep subnormals; they are replaced here by ones that do.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pretrain.model.fused import activation_kernel as kernel
from pretrain.precision.fp8_tile import (
    FP32_MAX,
    BlockScaled,
    TensorScaled,
    pairs,
    reciprocal,
    record_amax,
    scale_from_amax,
    store_block_scaled,
    store_pairs_by_columns,
    store_pairs_by_rows,
    store_tensor_scaled,
    within,
)
from pretrain.precision.quantizers import block, tensor
from pretrain.precision.quantizers.grid import E4M3, E5M2, Grid
from pretrain.precision.quantizers.rounding import round_to_grid
from tests.gpu.interpreted import DEVICE, GPU_OR_INTERPRETER, INTERPRETED

pytestmark = [
    *GPU_OR_INTERPRETER,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities and NaN
    pytest.mark.usefixtures("conversions_that_round"),
]

TORCH = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
TRITON = {"E4M3": tl.float8e4nv, "E5M2": tl.float8e5}
by_grid = pytest.mark.parametrize("grid", [E4M3, E5M2], ids=lambda grid: grid.name)
by_power_of_two = pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32_scale", "power_of_two"])
# The sigmoid is a few FP32 ulps off, 2^-21 or so; an FP8 rounding spans 2^-4 of a value at least and is decided by less than
# that for one value in 2^17, and twice for a value that is rounded to BF16 in between.
FLIPPED = 1e-4


def decoded(codes: Tensor, grid: Grid) -> Tensor:
    return codes.view(TORCH[grid.name]).float()


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit, all NaN counting as one."""
    bits = ours.contiguous().view(torch.int32) == theirs.contiguous().view(torch.int32)
    return ours.shape == theirs.shape and bool((bits | (ours.isnan() & theirs.isnan())).all())


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Codes, uint8: at most one apart, and few of them."""
    ordered = [torch.where(codes < 128, codes.int(), 128 - codes.int()) for codes in (ours, theirs)]
    apart = (ordered[0] - ordered[1]).abs()
    print(f"{int((apart > 0).sum())} of {apart.numel()} codes differ")
    return ours.shape == theirs.shape and int(apart.max()) <= 1 and int((apart > 0).sum()) <= 2 + FLIPPED * apart.numel()


# ── Tiles ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _quantize(x, scale, rows, columns, amax, M, K, fp8: tl.constexpr, tile: tl.constexpr):
    i, j = tl.program_id(0) * tile + tl.arange(0, tile), tl.program_id(1) * tile + tl.arange(0, tile)
    values = tl.load(x + i[:, None] * K + j[None, :])
    record_amax(amax, values)
    store_tensor_scaled(values, tl.load(scale), rows, columns, i, j, M, K, fp8)


@triton.jit
def _quantize_blocks(
    x, rows, rows_scale_inv, columns, columns_scale_inv, M, K, power_of_two: tl.constexpr, fp8: tl.constexpr, height: tl.constexpr
):
    row, column = tl.program_id(0) * height, tl.program_id(1) * 128
    values = tl.load(x + (row + tl.arange(0, height))[:, None] * K + (column + tl.arange(0, 128))[None, :]).to(tl.float32)
    store_block_scaled(values, rows, rows_scale_inv, columns, columns_scale_inv, row, column, M, K, 0.0, power_of_two, fp8)


@triton.jit
def _quantize_pairs(
    x, rows, rows_scale_inv, columns, columns_scale_inv, M, K, epsilon, power_of_two: tl.constexpr, fp8: tl.constexpr
):
    """By rows a tile in two halves, by columns in one piece."""
    row, column = tl.program_id(0) * 128, tl.program_id(1) * 128
    i, j = 4 * tl.arange(0, 32), tl.arange(0, 64)
    for k in tl.static_range(2):
        at = within(x, row + 2 * k, column, K, i, j)
        left = pairs(tl.load(at).to(tl.float32), tl.load(at + K).to(tl.float32))
        right = pairs(tl.load(at + 64).to(tl.float32), tl.load(at + K + 64).to(tl.float32))
        store_pairs_by_rows(left, right, rows, rows_scale_inv, row + 2 * k, column, M, K, epsilon, power_of_two, fp8)
    at = within(x, row, column, K, i, tl.arange(0, 128))
    above = pairs(tl.load(at).to(tl.float32), tl.load(at + K).to(tl.float32))
    below = pairs(tl.load(at + 2 * K).to(tl.float32), tl.load(at + 3 * K).to(tl.float32))
    store_pairs_by_columns(above, below, columns, columns_scale_inv, row, column, M, K, epsilon, power_of_two, fp8)


@triton.jit
def _scales(amax, scale, scale_inv, epsilon, power_of_two: tl.constexpr, fp8: tl.constexpr, count: tl.constexpr):
    at = tl.arange(0, count)
    value = scale_from_amax(tl.load(amax + at), epsilon, FP32_MAX, power_of_two, fp8)
    tl.store(scale + at, value)
    tl.store(scale_inv + at, reciprocal(value, power_of_two))


def special_values() -> Tensor:
    """256 x 384, BF16: ordinary, tiny, huge, zeros, and blocks with NaN and infinities among their values, or nothing else."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(256, 384, generator=generator, device=DEVICE)
    x *= torch.exp(4 * torch.randn(256, 1, generator=generator, device=DEVICE))
    x[:40, :128] = x[:40, :128].sign() * torch.exp2(torch.randint(-133, 128, (40, 128), generator=generator, device=DEVICE))
    x[40:48], x[48:52, 128:], x[52], x[53] = 0, -0.0, 1e-40, 1e-36
    x[60, 5], x[61, 130], x[62], x[63] = torch.nan, torch.inf, torch.nan, -torch.inf
    return x.bfloat16()


@by_grid
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0e38])
def test_a_tile_is_quantized_with_one_scale_as_ours_does_to_the_bit(grid: Grid, scale: float):
    x, factor = special_values().float(), torch.tensor([scale], device=DEVICE)
    amax = torch.tensor([1e-3], device=DEVICE)
    rows, columns = (torch.zeros(shape, dtype=torch.uint8, device=DEVICE) for shape in ((256, 384), (384, 256)))
    _quantize[(4, 6)](x, factor, rows, columns, amax, 256, 384, TRITON[grid.name], 64)
    assert same(decoded(rows, grid), tensor.quantize(x, factor, grid).codes)
    assert torch.equal(columns, rows.t())
    assert amax.item() == torch.inf == tensor.absolute_maximum(x)
    x[61, 130], x[63] = 0, 0  # the infinities
    amax.fill_(1e-3)
    alone = torch.zeros_like(rows)
    _quantize[(4, 6)](x, factor, alone, None, amax, 256, 384, TRITON[grid.name], 64)
    assert amax == tensor.absolute_maximum(x) and same(decoded(alone, grid), tensor.quantize(x, factor, grid).codes)


@by_grid
@by_power_of_two
def test_a_tile_is_quantized_in_blocks_as_ours_does_to_the_bit(grid: Grid, power_of_two: bool):
    x = special_values()
    M, K = x.shape
    codes = [torch.zeros(shape, dtype=torch.uint8, device=DEVICE) for shape in ((M, K), (K, M))]
    scales = [torch.zeros(shape, device=DEVICE) for shape in ((K // 128, M), (M // 128, K))]
    options = (M, K, power_of_two, TRITON[grid.name], 128)
    _quantize_blocks[(M // 128, K // 128)](x, codes[0], scales[0], codes[1], scales[1], *options)
    for along, ours, scale_inv in zip((x, x.t()), codes, scales, strict=True):
        theirs = block.quantize(along, grid, two_dimensional=False, power_of_two=power_of_two)
        assert same(decoded(ours, grid), theirs.codes)
        assert same(scale_inv, theirs.block_scale[:, ::128].t())
    alone, scale_inv = torch.zeros_like(codes[0]), torch.zeros_like(scales[0])
    _quantize_blocks[(M // 32, K // 128)](x, alone, scale_inv, None, None, *options[:-1], 32)
    assert torch.equal(alone, codes[0]) and torch.equal(scale_inv, scales[0])


@by_grid
@by_power_of_two
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_pairs_of_rows_are_quantized_in_blocks_as_ours_are_to_the_bit(grid: Grid, power_of_two: bool, epsilon: float):
    x = special_values()
    x[:, 300:302], x[128:, 302] = torch.nan, torch.nan  # columns of nothing else, and a row
    x[70] = torch.nan
    M, K = x.shape
    codes = [torch.full(shape, 99, dtype=torch.uint8, device=DEVICE) for shape in ((M, K), (K, M))]
    scales = [torch.full(shape, 99.0, device=DEVICE) for shape in ((K // 128, M), (M // 128, K))]
    both = (codes[0], scales[0], codes[1], scales[1])
    _quantize_pairs[(M // 128, K // 128)](x, *both, M, K, epsilon, power_of_two, TRITON[grid.name])
    for along, ours, scale_inv in zip((x, x.t()), codes, scales, strict=True):
        blocks = along.float().reshape(along.shape[0], -1, 128)
        amax = torch.where(blocks.isnan(), 0, blocks.abs()).amax(dim=2).clamp(min=epsilon)
        scale = tensor.scale_from_amax(amax, grid.maximum, power_of_two=power_of_two, overflow=torch.finfo(torch.bfloat16).max)
        assert same(scale_inv, tensor.decode_scale(scale).t())
        assert same(decoded(ours, grid), round_to_grid(along.float() * scale.repeat_interleave(128, dim=1), grid))


@by_grid
@by_power_of_two
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_scales_follow_from_amaxes_as_ours_do_to_the_bit(grid: Grid, power_of_two: bool, epsilon: float):
    bits = torch.randint(0, 0x7F800000, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    amax = bits.view(torch.float32)
    amax[:8] = torch.tensor([0.0, 1e-45, 1e-38, 2.0**-119, torch.inf, 1.75 * 2.0**5, 1.7500001 * 2.0**5, 448.0])
    amax = amax.to(DEVICE)
    scale, scale_inv = torch.zeros_like(amax), torch.zeros_like(amax)
    _scales[(1,)](amax, scale, scale_inv, epsilon, power_of_two, TRITON[grid.name], 4096)
    expected = tensor.scale_from_amax(amax.clamp(min=epsilon), grid.maximum, power_of_two=power_of_two)
    assert same(scale, expected) and same(scale_inv, tensor.decode_scale(expected))


# ── SwiGLU ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def inputs(tokens: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """hidden [tokens, 2 width] and the gradient of the activated values [tokens, width], BF16."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    hidden = 3 * torch.randn(tokens, 2 * width, generator=generator, device=DEVICE)
    hidden[::7, ::5] *= 20
    d_activated = torch.randn(tokens, width, generator=generator, device=DEVICE)
    return hidden.bfloat16(), (d_activated * torch.exp(torch.randn(tokens, 1, generator=generator, device=DEVICE))).bfloat16()


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
    grid: Grid, shape: tuple[int, ...], *, scale: float | Tensor | None, power_of_two: bool = False
) -> TensorScaled:
    """To be written both ways: with a given scale, or current scaling's."""
    dtype, one = TORCH[grid.name], torch.zeros(1, device=DEVICE)
    if isinstance(scale, float):
        scale = torch.tensor([scale], device=DEVICE)
    both = empty(dtype, *shape), empty(dtype, *reversed(shape))
    return TensorScaled(dtype, *both, one.clone(), scale, one.clone(), one.clone(), power_of_two=power_of_two)


def block_scaled(grid: Grid, tokens: int, width: int, power_of_two: bool) -> BlockScaled:
    dtype, fp32 = TORCH[grid.name], torch.float32
    rows = empty(dtype, tokens, width), empty(fp32, width // 128, tokens)
    columns = empty(dtype, width, tokens), empty(fp32, tokens // 128, width)
    return BlockScaled(dtype, *rows, *columns, power_of_two=power_of_two)


def check_tensor_scaled(written: TensorScaled, exact: Tensor, grid: Grid, *, power_of_two: bool) -> None:
    values = exact.bfloat16()
    amax = tensor.absolute_maximum(exact if written.scale is None else values)
    torch.testing.assert_close(written.amax, amax.reshape(1), rtol=1e-6 if written.scale is None else 2**-8, atol=0)
    scale = written.scale
    if written.scale is None:  # of the amax that was found, which may be an ulp from ours
        scale = tensor.scale_from_amax(written.amax, grid.maximum, power_of_two=power_of_two)
    assert torch.equal(written.scale_inv, tensor.decode_scale(scale))
    assert close(written.rows, tensor.quantize(values, scale, grid).codes.to(TORCH[grid.name]).view(torch.uint8))


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    formats=st.sampled_from([(E4M3, E4M3), (E4M3, E5M2)]),
    scales=st.sampled_from([(1.0, 1.0), (3.1, 700.0), (None, None)]),
    power_of_two=st.booleans(),
)
def test_one_scale_for_the_tensor(
    rows: int, columns: int, formats: tuple[Grid, Grid], scales: tuple[float | None, float | None], power_of_two: bool
):
    """Delayed scaling with two scales, of which the larger ones saturate, and current scaling."""
    tokens, width = 64 * rows, 64 * columns
    hidden, d_activated = inputs(tokens, width, seed=tokens + width)
    exact, exact_gradient = by_autograd(hidden, d_activated)
    activated = tensor_scaled(formats[0], (tokens, width), scale=scales[0], power_of_two=power_of_two)
    kernel.forward(hidden, activated)
    check_tensor_scaled(activated, exact, formats[0], power_of_two=power_of_two)

    d_hidden = tensor_scaled(formats[1], (tokens, 2 * width), scale=scales[1], power_of_two=power_of_two)
    again = tensor_scaled(formats[0], (tokens, width), scale=activated.used)
    kernel.backward(d_activated, hidden, d_hidden, again)
    check_tensor_scaled(d_hidden, exact_gradient, formats[1], power_of_two=power_of_two)
    assert torch.equal(d_hidden.columns, d_hidden.rows.t())
    assert torch.equal(again.rows, activated.rows) and torch.equal(again.columns, activated.rows.t())
    assert torch.equal(again.scale_inv, activated.scale_inv) and again.amax == 0


@settings(max_examples=4, deadline=None)
@given(rows=st.integers(1, 2), columns=st.integers(1, 2), grid=st.sampled_from([E4M3, E5M2]), power_of_two=st.booleans())
def test_a_scale_for_every_128_values(rows: int, columns: int, grid: Grid, power_of_two: bool):
    tokens, width = 128 * rows, 128 * columns
    hidden, d_activated = inputs(tokens, width, seed=tokens + width)
    exact, exact_gradient = by_autograd(hidden, d_activated)
    forward, again, d_hidden = (block_scaled(grid, tokens, columns, power_of_two) for columns in (width, width, 2 * width))
    kernel.forward_blocks(hidden, forward)
    kernel.backward_blocks(d_activated, hidden, d_hidden, again)
    for values, codes, scale_inv in (
        (exact, forward.rows, forward.rows_scale_inv),
        (exact.t(), again.columns, again.columns_scale_inv),
        (exact_gradient, d_hidden.rows, d_hidden.rows_scale_inv),
        (exact_gradient.t(), d_hidden.columns, d_hidden.columns_scale_inv),
    ):
        theirs = block.quantize(values.bfloat16(), grid, two_dimensional=False, power_of_two=power_of_two)
        differ = scale_inv != theirs.block_scale[:, ::128].t()
        assert differ.float().mean() <= 1e-3  # a block whose largest value went to the other BF16 neighbour
        same_scale = ~differ.t().repeat_interleave(128, dim=1)
        assert close(codes[same_scale], theirs.codes.to(TORCH[grid.name]).view(torch.uint8)[same_scale])


@pytest.mark.parametrize(("tokens", "width"), [(128, 192), (10, 96), (1, 40)])
def test_bf16_is_written_as_it_is(tokens: int, width: int):
    hidden, d_activated = inputs(tokens, width)
    both = kernel.backward_bf16(d_activated, hidden)
    assert torch.equal(kernel.forward_bf16(hidden), both[1])
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
        1.0,
    ]
    hidden, d_activated = inputs(len(special), 64)
    hidden[:, :64] = torch.tensor(special, device=DEVICE)[:, None]
    gate = hidden[:, :64].float().requires_grad_()
    up = hidden[:, 64:].float().requires_grad_()
    activated = torch.nn.functional.silu(gate) * up
    gradient = torch.cat(torch.autograd.grad(activated, (gate, up), d_activated.float()), dim=1)
    for ours, theirs in zip(kernel.backward_bf16(d_activated, hidden), (gradient, activated.detach()), strict=True):
        # Below -87 a sigmoid is less than FP32's least normal number, and is zero here.
        torch.testing.assert_close(ours.float(), theirs.bfloat16().float(), rtol=2**-7, atol=1e-33, equal_nan=True)
    assert same(kernel.forward_bf16(hidden).float(), kernel.backward_bf16(d_activated, hidden)[1].float())


@pytest.mark.parametrize("width", [64, 128], ids=["narrow", "wide"])
def test_nan_and_infinity_stay_to_be_seen_and_spare_the_amax(width: int):
    hidden, d_activated = inputs(64, width)
    hidden[3, 5], hidden[9, width + 7] = torch.nan, torch.inf
    d_activated[20, 11] = torch.nan
    activated = tensor_scaled(E4M3, (64, width), scale=1.0)
    kernel.forward(hidden, activated)
    d_hidden, again = tensor_scaled(E5M2, (64, 2 * width), scale=1.0), tensor_scaled(E4M3, (64, width), scale=1.0)
    kernel.backward(d_activated, hidden, d_hidden, again)
    values, gradients = decoded(activated.rows, E4M3), decoded(d_hidden.rows, E5M2)
    assert values[3, 5].isnan() and values.isnan().sum() == 1 and values[9, 7].abs() == 448
    assert (
        gradients[3, [5, width + 5]].isnan().all()
        and gradients[20, [11, width + 11]].isnan().all()
        and gradients.isnan().sum() == 4
    )
    assert activated.amax == torch.inf and torch.equal(decoded(d_hidden.columns, E5M2).isnan(), gradients.t().isnan())


@pytest.mark.parametrize("current", [False, True], ids=["delayed", "current"])
def test_the_same_input_gives_the_same_bits(current: bool):
    size = 64 if INTERPRETED else 256  # the interpreter runs one program after the other
    hidden, d_activated = inputs(size, size)
    runs = []
    for _ in range(3):
        d_hidden = tensor_scaled(E5M2, (size, 2 * size), scale=None if current else 1.0)
        again = tensor_scaled(E4M3, (size, size), scale=1.0)
        kernel.backward(d_activated, hidden, d_hidden, again)
        runs.append((d_hidden.rows, d_hidden.columns, d_hidden.amax, d_hidden.scale_inv, again.columns))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
