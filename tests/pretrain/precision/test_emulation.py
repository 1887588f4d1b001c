"""Emulated products equal FP64 products of the operands, which are quantized separately.

Recomputed layers compute the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundation.overrides import overridden
from pretrain.precision.product import LinearState, Probe
from pretrain.precision.quantizers import E2M1, E4M3, E5M2, Grid, blocks, tensor
from tests.pretrain.conftest import QUANTIZED, emulation_of, linear_of, to_nearest
from tests.pretrain.observe.test_operand_statistics import SmallModel

TOKENS, IN, OUT = 256, 128, 384


def operands(
    tokens: int = TOKENS, in_features: int = IN, out_features: int = OUT
) -> tuple[Tensor, ...]:
    """Return x, weight, bias and gradient of the product.

    Their magnitudes differ between blocks.
    """
    torch.manual_seed(0)
    shapes = ((tokens, in_features), (out_features, in_features), (tokens, out_features))
    x, weight, grad = (
        torch.randn(shape) * torch.exp2(torch.randint(-3, 4, shape).float()) for shape in shapes
    )
    bias = torch.randn(out_features)
    return tuple(values.bfloat16() for values in (x, 0.1 * weight, bias, 0.01 * grad))


def run(
    linear: LinearState,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad: Tensor,
    first_microbatch: bool = True,
) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of x, weight and bias."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    with overridden(linear.context, first_microbatch=first_microbatch):
        y = linear(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, grad)


Quantize = Callable[[Tensor], Tensor]


def fp8(recipe: str, *grids: Grid, squares: Sequence[bool] = (False,) * 6) -> list[Quantize]:
    """Return functions that quantize x to each grid along its last dimension and dequantize it."""
    one = torch.ones(())  # The first forward and backward of delayed scaling use scales of one.
    of_recipe = {
        "delayed": lambda x, grid, _: tensor.quantize(x, one, grid),
        "current": lambda x, grid, _: tensor.quantize_by_amax(x, None, grid),
        "block": lambda x, grid, square: blocks.quantize_fp8(x, grid, two_dimensional=square),
        "mxfp8": lambda x, grid, _: blocks.quantize_mx(x, grid),
    }[recipe]
    return [
        lambda x, grid=grid, square=square: of_recipe(x, grid, square).dequantize()
        for grid, square in zip(grids, squares, strict=True)
    ]


def fp4(transform: bool = False, square: bool = False) -> Quantize:
    """Return a function that quantizes x to NVFP4 and dequantizes it."""
    return lambda x: blocks.quantize_nvfp4(
        blocks.hadamard(x) if transform else x, two_dimensional=square
    ).dequantize()


def mxfp4(transform: bool = False) -> Quantize:
    """Return a function that quantizes x to MXFP4 and dequantizes it."""
    return lambda x: blocks.quantize_mx(blocks.hadamard(x) if transform else x, E2M1).dequantize()


HYBRID = (E4M3, E4M3, E5M2, E4M3, E5M2, E4M3)
SQUARES = (False, True, False, True, False, False)
NEAREST = {"disable_stochastic_rounding": True}
OF_NVFP4 = [fp4(), fp4(square=True)] * 2
# Options, and the functions that quantize the left and right operands of forward, dgrad and wgrad
# along their last dimension.
CASES: dict[str, tuple[dict[str, Any], list[Quantize]]] = {
    "delayed": ({}, fp8("delayed", *HYBRID)),
    "delayed E4M3": ({"fp8_format": "E4M3"}, fp8("delayed", *[E4M3] * 6)),
    "current": ({}, fp8("current", *HYBRID)),
    "block": ({}, fp8("block", *[E4M3] * 6, squares=SQUARES)),
    "mxfp8": ({}, fp8("mxfp8", *[E4M3] * 6)),
    "mxfp8 hybrid": ({"fp8_format": "HYBRID"}, fp8("mxfp8", *HYBRID)),
    "nvfp4": (NEAREST, OF_NVFP4 + [fp4(transform=True)] * 2),
    "nvfp4 plain": (NEAREST | {"disable_rht": True}, OF_NVFP4 + [fp4()] * 2),
    "mxfp4": (NEAREST, [mxfp4()] * 4 + [mxfp4(transform=True)] * 2),
}


def close(actual: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether `actual` is left right^T + bias, rounded to BF16.

    The tolerance allows for the order of FP32 sums.
    """
    left = left.double()
    right = right.double()
    exact = left @ right.t()
    magnitude = left.abs() @ right.abs().t()
    if bias is not None:
        exact = exact + bias.double()
        magnitude = magnitude + bias.double().abs()
    return bool(((actual.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-21 * magnitude).all())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_output_and_gradients_are_products_of_the_dequantized_operands(
    case: str, with_bias: bool
) -> None:
    options, (x_out, w_out, g_in, w_in, g_w, x_w) = CASES[case]
    emulation = emulation_of(case.split()[0], **options)
    linear = linear_of(emulation, IN, OUT)
    x, weight, bias, grad = operands()
    bias = bias if with_bias else None
    with emulation.forward():
        y, grad_x, grad_weight, *grad_bias = run(linear, x, weight, bias, grad)
    assert y.dtype == grad_x.dtype == grad_weight.dtype == torch.bfloat16
    assert close(y, x_out(x), w_out(weight), bias)
    assert close(grad_x, g_in(grad), w_in(weight.t()))
    assert close(grad_weight, g_w(grad.t()), x_w(x.t()))
    if with_bias:  # The bias's gradient is a sum of unquantized gradients.
        assert torch.equal(grad_bias[0], grad.float().sum(0).bfloat16())


def test_stochastic_rounding_depends_on_the_seed_for_gradients_only() -> None:
    emulation = emulation_of("nvfp4")
    linear = linear_of(emulation, IN, OUT)
    x, weight, _, grad = operands()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(run(linear, x, weight, None, grad))
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert torch.equal(runs[0][0], runs[2][0])
    assert not torch.equal(runs[0][1], runs[2][1]) and not torch.equal(runs[0][2], runs[2][2])
    torch.manual_seed(1)
    along_features = torch.rand(grad.shape)
    along_tokens = torch.rand_like(grad.t(), dtype=torch.float32)
    for result, values, uniform, other in (
        (runs[0][1], grad, along_features, fp4(square=True)(weight.t())),
        (runs[0][2], blocks.hadamard(grad.t()), along_tokens, fp4(transform=True)(x.t())),
    ):
        quantized = blocks.quantize_nvfp4(values, two_dimensional=False, uniform=uniform)
        assert close(result, quantized.dequantize(), other)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_recomputing_a_layer_changes_no_bit_of_gradients_or_state(recipe: str) -> None:
    results = []
    for recompute in (False, True):
        run = SmallModel(recipe)
        figures = []
        x = run.x.requires_grad_()
        layer = run.layers
        call = run.context.checkpoint if recompute else nn.Module.__call__
        for microbatch in range(5):  # two steps of two microbatches and one more microbatch
            run.context.first_microbatch = microbatch % 2 == 0
            torch.manual_seed(microbatch)
            scaled = x * 2.0**microbatch  # scales change between microbatches
            with run.context.forward(training=True):
                y = call(layer, call(layer, scaled))
            y.float().square().mean().backward()
            changed = [x.grad, *(weight.grad for weight in layer.parameters())]
            figures += [y, *changed, *run.engine.state().values()]
            figures = [figure.detach().clone() for figure in figures]
        results.append(figures)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_recomputation_uses_the_weights_quantized_in_forward() -> None:
    run = SmallModel("current")
    roles = Counter()

    class Roles(Probe):
        def operand(self, name: str, role: str, *_: Any) -> None:
            roles.update([role])

    with run.context.probing(Roles()):
        run.x.requires_grad_()
        run.step(recompute=True)
    assert roles == {"input": 2 * 2, "weight": 2, "grad_output": 2}
    assert run.context.first_microbatch


ROLES_AND_AXES = [
    ("input", "features"),
    ("input", "rows"),
    ("weight", "rows"),
    ("grad_output", "rows"),
]


@pytest.mark.parametrize(
    ("recipe", "compiles"),
    [
        *((recipe, False) for recipe in QUANTIZED),
        ("nvfp4", True),
        *(
            pytest.param(recipe, True, marks=pytest.mark.nightly)
            for recipe in QUANTIZED
            if recipe != "nvfp4"
        ),
    ],
)
def test_transposed_views_and_compiled_quantizers_have_the_same_codes(
    recipe: str, compiles: bool
) -> None:
    if compiles:
        torch._dynamo.reset()
    precision = emulation_of(recipe, **to_nearest(recipe)).precision
    x = operands(256, 384)[0]
    scale = torch.tensor(3.0) if precision.keeps_history else None
    for role, along in ROLES_AND_AXES:
        quantize = precision.quantizer(role, along)
        expected = quantize(x, scale, None)
        view = quantize(x.t().contiguous().t(), scale, None)
        assert torch.equal(view.codes, expected.codes) and torch.equal(
            view.dequantize(), expected.dequantize()
        )
        # one role per axis, because tracing is slow
        if compiles and (along == "features" or role == "grad_output"):
            compiled = torch.compile(
                lambda x, quantize=quantize: quantize(x, scale, None).operand,
                fullgraph=True,
                backend="eager",
            )
            assert torch.equal(compiled(x), expected.operand)
