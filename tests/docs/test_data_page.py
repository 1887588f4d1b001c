"""The commands of docs/data.md go together."""

from __future__ import annotations

import re
from pathlib import Path

from pretrain.settings.config import load_recipe

ROOT = Path(__file__).parents[2]


def test_each_tokenizer_that_is_learnt_has_the_vocabulary_of_the_recipe_that_trains_on_it():
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    vocabulary = load_recipe(ROOT / "recipes/smoke.yaml").model.config["vocab_size"]
    assert "recipes/smoke.yaml name=streamed" in page and "data.tokenizer=my_tokenizer " in page
    assert {int(size) for size in re.findall(r"--vocabulary (\d+) --out my_tokenizer", page)} == {vocabulary}
