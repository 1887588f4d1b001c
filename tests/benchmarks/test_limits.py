"""The machine's limits: which products a model has, and what a step of them takes."""

from __future__ import annotations

from benchmarks.limits import floors, stacked_products
from pretrain.metrics.flops import ModelFlops
from pretrain.model.huggingface import build_on_meta, load_config
from pretrain.settings.config import load_recipe
from tests.conftest import ROOT


def test_the_floor_of_a_step_is_the_sum_of_its_products_at_their_own_rates():
    tiny = load_recipe(ROOT / "benchmarks/tiny.yaml").model
    products = stacked_products(ModelFlops.of(build_on_meta(load_config(tiny))))
    kinds = ("forward", "dgrad", "wgrad")
    seconds = {
        precision: {product.name: dict.fromkeys(kinds, each) for product in products}
        for precision, each in (("bf16", 1.0), ("fp8", 0.5))
    }
    layers, linears, accumulation = 2, 4, 3
    once, body = 3 * accumulation, 3 * accumulation * layers * linears
    expected = {"bf16": body + once, "fp8": 0.5 * body + once, "fp8+head": 0.5 * body + 0.5 * once}
    assert floors(products, seconds, accumulation) == expected
