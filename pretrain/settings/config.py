"""A recipe from its file and the command line: defaults < the `base` that it names < recipe file < `key=value` overrides.

Overrides are dotted paths with YAML values: `weights=bf16 optimizer.learning_rate=1e-4 train.tokens=2e9`. The last value
of a key counts. A key that excludes others in the recipe (steps, tokens or epochs) replaces them when it stands on the command
line.
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

# Keys of which a recipe sets one: naming one on the command line takes the others out of the file's values.
HORIZON = ("train.steps", "train.tokens", "train.epochs")

_NOT_IDENTITY = (
    *(
        "name",
        "run_dir",
        "log.",
        "checkpoint.",
        "evaluate.",
        "health.",
        "parity",
        "deterministic",
        "batch.microbatch",
    ),
    *(
        "loss.kind",
        "loss.chunk",
        "model.attention",
        "model.compile",
        "model.fused",
        "model.gradient_checkpointing",
    ),
    # On what the precision is computed, not which it is: emulation gives the hardware's numbers but for the order of sums.
    *("fp8_config.backend", "fp8_config.on_unsupported", "fp8_config.use_autocast_during_eval"),
    # How the packs came to be: what they hold has a fingerprint of its own.
    *(
        "data.packs",
        "data.source",
        "data.subset",
        "data.split",
        "data.streaming",
        "data.text",
        "data.tokenizer",
    ),
    *("data.validation", "data.messages", "data.chat_template", "data.input_ids", "data.labels"),
    *("data.packing", "data.held_out", "data.on_bad_line"),
)

# with which an identity's keys of what the config.json of `model.source` says begin
SOURCE = "model.source."


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe at `path`, apply `overrides`, check every key.

    Raises InputError naming the file and the key of every mistake.
    """
    values: dict[str, Any] = {}
    for _, own in load_with_bases(path):
        values = _over(values, own)
    for key, value in parse_overrides(overrides):
        for section, _, name in (replaced.rpartition(".") for replaced in _replaced_by(key, value)):
            if isinstance(there := values.get(section), dict):
                there.pop(name, None)
        set_value(values, key, value)
    return parse(Recipe, values, f"command line, over {path}" if overrides else str(path))


def parse_overrides(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """Returns the keys that `overrides` set, each with its value. InputError where one is not of their form."""
    values = []
    for text in overrides:
        key, _, value = text.partition("=")
        if not key or key == text:
            raise InputError(
                f"command line: {text!r} is not key=value, as in weights=bf16 or optimizer.learning_rate=1e-4"
            )
        values.append((key.strip(), value_from_text(Recipe, key.strip(), value)))
    return values


def _replaced_by(key: str, value: Any) -> tuple[str, ...]:
    """Returns the keys that have no value of before any more where `key` is set to `value`, itself among them."""
    return HORIZON if key in HORIZON and value is not None else (key,)


def _over(values: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Returns what a file says, put over what it builds on: key by key of each section, but a key's value, such as that of
    `model.config`, as a whole."""
    merged = dict(values)
    for section, mine in own.items():
        below = merged.get(section)
        if isinstance(below, dict) and isinstance(mine, dict):
            gone = {
                replaced
                for key, value in mine.items()
                for replaced in _replaced_by(f"{section}.{key}", value)
            }
            mine = {
                key: value for key, value in below.items() if f"{section}.{key}" not in gone
            } | mine
        merged[section] = mine
    return merged


def run_dir_of(recipe: Recipe) -> Path:
    """The run folder, with the recipe's own values for its {keys}: {name}, {optimizer.learning_rate}, ..."""
    return Path(filled_in(recipe.run_dir, _fields_of(recipe)))


def branch_checkpoint(recipe: Recipe) -> Path | None:
    """Return the path in `train.begin_with` with its {keys} filled in, or None if it is not set."""
    path = recipe.train.begin_with
    if path is None:
        return None
    return Path(filled_in(path, _fields_of(recipe), "train.begin_with"))


def _fields_of(recipe: Recipe) -> dict[str, Any]:
    fields = flatten(resolved(recipe)) | {"precision": label(recipe.precision, in_a_path=True)}
    return {
        key: value for key, value in fields.items() if key not in ("run_dir", "train.begin_with")
    }


def filled_in(path: str, fields: Mapping[str, Any], key: str = "run_dir") -> str:
    """`path`, the value of `key`, with its {fields}, each written as a part of a folder's name; InputError for other braces."""

    def written(field: re.Match[str]) -> str:
        if field[1] in fields:
            return in_a_name(fields[field[1]])
        near = difflib.get_close_matches(field[1] or "", fields, n=1, cutoff=0.7)
        hint = (
            f"did you mean {{{near[0]}}}?" if near else "any key of the recipe can stand in braces"
        )
        raise InputError(f"`{key}`: {path!r} cannot be filled in; {hint}")

    return re.sub(r"{(.*?)}|[{}]", written, path)


def in_a_name(value: Any) -> str:
    """A setting's value as a part of a folder's name: 0.0003, bf16, true, null, 0.9,0.95, Qwen_Qwen3-1.7B."""
    text = (
        value
        if isinstance(value, str)
        else json.dumps(value).strip("[]").replace('"', "").replace(", ", ",")
    )
    return re.sub(r"^\.+[^A-Za-z0-9._+=,-]*|[^A-Za-z0-9._+=,-]+", "_", text)


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Every setting as plain values, of each of several sources what it really has. Written as YAML, `load_recipe` reads it back
    to a recipe that trains the same, and whose settings these are again."""
    return recipe.model_dump(mode="json")


def identity_of(recipe: Recipe, data_fingerprint: str) -> dict[str, Any]:
    """Returns what defines a training: flat settings without those that change where, how fast and how visibly it runs, and the
    data.

    Two runs of one identity see the same tokens in the same order under the same rule of learning. A checkpoint of another
    identity is not resumed unless the user insists.
    """
    return settings_without(recipe, _NOT_IDENTITY) | {"data.fingerprint": data_fingerprint}


def settings_without(recipe: Recipe, idle: tuple[str, ...]) -> dict[str, Any]:
    """Flat settings, but those whose keys begin with one of `idle`, and options of a low precision that is not used."""
    idle = idle if is_quantized(recipe.precision) else (*idle, "fp8_config.")
    return {
        key: value for key, value in flatten(resolved(recipe)).items() if not key.startswith(idle)
    }


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level with dotted keys: {"data": {"length": 1}} -> {"data.length": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class LaunchParser(CommandParser):
    """Reads a recipe and what is set over it, as key=value or --key=value, which W&B's agents write."""

    remedy = "a setting is key=value or --key=value, `python -m pretrain evaluate` evaluates alone, --help lists the options"

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        super().__init__(prog, description)
        self.add_argument("recipe", type=Path, help="what is trained: a YAML file, see recipes/")
        settings = "over the recipe's settings: weights=bf16 train.steps=9"
        self.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=settings)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        options = [option for action in self._actions for option in action.option_strings]

        def is_setting(text: str) -> bool:
            name, equals, _ = text.partition("=")
            return (
                bool(equals)
                and name.startswith("--")
                and not any(option.startswith(name) for option in options)
            )

        # Intermixed, so that key=value may follow an option.
        return super().read([text[2:] if is_setting(text) else text for text in arguments])


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Returns the launcher's arguments; `description`: what it is, for --help. InputError for an option that there is not."""
    parser = LaunchParser(None, description)
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="CHECKPOINT",
        help="default auto: the run's newest intact one",
    )
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="continue a checkpoint although the recipe has changed",
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--plan", action="store_true", help="say what would happen, check every setting, and stop"
    )
    one.add_argument(
        "--profile",
        action="store_true",
        help="record a step: profile.md and a trace in the run folder",
    )
    return parser.read(sys.argv[1:])


def check_arguments(description: str | None) -> None:
    """Ends the process with a message where the launcher's arguments or the recipe have a mistake."""

    def read() -> None:
        arguments = parse_arguments(description)
        load_recipe(arguments.recipe, arguments.overrides)

    if status := run_command(read):
        sys.exit(status)
