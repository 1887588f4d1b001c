"""How operands are quantized: what serves both directions, what is rounded by chance, views and compilers."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.quantizers import Quantized
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings

QUANTIZED = [name for name, recipe in PRECISIONS.items() if recipe.quantized]
ROLES, ALONG = get_args(Role), get_args(Along)


def active(recipe: str, **options: Any) -> ActivePrecision:
    return ActivePrecision(recipe, PRECISIONS[recipe], "emulation", LowPrecisionSettings(**options).resolved(recipe))


def values(rows: int = 256, features: int = 384) -> Tensor:
    """Of many magnitudes, so that blocks along one axis have other scales than blocks along the other."""
    torch.manual_seed(0)
    spread = torch.exp2(torch.randint(-6, 7, (rows, features)).float())
    return (torch.randn(rows, features) * spread).bfloat16()


def quantize_operand(case: ActivePrecision, role: Role, x: Tensor, *, along: Along, scale: Tensor | None = None) -> Quantized:
    return case.precision.quantizer(case.settings, role, along)(x, scale, None)


def quantized(case: ActivePrecision, role: Role, x: Tensor, along: Along) -> Quantized:
    scale = torch.tensor(3.0) if case.precision.keeps_history else None
    torch.manual_seed(1)  # for stochastic rounding
    return quantize_operand(case, role, x, along=along, scale=scale)


@pytest.mark.parametrize(
    ("recipe", "both"),
    [("delayed", set(ROLES)), ("current", set(ROLES)), ("block", {"weight"}), ("mxfp8", set()), ("nvfp4", {"weight"})],
)
def test_one_quantization_serves_both_directions_exactly_where_the_recipe_says_so(recipe: str, both: set[str]) -> None:
    case, x = active(recipe), values()
    for role in ROLES:
        assert case.precision.serves_both(role) == (role in both)
        along_features, along_rows = (quantized(case, role, x, along).dequantize() for along in ALONG)
        assert torch.equal(along_features.t(), along_rows) == (role in both)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
def test_stochastic_rounding_is_right_on_average(recipe: str) -> None:
    case = active(recipe, disable_rht=True)
    torch.manual_seed(0)
    x = torch.rand(64, 64).bfloat16()
    x[:, ::16] = 1.0  # the same scale everywhere
    draws = torch.stack([quantize_operand(case, "grad_output", x, along="features").dequantize() for _ in range(400)])
    to_nearest = quantize_operand(case, "input", x, along="features").dequantize()
    bias = (draws.mean(0) - x.float())[:, 1:16].mean()
    assert bias.abs() < 1e-3
    assert (draws.mean(0) - x.float()).norm() < 0.2 * (to_nearest - x.float()).norm()


def test_a_transposed_view_is_quantized_like_its_copy() -> None:
    for recipe, role, along in itertools.product(QUANTIZED, ROLES, ALONG):
        if role != "grad_output":  # where the draws of stochastic rounding follow the memory's order
            case, x = active(recipe), values().t()
            ours, expected = quantized(case, role, x, along), quantized(case, role, x.contiguous(), along)
            assert torch.equal(ours.codes, expected.codes) and torch.equal(ours.dequantize(), expected.dequantize())


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_compiler_sees_one_graph_and_gives_the_same_codes(recipe: str) -> None:
    torch._dynamo.reset()
    to_nearest = {"disable_stochastic_rounding": True} if "disable_stochastic_rounding" in PRECISIONS[recipe].options else {}
    case, x = active(recipe, **to_nearest), values()
    scale = torch.tensor(3.0) if case.precision.keeps_history else None
    for role, along in (("input", "features"), ("weight", "rows"), ("grad_output", "rows")):
        quantize = case.precision.quantizer(case.settings, role, along)
        compiled = torch.compile(lambda x, quantize=quantize: quantize(x, scale, None).operand, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), quantize(x, scale, None).operand)
