"""The recipes name their sources, and their models have the sizes of their sources."""

from __future__ import annotations

import pytest

from docs.recipes_page import FOLDER, top_comment
from pretrain.metrics.flops import ModelFlops
from pretrain.model.configuration import load_config
from pretrain.model.huggingface import build_on_meta
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


def test_the_comment_of_each_recipe_names_its_source():
    for path in FOLDER.glob("*.yaml"):
        assert any(line.startswith("Source: ") for line in top_comment(path)), path


@pytest.mark.parametrize("name", SIZES)
def test_a_model_from_scratch_has_the_size_of_its_document(name: str):
    flops = ModelFlops.of(build_on_meta(load_config(load_recipe(FOLDER / f"{name}.yaml").model)))
    assert flops.parameters / 1e9 == pytest.approx(SIZES[name], rel=0.005)
    assert flops.shape.vocabulary % 128 == 0, "an FP8 head needs this"
