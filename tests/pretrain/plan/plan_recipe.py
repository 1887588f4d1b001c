"""A recipe and a model with the figures of the reference runs, as far as a plan depends on them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pretrain.metrics.flops import ModelFlops
from pretrain.model.attention_backends import Choice
from pretrain.plan.checks import steps_of
from pretrain.plan.memory import Devices, compiled_layer, layers_of
from pretrain.plan.plan import Plan
from pretrain.precision.schedule import Phase, PrecisionSchedule
from pretrain.precision.settings import ActivePrecision
from pretrain.settings.recipe import Recipe
from tests.pretrain.conftest import QUANTIZED, active_in

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
) -> PrecisionSchedule:
    """Return the schedule of a recipe: `active` until a step or to the end, then `later`."""
    steps = steps_of(recipe.train, recipe.batch.tokens, PACKS, recipe.data.length)
    return PrecisionSchedule([(until, active), *later], steps)


QWEN3 = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "model_type": "qwen3",
}


@cache
def qwen3() -> PreTrainedModel:
    """Return Qwen3-1.7B without storage."""
    return on_meta(QWEN3)


def plan_of(
    precision: str = "bf16",
    devices: Devices | None = None,
    *,
    model: PreTrainedModel | None = None,
    fused: bool = False,
    attention: str = "packed_fa4",
    squared_length_per_token: float = 745.0,
    engine: str = "transformer_engine",
    section: dict[str, Any] | None = None,
    **changes: Any,
) -> Plan:
    """Return the plan of the recipe with `changes` on GPUs.

    model: Qwen3-1.7B by default.
    fused: True for fused layers, as far as they can be fused. Otherwise none is fused.
    engine: the engine of quantized precisions.
    section: the section `model` of the recipe.
    """
    model = model or qwen3()
    devices = devices or Devices()
    settings = recipe(**changes, **({"model": section} if section else {}))
    engine = engine if precision in QUANTIZED else "torch"
    active = active_in(precision, engine, **changes.get("fp8_config", {}))
    flops = flops_of(model)
    if fused:
        layers = layers_of(model, flops, settings, active, devices, attention)
    else:
        layouts = active.precision.layouts_on(None)
        layer = compiled_layer(flops, active.precision, layouts, {}, fuses_mlp=False)
        layers = [layer] * flops.shape.layers
    return Plan(
        settings,
        schedule_of(settings, active),
        flops,
        squared_length_per_token,
        PACKS,
        devices=devices,
        layers={precision: layers},
        attention=Choice(attention, "requested"),
    )


def in_phases(first: Plan, then: Plan, until: float) -> Plan:
    """Return a plan in the precision of `first` until a share of the steps, and then of `then`."""
    schedule = schedule_of(
        first.recipe, first.precisions[0], (None, then.precisions[0]), until=until
    )
    return replace(first, schedule=schedule, layers={**first.layers, **then.layers})
