"""`fp8_config`: how a quantized precision is to run; the same keys in a recipe and in an accelerate configuration.

A few keys are for every quantized precision, the others are options, which the files of the precisions declare. An option that is
not set is None, and `resolved` fills in the default of the precision that is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, create_model, model_validator

from foundation.settings import Count, Settings
from pretrain.precision import registry
from pretrain.precision.formats.definition import Option, Precision
from pretrain.precision.registry import PRECISIONS


def _in_the_registry(name: str) -> str:
    if name not in PRECISIONS:
        raise ValueError(registry.unknown(name))
    return name


PrecisionName = Annotated[str, AfterValidator(_in_the_registry)]


class KeepBf16Layers(Settings):
    """Decoder layers that stay in BF16: so many at the start of the model, so many at its end."""

    first: Count = 0  # decoder layers at the start of the model that stay in BF16
    last: Count = 0  # decoder layers at its end that stay in BF16


class _ForEveryPrecision(Settings):
    backend: Literal["TE", "emulation"] = "TE"  # TE: Transformer Engine; emulation: in software, also where the hardware could
    scope: Literal["linear", "linear+head"] = "linear"  # all linears but the LM head; with it
    on_unsupported: Literal["error", "emulate", "fallback"] = "error"  # where the device lacks it; fallback: delayed, else bf16
    keep_bf16_layers: KeepBf16Layers = KeepBf16Layers()
    keep_bf16: tuple[str, ...] = ()  # linears that stay in BF16, by patterns of names: ["layers.0.*", "down_proj"]
    use_autocast_during_eval: bool = False  # evaluate in the low precision too, not in BF16; accelerate's name for it


def _declared() -> dict[str, Option]:
    """The options of all precisions by key. Raises ValueError where two precisions mean different things by one key."""
    options: dict[str, Option] = {}
    for precision in PRECISIONS.values():
        for key, option in precision.options.items():
            known = options.setdefault(key, option)
            if (known.kind, known.meaning) != (option.kind, option.meaning):
                raise ValueError(f"precision {precision.name!r} declares its option {key!r} otherwise than another precision")
    return options


_OPTIONS = _declared()
OPTIONS = tuple(_OPTIONS)  # the keys that only some precisions take; the others are for all quantized ones
_WithOptions = create_model(
    "_WithOptions",
    __base__=_ForEveryPrecision,
    **{key: (option.kind | None, Field(None, description=option.meaning)) for key, option in _OPTIONS.items()},
)


class LowPrecisionSettings(_WithOptions):
    @model_validator(mode="before")
    @classmethod
    def _names_no_recipe(cls, values: Any) -> Any:
        if isinstance(values, dict) and "recipe" in values.keys() - cls.model_fields.keys():
            raise ValueError("`recipe` is a key of accelerate configurations; in a recipe file `precision` names it")
        return values

    @property
    def options_set(self) -> dict[str, Any]:
        """The options that are set, by key."""
        return {key: getattr(self, key) for key in OPTIONS if getattr(self, key) is not None}

    def contradictions(self, precision: Precision) -> list[str]:
        """What is set and `precision` does not take, as `key: value`."""
        return [f"{key}: {value}" for key, value in self.options_set.items() if not precision.takes(key, value)]

    def resolved(self, precision_name: str) -> Self:
        """Returns the settings with every option that the precision takes, by its default where it is None, and all others
        None."""
        taken = PRECISIONS[precision_name].options
        options = {key: self.options_set.get(key, taken[key].default) if key in taken else None for key in OPTIONS}
        return type(self).model_validate(self.model_dump() | options)

    def without_options(self) -> Self:
        """The keys that mean the same for every quantized precision, as they are; no option set."""
        return type(self).model_validate(self.model_dump(exclude_unset=True, exclude=set(OPTIONS)))


@dataclass(frozen=True)
class ActivePrecision:
    """What a run computes in: `precision`, with `settings` resolved for it. It is not the `requested` one only under
    `on_unsupported: fallback`. `reason` says why this is not what was asked for, None where it is."""

    requested: str
    precision: Precision
    backend: Literal["torch", "transformer_engine", "emulation"]  # torch: nothing is quantized
    settings: LowPrecisionSettings
    reason: str | None = None

    @property
    def notice(self) -> str | None:
        """What is done in place of what was asked for, for the user to read; None where nothing is."""
        if self.reason is None:
            return None
        instead = f"{self.precision.name} is trained in its place" if self.precision.name != self.requested else "it is emulated"
        return f"{self.reason}: {instead}"
