"""The registry of compute precisions: one entry a recipe.

A recipe says in which dtype the matrix products of the model run. Weights are another matter (`weights:` in the recipe file):
FP32 weights under `bf16` are cast to BF16 working copies at each use, BF16 weights are used as they are.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from packing.errors import InputError


@dataclass(frozen=True)
class PrecisionRecipe:
    """One way to compute.

    `compute_dtype` names the torch dtype of activations and products; `peak` the column of the device's peak table that its
    matrix products are held against.
    """

    name: str
    compute_dtype: str
    peak: str
    description: str


RECIPES = {
    recipe.name: recipe
    for recipe in (
        PrecisionRecipe("fp32", "float32", "fp32", "FP32 products; the reference every other recipe is compared with"),
        PrecisionRecipe("bf16", "bfloat16", "bf16", "BF16 products with FP32 accumulation"),
    )
}

# `weights:` of a recipe file, and the torch dtype that parameters are kept in.
WEIGHT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "bf16_exact": "bfloat16"}


def find(name: str, origin: str) -> PrecisionRecipe:
    """The recipe called `name`; InputError that names `origin` and the nearest known recipe."""
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(RECIPES)}"
    raise InputError(f"{origin}: unknown precision {name!r}; {hint}")
