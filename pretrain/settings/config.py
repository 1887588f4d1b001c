"""Load a recipe from its file and the command line.

The value of a key is taken from the last of these sources that sets the key:

1. the default,
2. the recipe that `base` names,
3. the recipe file,
4. the `key=value` overrides on the command line.

Overrides are dotted keys with YAML values: `weights=bf16 optimizer.learning_rate=1e-4
train.tokens=2e9`. If a key is given twice, the last value is used. A recipe sets one of
train.steps, train.tokens and train.epochs. If one of them is set, the values of the other two in
earlier sources are removed. On the command line, the last of them is used.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict

from foundation.command import CommandParser
from foundation.errors import InputError
from foundation.reading import load_with_bases, load_yaml, parse_yaml
from foundation.settings import (
    S,
    Settings,
    closest_key,
    flatten,
    is_sentence,
    parse,
    set_value,
    value_from_text,
)
from foundation.storage import is_address, open_storage, path_for
from packing.settings import DataSettings
from pretrain.precision.settings import (
    PRECISIONS,
    WEIGHT_DTYPES,
    Weights,
    is_quantized,
    label,
    phases_of,
)
from pretrain.settings.recipe import Recipe

# The keys that set the length of a training. Only one of them can be set.
HORIZON = ("train.steps", "train.tokens", "train.epochs")

# Keys, and prefixes of keys, of a run's name, folders, records and checks. They affect neither the
# training nor its speed.
RECORDS = ("name", "run_dir", "log.", "checkpoint.", "health.", "parity")
# File of a run folder with the resolved recipe.
CONFIG_FILE = "config.yaml"
# Keys, and prefixes of keys, that are not part of the identity of a training. Two runs that differ
# only in these keys are trained on the same data with the same hyperparameters.
_NOT_IDENTITY = (
    *RECORDS,
    "evaluate.",
    "deterministic",
    "batch.microbatch",
    "loss.kind",
    "loss.chunk",
    "model.attention",
    "model.compile",
    "model.fused",
    "model.cuda_graphs",
    "model.gradient_checkpointing",
    "optimizer.offload",
    # These two keys choose the engine that runs the quantized GEMMs. Emulation computes the same
    # numbers as the hardware, except for the order of sums.
    "fp8_config.backend",
    "fp8_config.on_unsupported",
    # This key sets the precision of evaluations only.
    "fp8_config.use_autocast_during_eval",
    # These keys determine where the packs are stored and how they are made. `identity_of` includes
    # the fingerprint of the packs' content instead.
    "data.packs",
    "data.source",
    "data.subset",
    "data.split",
    "data.streaming",
    "data.text",
    "data.tokenizer",
    "data.validation",
    "data.messages",
    "data.chat_template",
    "data.input_ids",
    "data.token_dtype",
    "data.packing",
    "data.held_out",
)

# Prefix of the keys of `identity_of` for the values in the config.json of `model.source`.
SOURCE = "model.source."


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe at `path`, apply `overrides`, and check every key.

    Raises InputError if the recipe or an override has a mistake. The message names the file and the
    key of every mistake.
    """
    return _load(Recipe, path, overrides)


def load_data(arguments: Sequence[str]) -> DataSettings:
    """Load the data section of a recipe, which key=value arguments override.

    The first argument is the path of the recipe, unless it contains "=". Other sections of the
    recipe are not checked. Raises InputError for an argument with a key of another section.
    """
    path = None
    if arguments and "=" not in arguments[0]:
        path, *arguments = arguments
    for key, _ in parse_overrides(arguments):
        if not key.startswith("data."):
            raise InputError(
                f"command line: {key}: this command accepts only keys of the data section, such as "
                "data.length=1024"
            )
    return _load(_DataRecipe, path, arguments).data


class _DataRecipe(Settings):
    """The section of a recipe that `load_data` checks."""

    model_config = ConfigDict(extra="ignore")
    OTHER_NAMES: ClassVar = Recipe.OTHER_NAMES
    UNKNOWN_KEY_HELP: ClassVar = Recipe.UNKNOWN_KEY_HELP

    data: DataSettings


def _load(cls: type[S], path: str | Path | None, overrides: Sequence[str]) -> S:
    """Load the recipe at `path` as an object of `cls`. Without a path, load only `overrides`."""
    values: dict[str, Any] = {}
    for _, file_values in load_with_bases(path) if path else []:
        for section, new in file_values.items():
            # Merge a section key by key with the same section of the base recipe. A mapping inside
            # of a section, such as `model.config`, is not merged: it replaces the mapping of the
            # base recipe.
            if isinstance(new, dict) and isinstance(values.get(section), dict):
                _drop_horizon(values, {f"{section}.{name}": value for name, value in new.items()})
                new = values[section] | new
            values[section] = new
    for key, value in parse_overrides(overrides):
        _drop_horizon(values, {key: value})
        set_value(values, key, value)
    origin = ", over ".join(filter(None, ["command line" if overrides else "", str(path or "")]))
    return parse(cls, values, origin)


def parse_overrides(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """Return a pair (dotted key, value) for each override. The value is parsed as YAML.

    Raises InputError if an override is not of the form key=value.
    """
    values = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InputError(
                f"command line: {text!r} is not of the form key=value; write, for example, "
                "weights=bf16 or optimizer.learning_rate=1e-4"
            )
        key = key.strip()
        values.append((key, value_from_text(Recipe, key, value)))
    return values


def _drop_horizon(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Remove all keys in HORIZON from `values` if `changes` sets one of them.

    `values` is a nested recipe and is modified. `changes` maps dotted keys to new values.
    """
    sets_horizon = any(changes.get(key) is not None for key in HORIZON)
    if sets_horizon and isinstance(values.get("train"), dict):
        values["train"] = {
            name: value for name, value in values["train"].items() if f"train.{name}" not in HORIZON
        }


def run_address_of(recipe: Recipe) -> str:
    """Return `run_dir`, after keys in braces are replaced by their values.

    Raises InputError if a key in braces does not exist.
    """
    return fill_in(recipe.run_dir, _path_fields(recipe))


def run_dir_of(recipe: Recipe) -> Path:
    """Return the path of the run folder. For s3://bucket/run it is runs/s3/bucket/run.

    Raises InputError if a key in braces does not exist.
    """
    address = run_address_of(recipe)
    return path_for(address, Path("runs")) if is_address(address) else Path(address)


def usual_weights(recipe: Recipe, *, on_gpu: bool) -> Weights:
    """Return the value of `weights` in a new run whose recipe has `weights: auto`.

    recipe: a recipe with a resolved precision.
    on_gpu: True if the run trains on a GPU.
    """
    dtypes = {PRECISIONS[name].compute_dtype for _, name in phases_of(recipe.precision)}
    return "bf16_exact" if on_gpu and "float32" not in dtypes else "fp32"


def with_weights(recipe: Recipe, *, on_gpu: bool, resume: str = "auto") -> Recipe:
    """Return `recipe` with a value of `weights` in place of `auto`.

    A run that exists keeps the value in its config.yaml. So a run with FP32 weights resumes with
    FP32 weights, also on a GPU. A new run has the value of `usual_weights`.

    recipe: a recipe with a resolved precision.
    on_gpu: True if the run trains on a GPU.
    resume: the value of --resume.
    """
    if recipe.weights != "auto":
        return recipe
    usual = usual_weights(recipe, on_gpu=on_gpu)
    recorded = _recorded_weights(recipe, usual, resume)
    # A config.yaml above the folder of --resume may belong to another program.
    values = [weights for weights in recorded if weights in WEIGHT_DTYPES]
    return recipe.model_copy(update={"weights": next(iter(values), usual)})


def _recorded_weights(recipe: Recipe, usual: Weights, resume: str) -> list[Any]:
    """Return the setting `weights` in each config.yaml that the run of `recipe` may have written.

    usual: the value of a new run.
    resume: the value of --resume.
    """
    # The name of the default folder contains the weights. FP32 weights are the default of earlier
    # versions on a GPU.
    folders = [
        run_dir_of(recipe.model_copy(update={"weights": weights})) for weights in (usual, "fp32")
    ]
    if resume != "auto":
        # A run folder, or one of its checkpoints.
        folders = [Path(resume), Path(resume).absolute().parent.parent]
    recorded = [
        load_yaml(file).get("weights") for folder in folders for file in folder.glob(CONFIG_FILE)
    ]
    address = run_address_of(recipe)
    # Another machine has stored the run, which will be copied to this one.
    if not recorded and is_address(address):
        return _stored_weights(address)
    return recorded


def _stored_weights(address: str) -> list[Any]:
    """Return a list with the setting `weights` of the run that is stored at `address`, or []."""
    with open_storage(address) as (storage, root):
        config = f"{root}/{CONFIG_FILE}"
        if not storage.exists(config):
            return []
        return [parse_yaml(storage.cat_file(config).decode()).get("weights")]


def branch_checkpoint(recipe: Recipe) -> Path | None:
    """Return the path of the checkpoint where the run branches.

    The path is `train.begin_with`, after keys in braces are replaced by their values. Return None
    if `train.begin_with` is not set. Raises InputError if a key in braces does not exist.
    """
    path = recipe.train.begin_with
    return None if path is None else Path(fill_in(path, _path_fields(recipe), "train.begin_with"))


def _path_fields(recipe: Recipe) -> dict[str, Any]:
    """Map each dotted key that a path may contain in braces to the value of its setting."""
    fields = flatten(resolved(recipe)) | {"precision": label(recipe.precision, in_a_path=True)}
    return {
        key: value for key, value in fields.items() if key not in ("run_dir", "train.begin_with")
    }


def fill_in(path: str, fields: Mapping[str, Any], key: str = "run_dir") -> str:
    """Replace each name in braces in `path` by its value.

    Raises InputError for a name that is not in `fields`, and for a brace without its counterpart.

    Args:
        path: The path, for example "runs/{name}".
        fields: Map each name that may be in braces to its value.
        key: Key of the setting whose value is the path, for messages.
    """

    def replacement(match: re.Match[str]) -> str:
        name = match[1]
        if name in fields:
            return as_path_part(fields[name])
        if name is None:
            raise InputError(
                f"`{key}`: {path!r} has a brace without its counterpart; add the missing brace, or "
                "remove all braces"
            )
        raise InputError(
            f"`{key}`: {path!r} contains {{{name}}}, but {name!r} is not a known name; use a name "
            f"such as {{{next(iter(fields))}}}"
        )

    return re.sub(r"{(.*?)}|[{}]", replacement, path)


def as_path_part(value: Any) -> str:
    """Return the value of a setting as text that can be part of the name of a folder.

    Examples: `0.0003`, `bf16`, `true`, `null`, `0.9,0.95`, `Qwen_Qwen3-1.7B`.
    """
    text = value
    if not isinstance(value, str):
        text = json.dumps(value).strip("[]").replace('"', "").replace(", ", ",")
    # Replace dots at the beginning, because a folder `..` is the parent folder and `.name` is
    # hidden. Elsewhere, replace blanks, slashes and all other characters that are special in paths.
    return re.sub(r"^\.+[^A-Za-z0-9._+=,-]*|[^A-Za-z0-9._+=,-]+", "_", text)


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Return all settings of a recipe, including defaults, as nested dicts of plain values.

    If the values are written to a YAML file, `load_recipe` reads the file as a recipe with the same
    settings. If the recipe has several data sources, the result has all settings of each source.
    """
    return recipe.model_dump(mode="json")


def identity_of(recipe: Recipe, data_fingerprint: str) -> dict[str, Any]:
    """Return the identity of a training: the settings that determine its data and hyperparameters.

    `data_fingerprint` is the fingerprint of the training packs. Map the dotted key of each setting
    to its value, and the additional key "data.fingerprint" to `data_fingerprint`. Settings for
    paths, logging, checkpoints and speed are not included. Two runs with the same identity are
    trained on the same tokens in the same order with the same hyperparameters. If the identity of a
    run differs from the identity stored in a checkpoint, the run resumes from the checkpoint only
    if --accept-changes is set.
    """
    return settings_without(recipe, _NOT_IDENTITY) | {"data.fingerprint": data_fingerprint}


def settings_without(recipe: Recipe, excluded: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of a recipe by dotted key, without the settings in `excluded`.

    A setting is excluded if its key starts with an element of `excluded`. The settings in
    `fp8_config` are also excluded if no precision of the recipe is quantized, and the settings of
    Muon if the optimizer is AdamW.
    """
    if not is_quantized(recipe.precision):
        excluded = (*excluded, "fp8_config.")
    if recipe.optimizer.name == "adamw":
        excluded = (*excluded, "optimizer.name", "optimizer.muon.")
    return {
        key: value
        for key, value in flatten(resolved(recipe)).items()
        if not key.startswith(excluded)
    }


class SettingsParser(CommandParser):
    """Parser of a command line with settings, written as key=value or --key=value.

    W&B sweeps use the second form.
    """

    remedy = "write settings as key=value or --key=value; --help lists the options"
    # Section of the recipe whose keys are suggested first.
    section: tuple[str, ...] = ()

    def suggest(self, name: str) -> str | None:
        """Return the option or the key=VALUE that the user probably meant by `--name`.

        If `name` is an option of another program and no key replaces it, return a sentence that
        says what to do instead. Return None if no option and no key is similar to `name`.
        """
        if option := super().suggest(name):
            return option
        meant = closest_key(Recipe, name, self.section)
        if meant is None or is_sentence(meant):
            return meant
        return f"{meant}=VALUE"

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse `arguments`. Options and settings may be in any order."""
        return super().read([self._without_dashes(text) for text in arguments])

    def _without_dashes(self, text: str) -> str:
        """Return an argument --key=value as key=value if it sets a key of the recipe."""
        key, equals, value = text.removeprefix("--").partition("=")
        is_key = "." in key or key in Recipe.model_fields
        is_setting = equals and is_key and f"--{key}" not in self._option_string_actions
        return f"{key}={value}" if is_setting else text


class PacksParser(SettingsParser):
    """Parser of a command that reads the data section of a recipe."""

    section = ("data",)
