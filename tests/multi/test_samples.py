"""Samples under FSDP2: generation goes past the forward whose hooks gather the parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from packing.arrow import Pack, PackWriter

pytestmark = pytest.mark.multi


def test_sharded_models_sample_without_an_evaluation_before(
    train_as_ranks: Callable, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w60").save_pretrained(tmp_path / "tokenizer")
    rng = np.random.default_rng(0)
    with PackWriter(tmp_path / "packs", 32) as writer:  # nothing held out, whose evaluation would leave some parameters gathered
        for _ in range(16):
            writer.add("train", Pack(rng.integers(61, size=32).astype(np.uint32), np.array([32], dtype=np.int32)))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    data = {"packs": str(tmp_path / "packs"), "length": 32, "held_out": 0, "tokenizer": str(tmp_path / "tokenizer")}
    samples = {"samples": ["w1 w2", ""], "sample_tokens": 8}
    recipe = small_recipe | {"data": data, "train": {"steps": 2}, "evaluate": samples}
    recipe["model"]["config"]["tie_word_embeddings"] = False  # then no other group holds the embedding
    launch = ["--config_file", "accelerate_configs/fsdp2.yaml", "--mixed_precision", "bf16"]
    finished = train_as_ranks(recipe=recipe, launch=launch)
    assert finished.status == 0, finished.output
    assert finished.output.count("sample after") == 2
