"""Samples under FSDP2: generation goes past the forward whose hooks gather the parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.multi


def test_sharded_models_sample_without_an_evaluation_before(train: Callable, small_recipe: dict[str, Any], tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w60").save_pretrained(tmp_path / "tokenizer")
    data = small_recipe["data"] | {"tokenizer": str(tmp_path / "tokenizer")}
    # One held-out pack for two processes and every step: the samples come from what training left, an evaluation and an update.
    recipe = small_recipe | {"data": data, "train": {"steps": 2}, "evaluate": {"packs": 1, "samples": ["w1 w2", ""], "sample_tokens": 8}}
    recipe["model"]["config"]["tie_word_embeddings"] = False  # then no other group holds the embedding
    launch = ["--config_file", "accelerate_configs/fsdp2.yaml", "--mixed_precision", "bf16"]
    finished = train(recipe=recipe, launch=launch, ACCELERATE_USE_CPU="true")
    assert finished.status == 0, finished.output
    assert finished.output.count("sample after") == 2
