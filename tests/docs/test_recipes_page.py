"""docs/recipes.md is what the recipes say, and recipes have the sizes of the documents that they come from."""

from __future__ import annotations

import pytest

from docs.recipes_page import FOLDER, page
from pretrain.metrics.flops import ModelFlops
from pretrain.model.huggingface import build_on_meta, load_config
from pretrain.settings.config import load_recipe
from tests.conftest import ROOT

# Billions of parameters, by the arithmetic of the documents' own shapes.
SIZES = {
    "gpt2_fineweb_edu": 0.124,
    "gpt2_slimpajama": 1.27,
    "llama2_slimpajama": 1.294,
    "llama3_1_5b_slimpajama": 1.545,
    "llama3_2_2b_slimpajama": 2.224,
    "qwen3_slimpajama": 1.830,
}


def test_the_page_of_recipes_is_current():
    assert (ROOT / "docs/recipes.md").read_text(encoding="utf-8") == page(), "make docs"


@pytest.mark.parametrize("name", SIZES)
def test_a_model_from_scratch_has_the_size_of_its_document(name: str):
    flops = ModelFlops.of(build_on_meta(load_config(load_recipe(FOLDER / f"{name}.yaml").model)))
    assert flops.parameters / 1e9 == pytest.approx(SIZES[name], rel=0.005)
    assert flops.shape.vocabulary % 128 == 0, "what an FP8 head needs"
