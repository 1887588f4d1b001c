"""A recipe and a model with the figures of the reference runs, as far as a plan depends on them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pretrain.metrics.flops import ModelFlops
from pretrain.plan.checks import steps_of
from pretrain.plan.memory import LayerMemory, compiled_layer
from pretrain.precision.schedule import Phase, PrecisionSchedule
from pretrain.precision.settings import ActivePrecision
from pretrain.settings.recipe import Recipe

PACKS = 22_206  # packs of the reference dataset

flops_of = cache(ModelFlops.of)  # counting runs a forward


def on_meta(config: dict[str, Any]) -> PreTrainedModel:
    """Return a model without storage."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def recipe(**changes: Any) -> Recipe:
    """Return the recipe of the reference runs with `changes`."""
    values = {
        "name": "small",
        "weights": "fp32",
        "model": {"source": "some/model"},
        "data": {"packs": "packs", "length": 4096},
        "batch": {"tokens": 131_072, "microbatch": 8},
        "schedule": {"warmup": 100},
        "optimizer": {"learning_rate": 2e-5},
        "train": {"epochs": 4},
    }
    return Recipe.model_validate({**values, **changes})


def schedule_of(
    recipe: Recipe,
    active: ActivePrecision,
    *later: Phase,
    until: float | None = None,
    packs: int = PACKS,
) -> PrecisionSchedule:
    """Return the schedule of a recipe: `active` until a step or to the end, then `later`."""
    steps = steps_of(recipe.train, recipe.batch.tokens, packs, recipe.data.length)
    return PrecisionSchedule([(until, active), *later], steps)


def compiled_layers(flops: ModelFlops, schedule: PrecisionSchedule) -> dict[str, list[LayerMemory]]:
    """Map each precision of the schedule to the memory of layers of which none is fused."""
    layers = {}
    for active in schedule.precisions:
        precision = active.precision
        layer = compiled_layer(flops, precision, precision.layouts_on(None), {})
        layers[precision.name] = [layer] * flops.shape.layers
    return layers


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
