"""Which precision the accelerate configuration asks for, and what the recipe file and the command line make of it.

`accelerate launch` hands its YAML over as environment variables. They are read here and then taken away, because accelerate would
otherwise act on them: a mere ACCELERATE_FP8_BACKEND makes it convert the model's linears by its own rules, and autocast would
round what the working copies already round. Precision has one owner, and it is `pretrain.precision`.

accelerate passes unknown keys of `fp8_config` on unread, and fills in its own defaults for those that it knows. So a default of
accelerate's may be what somebody wrote. It counts where the precision has such a key, and for nothing elsewhere.
"""

from __future__ import annotations

import ast
from collections.abc import MutableMapping
from typing import Any

from foundation.errors import InputError
from foundation.settings import Settings, parse
from pretrain.precision import schedule
from pretrain.precision.formats.definition import Precision
from pretrain.precision.settings import PRECISIONS, LowPrecisionSettings, find, find_by_accelerate_name
from pretrain.settings.recipe import Recipe

_ORIGIN = "accelerate configuration"
_PREFIX = "ACCELERATE_FP8_"
_FP8 = "fp8"  # the `mixed_precision` with which accelerate reads an `fp8_config`

# What accelerate sets for options of ours that its file leaves out.
_FILLED_IN = {"fp8_format": "HYBRID", "margin": 0, "amax_history_len": 1024, "amax_compute_algo": "most_recent"}

# Keys of accelerate's that have no effect here: the value that asks for nothing, and what to do about any other.
_WITHOUT_EFFECT = {
    "interval": (1, "scales are computed at every step; leave it out"),
    "use_mxfp8_block_scaling": (False, "write `recipe: mxfp8` in its place"),
    "override_linear_precision": (False, "Transformer Engine ignores it; `keep_bf16_layers` keeps whole layers in BF16"),
    "opt_level": ("O2", "it is for MS-AMP; leave it out"),
    "enable_fsdp_float8_all_gather": (True, "it is for torchao; leave it out"),
    "pad_inner_dim": (True, "it is for torchao; leave it out"),
}


class _Fp8Config(LowPrecisionSettings):
    recipe: str = ""  # found before this is parsed; a key like the others for messages


class _File(Settings):
    """The part of an accelerate configuration that is read here, for messages that name its keys as the file does."""

    fp8_config: _Fp8Config


def with_precision(recipe: Recipe, environ: MutableMapping[str, str]) -> Recipe:
    """`recipe` with its precision decided: its own where it (or the command line) names one, else the accelerate configuration's.

    `fp8_config` is decided key by key: the recipe's own, then the accelerate configuration's (without options of another
    precision), then the precision's defaults. So the result, written out, means the same under any accelerate configuration.
    Raises InputError for an unknown precision or key, and for options that the precision does not take.
    """
    requested, inherited = take_requested_precision(environ)
    if recipe.precision is not None and not isinstance(recipe.precision, str):
        return _with_schedule(recipe, requested, inherited)
    chosen = PRECISIONS[recipe.precision] if recipe.precision else requested
    if contradictions := recipe.fp8_config.contradictions(chosen):
        raise InputError(
            f"`fp8_config: {{{', '.join(contradictions)}}}` and `precision: {chosen.name}` contradict each other: "
            f"{chosen.describe_options()}; leave out the others, or on the command line set them to null"
        )
    settings = _over(inherited if chosen is requested else inherited.without_options(), recipe.fp8_config)
    decided = recipe.model_copy(update={"precision": chosen.name, "fp8_config": settings.resolved(chosen.name)})
    if recipe.precision is None:
        decided.model_fields_set.discard("precision")  # filled in, and not what the recipe says
    return decided


def _with_schedule(recipe: Recipe, requested: Precision, inherited: LowPrecisionSettings) -> Recipe:
    """`with_precision` where `precision` is a schedule. The options of its one quantized precision are filled in as ever. Several
    have their own defaults, and then no option of the accelerate configuration counts."""
    quantized = {use: PRECISIONS[use] for _, use in schedule.phases_of(recipe.precision) if PRECISIONS[use].quantized}
    for key, value in recipe.fp8_config.options_set.items():
        for precision in quantized.values():
            nobody = not any(key in other.options for other in quantized.values())
            if nobody or (key in precision.options and not precision.takes(key, value)):
                raise InputError(
                    f"`fp8_config: {{{key}: {value}}}` and `precision: {precision.name}`, a phase of the schedule, contradict "
                    f"each other: {precision.describe_options()}; leave the key out"
                )
    names = list(quantized)
    settings = _over(inherited if names == [requested.name] else inherited.without_options(), recipe.fp8_config)
    return recipe.model_copy(update={"fp8_config": settings.resolved(names[0]) if len(names) == 1 else settings})


def _over(inherited: LowPrecisionSettings, own: LowPrecisionSettings) -> LowPrecisionSettings:
    """Both, key by key, `own` on top."""
    layers = (settings.model_dump(exclude_unset=True) for settings in (inherited, own))
    return LowPrecisionSettings.model_validate(_merged(*layers))


def take_requested_precision(environ: MutableMapping[str, str]) -> tuple[Precision, LowPrecisionSettings]:
    """Returns what the launch environment asks for, with what its file sets, as far as that can be told; `environ` loses its
    variables.

    Without `accelerate launch` nothing is named, and FP32 is what plain PyTorch would do. Variables of an `fp8_config` without
    `mixed_precision: fp8` are left over from elsewhere and ask for nothing. Raises InputError for what no recipe here stands for.
    """
    mixed_precision = environ.pop("ACCELERATE_MIXED_PRECISION", "no").lower()
    variables = {key.removeprefix(_PREFIX): environ.pop(key) for key in list(environ) if key.startswith(_PREFIX)}
    if mixed_precision == _FP8:
        return _read_fp8_config(_in_our_names(variables))
    if (precision := find_by_accelerate_name(mixed_precision)) is None:
        raise InputError(
            f"{_ORIGIN}: `mixed_precision: {mixed_precision}` is not supported; use 'bf16', as fast "
            "as FP16 and without its loss scaling, 'no' for FP32, or 'fp8' with `recipe` in an `fp8_config`"
        )
    return precision, LowPrecisionSettings()


def _read_fp8_config(values: dict[str, Any]) -> tuple[Precision, LowPrecisionSettings]:
    for key, (nothing, remedy) in _WITHOUT_EFFECT.items():
        if (value := values.pop(key, nothing)) != nothing:
            raise InputError(f"{_ORIGIN}: `fp8_config.{key}: {value}` has no effect: {remedy}")
    named = values.get("recipe")
    precision = find_by_accelerate_name(_FP8) if named is None else find(str(named), f"{_ORIGIN}: `fp8_config.recipe`")
    if not precision.quantized:
        raise InputError(
            f"{_ORIGIN}: `fp8_config.recipe: {precision.name}` is no FP8; set `mixed_precision: bf16`, or 'no' for FP32"
        )
    for key, value in _FILLED_IN.items():
        if values.get(key) == value and not precision.takes(key, value):
            del values[key]

    settings = parse(_File, {"fp8_config": values}, _ORIGIN).fp8_config
    if contradictions := settings.contradictions(precision):
        raise InputError(
            f"{_ORIGIN}: `fp8_config: {{{', '.join(contradictions)}}}` and `recipe: {precision.name}` contradict each other: "
            f"{precision.describe_options()}; leave out the others"
        )
    return precision, LowPrecisionSettings.model_validate(settings.model_dump(exclude_unset=True, exclude={"recipe"}))


def _in_our_names(variables: dict[str, str]) -> dict[str, Any]:
    """Variables without their prefix as keys and values of an `fp8_config`, names in the spelling that is ours."""
    values = {key.lower(): _value(text) for key, text in variables.items()}
    overridden = [values.pop(f"override_{product}", False) for product in ("fprop", "dgrad", "wgrad")]
    values["override_linear_precision"] = any(overridden)
    if "format" in values:  # the prefix has swallowed the beginning of `fp8_format`
        values["fp8_format"] = str(values.pop("format")).upper()
    for written, read in (("amax_history_length", "amax_history_len"), ("amax_compute_algorithm", "amax_compute_algo")):
        if written in values:  # by `accelerate config`, whose words `accelerate launch` does not know
            values[read] = values.pop(written)
    if "recipe" in values:
        values["recipe"] = str(values["recipe"]).lower()
    if str(values.get("backend")).upper() == "TE":  # `--fp8_backend te` on accelerate's own command line
        values["backend"] = "TE"
    return values


def _value(text: str) -> Any:
    """accelerate writes values of its YAML as Python does: True, 1024, {'first': 1}; what is no such literal is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return text


def _merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `values`, nested mappings key by key."""
    both = {key: _merged(values[key], over[key]) for key in values.keys() & over.keys() if isinstance(over[key], dict)}
    return values | over | both
