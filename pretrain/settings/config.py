"""Load a recipe from its file and the command line.

Later sources override earlier ones: defaults, the recipe that `base` names, the recipe file,
`key=value` overrides.

Overrides are dotted paths with YAML values: `weights=bf16 optimizer.learning_rate=1e-4
train.tokens=2e9`. If a key is given twice, the last value counts. A recipe sets one of train.steps,
train.tokens and train.epochs. An override of one of them removes the others.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foundation.command import CommandParser, run_command
from foundation.errors import InputError
from foundation.reading import load_with_bases
from foundation.settings import parse, set_value, value_from_text
from pretrain.precision.settings import is_quantized, label
from pretrain.settings.recipe import Recipe

# Keys that exclude each other. Setting one drops the values of the others.
HORIZON = ("train.steps", "train.tokens", "train.epochs")

# Keys, and prefixes of keys, that do not change what a run trains.
_NOT_IDENTITY = (
    "name",
    "run_dir",
    "log.",
    "checkpoint.",
    "evaluate.",
    "health.",
    "parity",
    "deterministic",
    "batch.microbatch",
    "loss.kind",
    "loss.chunk",
    "model.attention",
    "model.compile",
    "model.fused",
    "model.gradient_checkpointing",
    # The engine that computes a precision. Emulation gives the numbers of the hardware except for
    # the order of sums.
    "fp8_config.backend",
    "fp8_config.on_unsupported",
    "fp8_config.use_autocast_during_eval",
    # The origin of the packs. Their content is part of the identity as a fingerprint.
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
    "data.labels",
    "data.packing",
    "data.held_out",
    "data.on_bad_line",
)

# Prefix of the identity's keys that come from the config.json of `model.source`.
SOURCE = "model.source."


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe at `path`, apply `overrides`, and check every key.

    Raises InputError that names the file and the key of every mistake.
    """
    values: dict[str, Any] = {}
    for _, file_values in load_with_bases(path):
        for section, new in file_values.items():
            # Sections are merged key by key. A value that is a mapping, such as `model.config`,
            # replaces the earlier mapping.
            if isinstance(new, dict) and isinstance(values.get(section), dict):
                _drop_horizon(values, {f"{section}.{name}": value for name, value in new.items()})
                new = values[section] | new
            values[section] = new
    for key, value in parse_overrides(overrides):
        _drop_horizon(values, {key: value})
        set_value(values, key, value)
    return parse(Recipe, values, f"command line, over {path}" if overrides else str(path))


def parse_overrides(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the key and the value of each override.

    Raises InputError if an override is not of the form key=value.
    """
    values = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InputError(
                f"command line: {text!r} is not key=value; write, for example, weights=bf16 or "
                "optimizer.learning_rate=1e-4"
            )
        key = key.strip()
        values.append((key, value_from_text(Recipe, key, value)))
    return values


def _drop_horizon(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Remove the horizon from `values` if `changes`, by dotted key, set a horizon."""
    sets_horizon = any(changes.get(key) is not None for key in HORIZON)
    if sets_horizon and isinstance(values.get("train"), dict):
        values["train"] = {
            name: value for name, value in values["train"].items() if f"train.{name}" not in HORIZON
        }


def run_dir_of(recipe: Recipe) -> Path:
    """Return the run folder, with {name}, {optimizer.learning_rate} and other keys filled in."""
    return Path(fill_in(recipe.run_dir, _path_fields(recipe)))


def branch_checkpoint(recipe: Recipe) -> Path | None:
    """Return the checkpoint of another run that this run branches from, with {keys} filled in.

    Return None if `train.begin_with` is not set.
    """
    path = recipe.train.begin_with
    return None if path is None else Path(fill_in(path, _path_fields(recipe), "train.begin_with"))


def _path_fields(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that a path may name in braces, by dotted key."""
    fields = flatten(resolved(recipe)) | {"precision": label(recipe.precision, in_a_path=True)}
    paths = ("run_dir", "train.begin_with")
    return {key: value for key, value in fields.items() if key not in paths}


def fill_in(path: str, fields: Mapping[str, Any], key: str = "run_dir") -> str:
    """Replace {fields} in `path`, the value of the setting `key`, by their values.

    Raises InputError for a field that does not exist and for unbalanced braces.
    """

    def replacement(match: re.Match[str]) -> str:
        name = match[1]
        if name in fields:
            return as_path_part(fields[name])
        near = difflib.get_close_matches(name or "", fields, n=1, cutoff=0.7)
        instead = f"did you mean {{{near[0]}}}?" if near else ""
        hint = instead or "any key of the recipe can stand in braces"
        raise InputError(f"`{key}`: {path!r} cannot be filled in; {hint}")

    return re.sub(r"{(.*?)}|[{}]", replacement, path)


def as_path_part(value: Any) -> str:
    """Return a setting's value as part of a folder name.

    Examples: 0.0003, bf16, true, null, 0.9,0.95, Qwen_Qwen3-1.7B.
    """
    text = value
    if not isinstance(value, str):
        text = json.dumps(value).strip("[]").replace('"', "").replace(", ", ",")
    return re.sub(r"^\.+[^A-Za-z0-9._+=,-]*|[^A-Za-z0-9._+=,-]+", "_", text)


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Return every setting as plain values. With several data sources, each has its full settings.

    `load_recipe` reads the values, written as YAML, back to a recipe that trains the same and has
    the same resolved settings.
    """
    return recipe.model_dump(mode="json")


def identity_of(recipe: Recipe, data_fingerprint: str) -> dict[str, Any]:
    """Return the settings that define a training, by dotted key, with the data's fingerprint.

    Settings that change only where, how fast or how visibly a run trains are excluded. Two runs
    with the same identity see the same tokens in the same order with the same hyperparameters. A
    checkpoint with another identity is resumed only with --accept-changes.
    """
    return settings_without(recipe, _NOT_IDENTITY) | {"data.fingerprint": data_fingerprint}


def settings_without(recipe: Recipe, excluded: tuple[str, ...]) -> dict[str, Any]:
    """Return settings by dotted key, except keys that start with a prefix in `excluded`.

    `fp8_config` is excluded too if no phase of the recipe is quantized.
    """
    if not is_quantized(recipe.precision):
        excluded = (*excluded, "fp8_config.")
    settings = flatten(resolved(recipe))
    return {key: value for key, value in settings.items() if not key.startswith(excluded)}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys: {"data": {"length": 1}} -> {"data.length": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class LaunchParser(CommandParser):
    """Parser of a recipe and its overrides.

    Overrides are key=value or, as the agents of W&B sweeps write them, --key=value.
    """

    remedy = (
        "a setting is key=value or --key=value; --help lists the options; to evaluate only, use "
        "`python -m pretrain evaluate`"
    )

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        super().__init__(prog, description)
        self.add_argument("recipe", type=Path, help="the recipe, a YAML file; see recipes/")
        self.add_argument(
            "overrides",
            nargs="*",
            default=[],
            metavar="key=value",
            help="settings that override the recipe, for example weights=bf16 train.steps=9",
        )

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse options and overrides, which may stand in any order."""
        options = [option for action in self._actions for option in action.option_strings]
        normalized = []
        for text in arguments:
            name, equals, _ = text.partition("=")
            is_option = any(option.startswith(name) for option in options)
            is_setting = bool(equals) and name.startswith("--") and not is_option
            normalized.append(text.removeprefix("--") if is_setting else text)
        return super().read(normalized)


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Parse the launcher's command line. `description` is shown by --help.

    Raises InputError for an unknown option.
    """
    parser = LaunchParser(None, description)
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="CHECKPOINT",
        help="checkpoint to resume from; default: the newest intact checkpoint of the run",
    )
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="resume from a checkpoint although the recipe has changed",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--plan",
        action="store_true",
        help="check every setting, print what the run would do, and exit",
    )
    modes.add_argument(
        "--profile",
        action="store_true",
        help="profile one step; writes profile.md and a trace to the run folder",
    )
    return parser.read(sys.argv[1:])


def check_arguments(description: str | None) -> None:
    """Check the launcher's command line and recipe. End the process with a message at a mistake."""

    def check() -> None:
        arguments = parse_arguments(description)
        load_recipe(arguments.recipe, arguments.overrides)

    if status := run_command(check):
        sys.exit(status)
