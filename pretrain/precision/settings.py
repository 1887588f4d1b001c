"""`fp8_config`: how a quantized precision is to run; the same keys in a recipe file and in an accelerate configuration.

A few keys mean the same for every quantized recipe. The others are options of single recipes: unset they are None, and
`resolved` fills in what the chosen recipe makes of that. Which recipe takes which option stands in the registry alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, model_validator

from foundation.settings import Count, PositiveCount, Settings
from pretrain.precision import registry as recipes
from pretrain.precision.registry import PRECISIONS, Precision


def _in_the_registry(name: str) -> str:
    if name not in PRECISIONS:
        raise ValueError(recipes.unknown(name))
    return name


PrecisionName = Annotated[str, AfterValidator(_in_the_registry)]


class KeepBf16Layers(Settings):
    """Decoder layers that stay in BF16: so many at the start of the model, so many at its end."""

    first: Count = 0  # decoder layers at the start of the model that stay in BF16
    last: Count = 0  # decoder layers at its end that stay in BF16


class LowPrecisionSettings(Settings):
    backend: Literal["TE", "emulation"] = "TE"  # TE: Transformer Engine; emulation: in software, also where the hardware could
    scope: Literal["linear", "linear+head", "linear+head+norm"] = "linear"  # all linears but the LM head; with it; with norms
    on_unsupported: Literal["error", "emulate", "fallback"] = "error"  # where the device lacks it; fallback: delayed, else bf16
    keep_bf16_layers: KeepBf16Layers = KeepBf16Layers()
    use_autocast_during_eval: bool = False  # evaluate in the low precision too, not in BF16; accelerate's name for it

    # Options of delayed, current, block, mxfp8:
    fp8_format: Literal["HYBRID", "E4M3"] | None = None  # HYBRID: gradients in E5M2, the rest in E4M3
    # Options of delayed:
    margin: Count | None = None  # each one halves the scale, for room above the largest value seen
    amax_history_len: PositiveCount | None = None  # microbatches whose largest values are remembered
    amax_compute_algo: Literal["max", "most_recent"] | None = None  # which of them makes the scale
    # Options of delayed, current:
    fast_accumulation: bool | None = None  # forward products add up in fewer bits than FP32; on hardware, emulation has FP32
    # Options of current:
    use_power_2_scales: bool | None = None  # scales rounded down to powers of two
    # Options of block:
    use_f32_scales: bool | None = None  # FP32 scales in place of powers of two
    # Options of mxfp8:
    enable_2d_quantization: bool | None = None  # weights in blocks of 32x32: the same codes in both directions
    scale_rounding: Literal["rceil", "floor"] | None = None  # floor: OCP's rule, in emulation only; the hardware rounds up
    # Options of nvfp4:
    disable_rht: bool | None = None  # true: no random Hadamard transform of what the weight gradient multiplies
    disable_stochastic_rounding: bool | None = None  # true: gradients are rounded to nearest
    disable_2d_quantization: bool | None = None  # true: weights in blocks of 16 along each axis, not of 16x16

    @model_validator(mode="before")
    @classmethod
    def _names_no_recipe(cls, values: Any) -> Any:
        if isinstance(values, dict) and "recipe" in values.keys() - cls.model_fields.keys():
            raise ValueError("`recipe` is a key of accelerate configurations; in a recipe file `precision` names it")
        return values

    @property
    def options_set(self) -> dict[str, Any]:
        """The options of single recipes that are set, by key."""
        return {key: getattr(self, key) for key in OPTIONS if getattr(self, key) is not None}

    def contradictions(self, recipe: Precision) -> list[str]:
        """What is set and `recipe` does not take, as `key: value`."""
        return [f"{key}: {value}" for key, value in self.options_set.items() if not recipe.takes(key, value)]

    def resolved(self, recipe_name: str) -> Self:
        """With every option that the recipe takes filled in, by its default where it is None, and all others None."""
        taken = PRECISIONS[recipe_name].options
        options = {key: self.options_set.get(key, taken[key].default) if key in taken else None for key in OPTIONS}
        return type(self).model_validate(self.model_dump() | options)

    def without_options(self) -> Self:
        """The keys that mean the same for every quantized recipe, as they are; no option set."""
        return type(self).model_validate(self.model_dump(exclude_unset=True, exclude=set(OPTIONS)))


# The keys that only some recipes take; the others are for all quantized ones.
OPTIONS = tuple(key for key in LowPrecisionSettings.model_fields if any(key in recipe.options for recipe in PRECISIONS.values()))
