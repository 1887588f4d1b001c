"""docs/recipes.md follows from the recipes. Their models have the sizes of their sources."""

from __future__ import annotations

import pytest

from docs.recipes_page import FOLDER, page
from pretrain.metrics.flops import ModelFlops
from pretrain.model.huggingface import build_on_meta, load_config
from pretrain.settings.config import load_recipe

# Billions of parameters, computed from the shapes in the source documents.
SIZES = {
    "gpt2_fineweb_edu": 0.124,
    "gpt2_slimpajama": 1.27,
    "llama2_slimpajama": 1.294,
    "llama3_1_5b_slimpajama": 1.545,
    "llama3_2_2b_slimpajama": 2.224,
    "qwen3_slimpajama": 1.830,
}


def test_the_page_has_the_source_of_each_recipe():
    assert "| – |" not in page(), "the comment of a recipe needs a line that begins with `Source: `"


@pytest.mark.parametrize("name", SIZES)
def test_a_model_from_scratch_has_the_size_of_its_document(name: str):
    flops = ModelFlops.of(build_on_meta(load_config(load_recipe(FOLDER / f"{name}.yaml").model)))
    assert flops.parameters / 1e9 == pytest.approx(SIZES[name], rel=0.005)
    assert flops.shape.vocabulary % 128 == 0, "an FP8 head needs this"
