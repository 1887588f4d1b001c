"""Which precision the accelerate configuration asks for.

`accelerate launch` hands its YAML over as environment variables. They are read here and then taken away, because accelerate would
otherwise act on them: a mere ACCELERATE_FP8_BACKEND makes it convert the model's linears by its own rules, and autocast would
round what the working copies already round. Precision has one owner, and it is `pretrain.precision`.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from packing.errors import InputError
from pretrain.precision.recipes import find
from pretrain.settings import Recipe

_NAMES = {"no": "fp32", "bf16": "bf16"}


def take_requested_precision(environ: MutableMapping[str, str]) -> str:
    """The precision recipe that the launch environment names; its variables are removed from `environ`.

    Without `accelerate launch` nothing is named, and FP32 is what plain PyTorch would do. Raises InputError for what no recipe
    here stands for.
    """
    mixed_precision = environ.pop("ACCELERATE_MIXED_PRECISION", "no").lower()
    low_precision = {key: environ.pop(key) for key in list(environ) if key.startswith("ACCELERATE_FP8_")}
    if mixed_precision == "fp8":
        return low_precision.get("ACCELERATE_FP8_RECIPE", "delayed").lower()
    if mixed_precision not in _NAMES:
        raise InputError(
            f"accelerate configuration: `mixed_precision: {mixed_precision}` is not supported; use 'bf16', as fast "
            "as FP16 and without its loss scaling, or 'no' for FP32"
        )
    return _NAMES[mixed_precision]


def with_precision(recipe: Recipe, environ: MutableMapping[str, str]) -> Recipe:
    """`recipe` with its precision settled: its own where it (or the command line) names one, else the accelerate configuration's.

    Raises InputError for a precision that is not in the registry.
    """
    of_accelerate = take_requested_precision(environ)
    origin = "`precision`" if recipe.precision else "accelerate configuration"
    return recipe.model_copy(update={"precision": find(recipe.precision or of_accelerate, origin).name})
