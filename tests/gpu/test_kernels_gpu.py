"""Compare each Triton kernel with its formula in FP64, and its FP8 codes with our quantizers.

Each kernel has an entry in `KERNELS`. The tests run on a GPU, and on a CPU under Triton's
interpreter (TRITON_INTERPRET=1). The kernels of attention and of AdamW have tests in other files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from types import SimpleNamespace as Inputs
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foundation.overrides import overridden
from packing.arrow import IGNORE
from pretrain.model.experts_kernel import combine, combine_backward
from pretrain.model.fused import activation_kernel, formulas, norm_kernel, rotary_kernel
from pretrain.model.fused.formulas import HeadNorms, Heads
from pretrain.model.fused.fp8_tile import TensorScaled
from pretrain.model.loss import softmax_kernel
from pretrain.model.loss.logit_change import UNCHANGED, LogitChange
from pretrain.model.loss.softmax_kernel import quantized_softmax_gradient, softmax_loss
from pretrain.precision.quantizers import E4M3, E5M2, tensor
from tests.gpu.conftest import DEVICE, cuda_only, relative_error, te_dtype

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities and NaN

FP32 = torch.float32
BF16 = torch.bfloat16
GRIDS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
E4M3_CODES, E5M2_CODES = GRIDS
# Relative error of storing an exact result.
ROUNDED = {BF16: 2**-8, FP32: 0.0}
EPS = 1e-6

Results = dict[str, Tensor]


def near(atol: float, rtol: float = 1e-5, dtype: torch.dtype | None = BF16) -> Callable[..., None]:
    """Return a check of each value of a result of `dtype`, which is BF16 or FP32 if it is None.

    `rtol` and `atol` are the errors before the result is rounded to its dtype.
    """

    def check(actual: Tensor, exact: Tensor) -> None:
        assert actual.dtype == (dtype or actual.dtype)
        tolerance = {"rtol": rtol + ROUNDED[actual.dtype], "atol": atol}
        torch.testing.assert_close(actual.double(), exact.double(), **tolerance, equal_nan=True)

    return check


def sums(actual: Tensor, exact: Tensor) -> None:
    """Check sums over tokens in FP32 by the norm of their error."""
    assert actual.dtype == FP32
    assert relative_error(actual, exact) < 1e-5


class Kernel(NamedTuple):
    """A kernel, its formula, and the inputs for which both are compared.

    Attributes:
        draw: Return inputs. Its arguments are one of `cases`, or of `large`, which need a GPU.
        compute: Return the kernel's results for the inputs. It also asserts what must be equal bit
            for bit.
        formula: Return the exact results.
        bounds: Check of each result.
    """

    draw: Callable[..., Inputs]
    compute: Callable[[Inputs], Results]
    formula: Callable[[Inputs], Results]
    bounds: dict[str, Callable[..., None]]
    cases: Sequence[tuple[Any, ...]] = ((),)
    large: Sequence[tuple[Any, ...]] = ()


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, BF16)


def leaf(values: Tensor) -> Tensor:
    return values.double().requires_grad_()


def mapped(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Apply a function to the tensors of inputs, except those of `HeadNorms`."""
    if isinstance(values, Inputs):
        return Inputs(**{name: mapped(function, value) for name, value in vars(values).items()})
    if isinstance(values, list):
        return [mapped(function, value) for value in values]
    return function(values) if isinstance(values, Tensor) else values


def exactly(compute: Callable[..., Results]) -> Callable[[Inputs], Results]:
    """Return the function that computes `compute` by plain torch in FP64."""

    def exact(i: Inputs) -> Results:
        doubled = mapped(Tensor.double, i)
        if norms := getattr(i, "norms", None):
            doubled.norms = HeadNorms(norms.query.double(), norms.key.double(), norms.eps)
        return compute(doubled, formulas)

    return exact


def equal(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for one, other in zip(actual, expected, strict=True):
        if one is not other:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# ── Softmax: the loss and the gradient of logits ──


# Gemma 2's cap, Cohere's factor, and a small cap, at which most logits saturate.
CHANGES = [LogitChange(cap=30.0), LogitChange(0.0625), LogitChange(1.5, 0.5)]


def logits(
    n: int,
    vocabulary: int,
    dtype: torch.dtype,
    scale: float,
    block: int,
    change: LogitChange = UNCHANGED,
) -> Inputs:
    """`block` logits are read at once."""
    values = (normal(n, n, vocabulary) * scale).to(dtype)
    labels = torch.randint(vocabulary, (n,), generator=torch.Generator().manual_seed(n)).to(DEVICE)
    labels[::5] = IGNORE
    return Inputs(logits=values, labels=labels, block=block, change=change)


def extreme_logits() -> Inputs:
    values = torch.zeros(6, 40)
    values[0] = torch.linspace(-1e4, 1e4, 40)
    # In FP32, a log-sum-exp of 1e4 has few digits for the differences of these logits.
    values[1] = 1e4 + torch.linspace(0, 3, 40)
    values[2] = -1e4 - torch.linspace(0, 3, 40)
    # The first and the last blocks have probability zero.
    values[3, :32] = -math.inf
    values[4, 8:] = -math.inf
    labels = torch.tensor([38, 7, 7, 35, 2, 0])
    return Inputs(logits=values.to(DEVICE), labels=labels.to(DEVICE), block=16, change=UNCHANGED)


def softmax(i: Inputs) -> Results:
    gradient = i.logits.clone()
    with overridden(softmax_kernel, BLOCK=i.block):
        options = {"ignore": IGNORE, "change": i.change}
        losses = softmax_loss(i.logits, i.labels, **options)
        equal([softmax_loss(gradient, i.labels, **options, with_gradient=True)], [losses])
    assert not gradient[i.labels == IGNORE].any()
    return {"losses": losses, "gradient": gradient}


def softmax_formula(i: Inputs) -> Results:
    exact = leaf(i.logits)
    scores = i.change(exact)
    losses = F.cross_entropy(scores, i.labels, ignore_index=IGNORE, reduction="none")
    losses.sum().backward()
    return {"losses": losses.detach(), "gradient": exact.grad}


SOFTMAX_BOUNDS = {"losses": near(1e-5, dtype=FP32), "gradient": near(2e-7, dtype=None)}


# ── Norms ──


def norm_inputs(tokens: int, width: int, centered: bool) -> Inputs:
    x, dy, residual = (normal(seed, tokens, width) for seed in range(3))
    weight = 1 + normal(3, width) / 4
    bias = normal(4, width) if centered else None
    return Inputs(x=x + centered, dy=dy, residual=residual, weight=weight, bias=bias)


def norm(i: Inputs, module: ModuleType = norm_kernel) -> Results:
    y, rstd, mean = module.norm(i.x, i.weight, i.bias, EPS)
    inputs = (i.dy, i.x, rstd, mean, i.weight, i.residual)
    dx, totals = module.norm_backward(*inputs, summed=True)
    unsummed = module.norm_backward(*inputs, summed=False)
    equal(unsummed, (dx, totals[: 1 if i.bias is None else 2]))
    return {"y": y, "dx": dx, **{f"sum {n}": total for n, total in enumerate(totals)}}


# ── Activations ──


def hidden(tokens: int, width: int, gated: bool) -> Inputs:
    """`hidden` is [tokens, 2 width] with a gate, and [tokens, width] without a gate."""
    values = 3 * normal(1, tokens, 2 * width if gated else width)
    values[::7, ::5] *= 20
    sizes = torch.exp(normal(3, tokens, 1))
    return Inputs(hidden=values, d_activated=normal(2, tokens, width) * sizes, gated=gated)


def extreme_gates() -> Inputs:
    large = [200.0, -200.0, 90.0, -90.0, 88.0, -87.0]
    special = [torch.nan, torch.inf, -torch.inf, 3e38, -3e38, *large, 1e-38, -1e-40, 0.0, -0.0]
    inputs = hidden(32, 128, True)
    inputs.hidden[:, :128] = torch.tensor(special * 3, device=DEVICE)[:32, None]
    return inputs


def activation(i: Inputs) -> Results:
    gradient, activated, total = activation_kernel.activate_backward(
        i.d_activated, i.hidden, gated=i.gated, summed=True
    )
    unsummed = activation_kernel.activate_backward(
        i.d_activated, i.hidden, gated=i.gated, summed=False
    )
    equal(unsummed, (gradient, activated, None))
    equal([activation_kernel.activate(i.hidden, gated=i.gated)], [activated])
    return {"activated": activated, "gradient": gradient, "total": total}


def activation_formula(i: Inputs, dtype: torch.dtype = torch.float64) -> Results:
    exact = i.hidden.to(dtype).requires_grad_()
    gate, *up = exact.chunk(2, dim=1) if i.gated else [exact]
    activated = F.silu(gate) * up[0] if i.gated else F.gelu(gate, approximate="tanh")
    activated.backward(i.d_activated.to(dtype))
    total = exact.grad.sum(0)
    return {"activated": activated.detach(), "gradient": exact.grad, "total": total}


# ── Rotation of queries and keys ──


def rows_of_heads(
    tokens: int, heads: Heads, normed: bool, rotated: bool = True, in_parts: bool = False
) -> Inputs:
    """Draw rows, angles of packed documents, norms, and gradients with the strides of attention's.

    With `in_parts`, the gradients of keys and values have one part per query head. The factor 0.9
    scales cos and sin as YaRN does.
    """
    frequencies = 10_000 ** (-torch.arange(heads.dim // 2, device=DEVICE) / (heads.dim // 2))
    angles = (torch.arange(tokens, device=DEVICE) % 1000)[:, None] * frequencies.repeat(2)
    gradients = [
        normal(seed, count, tokens, heads.dim).transpose(0, 1)
        for seed, count in enumerate((heads.query, heads.kv, heads.kv))
    ]
    if in_parts:
        parts = heads.query // heads.kv
        gradients[1:] = (normal(seed, tokens, heads.kv, parts, heads.dim) for seed in (1, 2))
    weights = [1 + normal(seed, heads.dim) / 4 for seed in (3, 4)]
    return Inputs(
        gradients=gradients,
        qkv=normal(5, tokens, heads.width),
        cos=(0.9 * angles.cos()).to(BF16) if rotated else None,
        sin=(0.9 * angles.sin()).to(BF16) if rotated else None,
        heads=heads,
        norms=HeadNorms(*weights, EPS) if normed else None,
    )


def rotation(i: Inputs, module: ModuleType = rotary_kernel) -> Results:
    names = ("q", "k", "v", "dqkv", "query norm", "key norm", "total")
    forward = (None, None, None)
    if i.cos is not None:
        forward = module.rotate(i.qkv, i.cos, i.sin, i.heads, i.norms)
    inputs = (*i.gradients, i.qkv if i.norms else None, i.cos, i.sin, i.heads, i.norms)
    dqkv, *of_norms, _ = module.rotate_backward(*inputs, summed=False)
    again, *_, total = module.rotate_backward(*inputs, summed=True)
    equal([again], [dqkv])
    results = zip(names, (*forward, dqkv, *of_norms, total), strict=True)
    return {name: result for name, result in results if result is not None}


# ── Sums of the choices of a token in a mixture of experts ──


def choices(tokens: int, count: int, width: int, dtype: torch.dtype) -> Inputs:
    """16 of the rows belong to no token."""
    generator = torch.Generator().manual_seed(0)
    rows = tokens * count + 16
    place = torch.randperm(rows, generator=generator)[: tokens * count].to(DEVICE)
    weights = torch.rand(tokens, count, generator=generator).to(DEVICE, dtype)
    return Inputs(
        rows=normal(1, rows, width), place=place, weights=weights, dy=normal(2, tokens, width)
    )


def experts(i: Inputs) -> Results:
    d_rows, d_weights = combine_backward(i.dy, i.rows, i.place, i.weights)
    return {
        "y": combine(i.rows, i.place, i.weights, len(i.dy)),
        "unweighted": combine(i.rows, i.place, None, len(i.dy)),
        "d_rows": d_rows[i.place],
        "d_weights": d_weights,
    }


def experts_formula(i: Inputs) -> Results:
    rows, weights = leaf(i.rows), leaf(i.weights)
    chosen = rows[i.place].unflatten(0, weights.shape)
    y = (chosen * weights[..., None]).sum(1)
    y.backward(i.dy.double())
    unweighted = chosen.detach().sum(1)
    d_rows = rows.grad[i.place]
    return {"y": y.detach(), "unweighted": unweighted, "d_rows": d_rows, "d_weights": weights.grad}


# ── Values ──

BOTH = (False, True)
SMALL_HEADS = [Heads(4, 2, 64), Heads(3, 1, 128), Heads(6, 2, 32)]
# Tokens and heads of Qwen3-1.7B, Llama-3.1-8B, Qwen2-0.5B, and of a model whose number of heads is
# not a power of two.
REAL_HEADS = [
    (32_768, Heads(16, 8, 128)),
    (8_191, Heads(32, 8, 128)),
    (4_097, Heads(14, 2, 64)),
    (1_001, Heads(15, 5, 64)),
]
TOTAL = near(1e-3, 1e-4, FP32)
KERNELS = {
    "softmax": Kernel(
        draw=logits,
        compute=softmax,
        formula=softmax_formula,
        bounds=SOFTMAX_BOUNDS,
        cases=[
            (n, vocabulary, dtype, scale, block)
            for dtype in (FP32, BF16)
            for n, vocabulary, scale, block in (
                (6, 1, 30.0, 64),
                (3, 17, 1.0, 16),
                (2, 16, 30.0, 16),
                (5, 64, 0.0, 64),
                (4, 150, 30.0, 16),
                (6, 150, 3.0, 8192),
            )
        ],
    ),
    "softmax of changed logits": Kernel(
        draw=logits,
        compute=softmax,
        formula=softmax_formula,
        bounds={"losses": near(1e-5, dtype=FP32), "gradient": near(1e-6, dtype=None)},
        cases=[
            (6, 150, dtype, 30.0, block, change)
            for dtype, block, change in itertools.product((FP32, BF16), (16, 8192), CHANGES)
        ],
    ),
    "softmax of extreme logits": Kernel(
        draw=extreme_logits, compute=softmax, formula=softmax_formula, bounds=SOFTMAX_BOUNDS
    ),
    "norm": Kernel(
        draw=norm_inputs,
        compute=norm,
        formula=exactly(norm),
        bounds={"y": near(1e-6), "dx": near(1e-5), **{f"sum {n}": sums for n in range(4)}},
        cases=[
            (tokens, width, centered)
            for tokens, width in ((5, 96), (64, 128), (27, 768), (9, 2048), (3, 5120), (150, 64))
            for centered in BOTH
        ],
        large=[(3000, 64, centered) for centered in BOTH],
    ),
    "activation": Kernel(
        draw=hidden,
        compute=activation,
        formula=activation_formula,
        # The sigmoid is approximate, and terms of a derivative may be almost equal.
        bounds={"activated": near(1e-12, 1e-3), "gradient": near(1e-12, 1e-3), "total": TOTAL},
        cases=[(*shape, gated) for shape in ((64, 192), (10, 96), (1, 40)) for gated in BOTH],
    ),
    "activation of extreme gates": Kernel(
        draw=extreme_gates,
        compute=activation,
        # FP64 would not overflow where the kernel does.
        formula=partial(activation_formula, dtype=FP32),
        # Below -87 a sigmoid is less than FP32's smallest normal number. The kernel returns zero.
        bounds={name: near(1e-33, 2**-8, None) for name in ("activated", "gradient", "total")},
    ),
    "rotation": Kernel(
        draw=rows_of_heads,
        compute=rotation,
        formula=exactly(rotation),
        bounds={
            **dict.fromkeys("qkv", near(2e-6, 4e-5)),
            "dqkv": near(4e-6, 4e-5),
            "total": TOTAL,
            "query norm": sums,
            "key norm": sums,
        },
        cases=[
            (32, Heads(3, 3, 64), False, False),
            (333, Heads(3, 3, 64), False, False),
            (37, Heads(4, 2, 64), True, True, True),
            (37, Heads(6, 3, 32), False, True, True),
            # The last tile is not full.
            *((37, heads, normed) for heads in SMALL_HEADS for normed in BOTH),
        ],
        large=[(*real, normed) for real in REAL_HEADS for normed in BOTH],
    ),
    "experts": Kernel(
        draw=choices,
        compute=experts,
        formula=experts_formula,
        bounds={
            "y": near(1e-5),
            "unweighted": near(1e-5),
            "d_rows": near(1e-9),
            "d_weights": near(1e-4, 1e-4, FP32),
        },
        cases=[
            (*shape, dtype)
            for shape in ((5, 1, 96), (17, 2, 128), (9, 8, 2048))
            for dtype in (FP32, BF16)
        ],
    ),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=[cuda_only] if case in kernel.large else [])
        for name, kernel in KERNELS.items()
        for case in (*kernel.cases, *kernel.large)
    ],
    ids=str,
)
def test_results_are_those_of_the_formula(name: str, case: tuple[Any, ...]) -> None:
    """Results also repeat bit for bit."""
    kernel = KERNELS[name]
    inputs = kernel.draw(*case)
    results = kernel.compute(inputs)
    exact = kernel.formula(inputs)
    assert results.keys() == exact.keys()
    for result, actual in results.items():
        assert actual.is_contiguous(), result
        assert actual.shape == exact[result].shape, result
        kernel.bounds[result](actual, exact[result])
    equal(kernel.compute(inputs).values(), results.values())


@pytest.mark.parametrize(
    ("label", "logit"), [(-7, 0.0), (40, 0.0), (5, math.nan), (5, math.inf), (IGNORE, math.nan)]
)
def test_a_bad_label_or_logit_affects_its_token_only(label: int, logit: float) -> None:
    """The gradient has no entry of a bad label."""
    inputs = logits(4, 40, FP32, 3.0, 8192)
    expected = softmax_formula(inputs)
    inputs.logits[2, 3] += logit
    inputs.labels[2] = label
    losses, gradient = softmax(inputs).values()
    for n, bound in enumerate(SOFTMAX_BOUNDS.values()):
        bound((losses, gradient)[n][[0, 1, 3]], [*expected.values()][n][[0, 1, 3]])
    if label == IGNORE:
        assert losses[2] == 0
    else:
        assert losses[2].isnan()
        SOFTMAX_BOUNDS["gradient"](gradient[2], inputs.logits[2].double().softmax(0))


# ── FP8 codes ──


def buffers(dtype: torch.dtype, shape: Sequence[int], scale: Tensor | float | None) -> TensorScaled:
    """Return buffers of both layouts. Without a `scale`, the kernel uses current scaling."""
    if isinstance(scale, float):
        scale = torch.tensor([scale], device=DEVICE)
    rows, columns = (
        torch.full(size, 99, dtype=torch.uint8, device=DEVICE) for size in (shape, shape[::-1])
    )
    scale_inv, amax, applied_scale = (torch.zeros(1, device=DEVICE) for _ in range(3))
    return TensorScaled(dtype, rows, columns, scale_inv, scale, amax, applied_scale)


def same_codes(codes: Tensor, values: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Assert that uint8 codes are those of our quantizer. All NaN are equal."""
    expected = tensor.quantize(values, scale, GRIDS[dtype]).codes.to(dtype)
    both_nan = codes.view(dtype).float().isnan() & expected.float().isnan()
    equal([codes.masked_fill(both_nan, 0)], [expected.view(torch.uint8).masked_fill(both_nan, 0)])


def check(written: TensorScaled, values: Tensor, exact: Tensor) -> None:
    """Compare codes of `values`, scale and amax with our quantizer.

    The amax of current scaling is that of the `exact` values, within the error of a derivative.
    """
    scale = written.scale
    if scale is None:
        amax = tensor.absolute_maximum(exact).reshape(1)
        torch.testing.assert_close(written.amax, amax, rtol=4e-6, atol=0)
        scale = tensor.scale_from_amax(written.amax, GRIDS[written.dtype].maximum)
    else:
        equal([written.amax], [tensor.absolute_maximum(values).reshape(1)])
    equal([written.scale_inv], [tensor.decode_scale(scale)])
    same_codes(written.rows, values, scale, written.dtype)


HIDDEN = [(32, 128, True), (64, 384, True), (32, 384, False), (64, 128, False)]
LARGE_HIDDEN = [(1024, 1536, True), (1024, 1536, False)]


@pytest.mark.parametrize("scale", [3.1, 3e4, None])
@pytest.mark.parametrize("dtype", [E4M3_CODES, E5M2_CODES])
@pytest.mark.parametrize(
    "case", [*HIDDEN, *(pytest.param(case, marks=cuda_only) for case in LARGE_HIDDEN)], ids=str
)
def test_activation_codes_are_those_of_the_bf16_results(
    case: tuple[Any, ...], dtype: torch.dtype, scale: float | None
) -> None:
    """The larger scale saturates. Backward computes the codes of forward again."""
    i = hidden(*case)
    results, exact = activation(i), activation_formula(i)
    activated = buffers(E4M3_CODES, i.d_activated.shape, scale)
    activation_kernel.write_activated(i.hidden, activated, gated=i.gated)
    check(activated, results["activated"], exact["activated"])
    gradient = buffers(dtype, i.hidden.shape, scale)
    recomputed = buffers(E4M3_CODES, i.d_activated.shape, activated.applied_scale)
    total = activation_kernel.write_activate_backward(
        i.d_activated, i.hidden, gradient, recomputed, gated=i.gated, summed=True
    )
    TOTAL(total, exact["total"])
    check(gradient, results["gradient"], exact["gradient"])
    equal([gradient.columns], [gradient.rows.t()])
    equal([recomputed.rows, recomputed.columns], [activated.rows, activated.rows.t()])
    equal([recomputed.scale_inv], [activated.scale_inv])
    assert recomputed.amax == 0


def test_codes_of_extreme_gates_saturate_and_keep_nan() -> None:
    i = extreme_gates()
    written = buffers(E4M3_CODES, i.d_activated.shape, 0.37)
    activation_kernel.write_activated(i.hidden, written, gated=True)
    values = activation_kernel.activate(i.hidden, gated=True)
    check(written, values, values)
    assert written.amax == torch.inf


@pytest.mark.parametrize("normed", BOTH)
@pytest.mark.parametrize("scale", [4096.0, 3e5])
@pytest.mark.parametrize(
    ("tokens", "heads", "in_parts"),
    [
        (64, SMALL_HEADS[0], False),
        (32, SMALL_HEADS[2], True),
        pytest.param(*REAL_HEADS[0], True, marks=cuda_only),
    ],
    ids=str,
)
def test_codes_of_a_rotated_gradient_are_those_of_the_bf16_gradient(
    tokens: int, heads: Heads, in_parts: bool, scale: float, normed: bool
) -> None:
    """The larger scale saturates. Sums keep their bits."""
    i = rows_of_heads(tokens, heads, normed, in_parts=in_parts)
    inputs = (*i.gradients, i.qkv if normed else None, i.cos, i.sin, heads, i.norms)
    values, *expected = rotary_kernel.rotate_backward(*inputs, summed=True)
    written = buffers(E5M2_CODES, i.qkv.shape, scale)
    _, *totals = rotary_kernel.rotate_backward(*inputs, written, summed=True)
    check(written, values, values)
    equal([written.columns], [written.rows.t()])
    equal(totals, expected)


@pytest.mark.parametrize(
    ("fp8", "shape", "scale"),
    [
        (E4M3_CODES, (16, 64), None),
        (E5M2_CODES, (32, 64), None),
        (E4M3_CODES, (24, 80), 1e6),
        (E5M2_CODES, (24, 80), 1e3),
    ],
)
@pytest.mark.parametrize("change", [UNCHANGED, *CHANGES], ids=str)
def test_codes_of_the_gradient_of_logits_are_those_of_the_bf16_gradient(
    fp8: torch.dtype, shape: tuple[int, int], scale: float | None, change: LogitChange
) -> None:
    """The row-wise form has one scale per row. The column-wise form has one scale."""
    i = logits(*shape, BF16, 3.0, softmax_kernel.BLOCK, change)
    losses, values = softmax(i).values()
    given = None if scale is None else torch.tensor(scale, device=DEVICE)
    maximum = GRIDS[fp8].maximum
    earlier_amax = 0.0 if scale is None else 1e-3
    amax = torch.full((1,), earlier_amax, device=DEVICE)
    fp8_losses, gradient = quantized_softmax_gradient(
        i.logits, i.labels, IGNORE, fp8, amax, given, change
    )
    equal([fp8_losses], [losses])
    assert amax.item() == max(earlier_amax, tensor.absolute_maximum(values).item())
    columns_scale = tensor.scale_from_amax(amax, maximum) if given is None else given
    equal([gradient.scale_inv], [tensor.decode_scale(columns_scale).reshape(1)])
    same_codes(gradient.columns, values.t(), columns_scale, fp8)
    row_scales = tensor.scale_from_amax(values.abs().amax(1).float(), maximum)
    equal([gradient.rows_scale_inv], [tensor.decode_scale(row_scales)])
    for codes, row, row_scale in zip(gradient.rows, values, row_scales, strict=True):
        same_codes(codes[None], row[None], row_scale, fp8)
    # Without a cap, the gradient at the label has the largest code, because it is the row's amax.
    tokens = (i.labels != IGNORE).nonzero()[:, 0]
    entries = gradient.rows.view(fp8).float()[tokens, i.labels[tokens]]
    assert change.cap or (entries == -maximum).all()


# ── More than 2^31 values ──


def softmax_and_codes(i: Inputs) -> Results:
    amax, scale = torch.zeros(1, device=DEVICE), torch.full((), 1e3, device=DEVICE)
    values = i.logits.clone()
    _, codes = quantized_softmax_gradient(values, i.labels, IGNORE, E5M2_CODES, amax, scale)
    rows = {"rows": codes.rows, "scales": codes.rows_scale_inv, "columns": codes.columns.t()}
    return rows | softmax(i)


@cuda_only
@pytest.mark.parametrize(
    ("compute", "draw", "case", "tokens"),
    [
        (softmax_and_codes, logits, (64, 151_936, BF16, 3.0, softmax_kernel.BLOCK), 14_208),
        (rotation, rows_of_heads, (64, Heads(32, 8, 128), False), 349_531),
        (rotation, rows_of_heads, (64, Heads(32, 8, 128), True), 349_531),
    ],
    ids=["softmax", "rotation", "rotation with norms"],
)
def test_offsets_beyond_32_bits_are_right(
    compute: Callable[[Inputs], Results],
    draw: Callable[..., Inputs],
    case: tuple[Any, ...],
    tokens: int,
) -> None:
    """The last 64 rows have the bits that they have alone. All rows before are equal."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    inputs = draw(*case)
    expected = compute(inputs)

    def behind_zeros(values: Tensor) -> Tensor:
        many = values.new_zeros(tokens, *values.shape[1:])
        many[-64:] = values
        return many

    results = compute(mapped(behind_zeros, inputs))
    assert max(rows.numel() for rows in results.values()) > 2**31
    for name, rows in results.items():
        if len(rows) == tokens:
            assert torch.equal(rows[-64:], expected[name]), name
            assert (rows[:-64] == rows[0]).all(), name


# ── Transformer Engine ──


@cuda_only
@pytest.mark.parametrize("gated", BOTH)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_activation_codes_scales_and_amaxes_are_those_of_the_library(
    te: ModuleType, recipe: str, gated: bool
) -> None:
    """With delayed scaling, the library quantizes from FP32 and our kernel from BF16."""
    if not te.is_fp8_available():
        pytest.skip("needs FP8")
    import transformer_engine_torch as tex

    def quantizer(scale: float, dtype: torch.dtype) -> Any:
        usages = {"rowwise": True, "columnwise": True}
        if recipe == "delayed":
            scale_and_amax = (torch.full((1,), value, device="cuda") for value in (scale, 0.0))
            made = te.Float8Quantizer(*scale_and_amax, te_dtype(te, dtype), **usages)
        else:
            made = te.Float8CurrentScalingQuantizer(
                te_dtype(te, dtype), torch.device("cuda"), **usages
            )
        made.internal = True
        return made

    # The quantizers of the activated values and of the gradient.
    ours, library = ([quantizer(3.1, E4M3_CODES), quantizer(40.0, E5M2_CODES)] for _ in range(2))
    i = hidden(1024, 1536, gated)
    i.hidden[128:256] = 0
    activated, scale = activation_kernel.quantized_activate(i.hidden, ours[0], gated=gated)
    if recipe == "delayed":  # delayed scaling changes its scales between forward and backward
        ours[0].scale.fill_(1e3)
    gradient, recomputed, _ = activation_kernel.quantized_activate_backward(
        i.d_activated, i.hidden, ours[1], ours[0], scale, gated=gated, summed=False
    )
    assert activated._transpose is recomputed._data is None
    equal(
        [recomputed._transpose, recomputed._scale_inv], [activated._data.t(), activated._scale_inv]
    )
    equal([gradient._transpose], [gradient._data.t()])
    name = "swiglu" if gated else "gelu"
    expected = getattr(tex, name)(i.hidden, library[0])
    expected_gradient = getattr(tex, f"d{name}")(i.d_activated, i.hidden, library[1])
    # Far below zero, the derivative of GELU is smaller than the library's error.
    kept = slice(None) if gated else i.hidden.abs() < 3
    share = 0.05 if recipe == "delayed" else 3e-3
    for actual, reference in ((activated, expected), (gradient, expected_gradient)):
        rtol = 1e-6 if gated else 4e-6
        torch.testing.assert_close(actual._scale_inv, reference._scale_inv, rtol=rtol, atol=0)
        codes, expected_codes = (
            torch.where(bits < 128, bits.int(), 128 - bits.int())
            for bits in (actual._data[kept], reference._data[kept])
        )
        distance = codes - expected_codes
        assert distance.abs().max() <= 1
        assert (distance != 0).float().mean() < share
    for quantizer, reference in zip(ours, library, strict=True) if recipe == "delayed" else ():
        torch.testing.assert_close(quantizer.amax, reference.amax, rtol=2**-8, atol=0)
        assert quantizer.amax > 0
