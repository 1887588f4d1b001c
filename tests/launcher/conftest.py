"""What the launcher's own tests change in the small recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def recipe_for(recipe_for: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    """A step in two microbatches, not four."""

    def recipe(run_dir: Path) -> dict[str, Any]:
        small = recipe_for(run_dir)
        return small | {"batch": small["batch"] | {"microbatch": 4}}

    return recipe


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of 61 words."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w60").save_pretrained(folder)
    return folder
