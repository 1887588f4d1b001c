"""The machine's limits: which products a model has, and what a step of them takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.limits import floors, fp8_product, plain_product, stacked_products
from pretrain.metrics.flops import ModelFlops
from pretrain.model.huggingface import build_on_meta, load_config
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import ModelSettings

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def flops_of(config: dict[str, object]) -> ModelFlops:
    return ModelFlops.of(build_on_meta(load_config(ModelSettings(config=config))))


@pytest.mark.parametrize(("name", "parameters"), [("qwen3_1_7b", 1_720_574_976), ("llama_3_1_8b", 8_030_261_248)])
def test_the_benchmarks_models_have_their_published_sizes_and_products(name: str, parameters: int):
    flops = flops_of(load_recipe(ROOT / f"benchmarks/{name}.yaml").model.config)
    products = stacked_products(flops)
    assert flops.parameters == parameters
    assert 3 * sum(2 * p.inputs * p.outputs * p.count for p in products) == flops.per_token_matrix


def test_the_floor_of_a_step_is_the_sum_of_its_products_at_their_own_rates():
    tiny = load_recipe(ROOT / "benchmarks/tiny.yaml").model.config
    products = stacked_products(flops_of(tiny))
    kinds = ("forward", "dgrad", "wgrad")
    seconds = {
        precision: {product.name: dict.fromkeys(kinds, each) for product in products}
        for precision, each in (("bf16", 1.0), ("fp8", 0.5))
    }
    layers, linears, accumulation = 2, 4, 3
    once, body = 3 * accumulation, 3 * accumulation * layers * linears
    expected = {"bf16": body + once, "fp8": 0.5 * body + once, "fp8+head": 0.5 * body + 0.5 * once}
    assert floors(products, seconds, accumulation) == expected


@pytest.mark.parametrize("make", [plain_product, fp8_product])
def test_each_product_has_the_shape_of_its_gradient_or_output(make: object):
    tokens, inputs, outputs = 48, 32, 16
    product = stacked_products(flops_of(load_recipe(ROOT / "benchmarks/tiny.yaml").model.config))[0]
    sizes = type(product)("one", inputs, outputs, 1).sizes(tokens)
    shapes = {which: tuple(make(which, *size, torch.bfloat16, CPU)().shape) for which, size in sizes.items()}
    assert shapes == {"forward": (tokens, outputs), "dgrad": (tokens, inputs), "wgrad": (outputs, inputs)}
