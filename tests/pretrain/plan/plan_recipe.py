"""The recipe of the reference's runs, in as far as a plan asks for it."""

from __future__ import annotations

from typing import Any

from pretrain.settings.recipe import Recipe


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
