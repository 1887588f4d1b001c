"""The recipe and the model of the reference's runs, in as far as a plan asks for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pretrain.metrics.flops import ModelFlops
from pretrain.settings.recipe import Recipe

flops_of = cache(ModelFlops.of)  # torch runs a forward to count


def on_meta(config: dict[str, Any]) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def recipe(**changes: Any) -> Recipe:
    values = {
        "name": "small",
        "model": {"source": "some/model"},
        "data": {"packs": "packs", "length": 4096},
        "batch": {"tokens": 131_072, "microbatch": 8},
        "schedule": {"warmup": 100},
        "optimizer": {"learning_rate": 2e-5},
        "train": {"epochs": 4},
    }
    return Recipe.model_validate({**values, **changes})


QWEN3 = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
}
QWEN3 |= {
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "model_type": "qwen3",
}
