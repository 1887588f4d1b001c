"""The task that all trainers compute: a model, and the tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.speed.shapes import SHAPES, Shape
from foundation.errors import InputError
from pretrain.settings.config import load_recipe

# Steps that are not timed.
WARM_UP = 3
QWEN3 = "Qwen3-1.7B"
MODELS = {
    QWEN3: Shape("benchmarks/qwen3_1_7b.yaml"),
    **{name: shape for name, shape in SHAPES.items() if name.startswith("Qwen2.5")},
    # This shape needs 141 GB. Like llmq, it has moments and gradients in BF16.
    "Qwen2.5-7B": replace(
        SHAPES["Qwen2.5-7B"],
        microbatch=8192,
        more=("optimizer.moments=bf16", "optimizer.gradients=bf16"),
    ),
}


@dataclass(frozen=True)
class Task:
    """A model that is trained from random weights, on sequences that are one document each.

    Attributes:
        name: The name of the model.
        config: The configuration of the Hugging Face model.
        length: Tokens of a sequence.
        sequences: Sequences of a step.
        microbatch: The first number of sequences of a microbatch that is tried.
        steps: Steps of a run.
    """

    name: str
    config: dict[str, Any]
    length: int
    sequences: int
    microbatch: int
    steps: int

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.length * self.sequences


def shape_of(name: str) -> Shape:
    """Return the shape of a model. Raises InputError if the model is not known."""
    if name == "tiny":
        emulated = "fp8_config.on_unsupported=emulate"
        return Shape("benchmarks/tiny.yaml", microbatch=512, more=(emulated,))
    if name not in MODELS:
        raise InputError(f"--model {name}: choose one of {', '.join(MODELS)}")
    return MODELS[name]


def task_of(name: str, steps: int, tokens: int | None = None) -> Task:
    """Return the task of a model. `tokens` of a step are those of its recipe by default."""
    shape = shape_of(name)
    recipe = load_recipe(Path(shape.recipe))
    return Task(
        name,
        dict(shape.config or recipe.model.config or {}),
        recipe.data.length,
        (tokens or recipe.batch.tokens) // recipe.data.length,
        shape.microbatch // recipe.data.length,
        steps,
    )
