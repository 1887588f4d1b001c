"""Write docs/settings.md from the settings classes and the docstrings of their fields."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from foundation.settings import sections_in
from foundation.units import cell
from pretrain.precision.settings import PRECISIONS, LowPrecisionSettings
from pretrain.settings.recipe import Recipe

HEAD = """\
# Settings

Every key of a recipe, in the order in which most users need them. `make docs` writes this page from
the classes that check recipes. A key is followed by its default value. A key without one is `null`
unless it is *required*. [`schema.json`](../recipes/schema.json) has the limits of numbers.

* A key that is not on this page is an error, which names the most similar key.
* `base: other.yaml` includes another recipe, with a path relative to the recipe, whose keys are
  overridden one by one: `train.tokens` replaces `train.steps`. `model.config` is replaced as a
  whole.
* `key=value` on the command line overrides the recipe, with dots for nesting:
  `optimizer.learning_rate=1e-4 train.tokens=2e9`. The last value of a key counts, where
  `train.steps`, `train.tokens` and `train.epochs` are one key.
* YAML reads `on`, `yes`, `off` and `no` as true and false, and `12` as a number. A text that YAML
  would read so needs quotation marks: `name: "no"`. A date, `017` and `1:30` are texts.
* **Editors** with a YAML language server complete keys by the schema, which the first line names:
  `# yaml-language-server: $schema=PATH`, with a path relative to the recipe.
* `config.yaml` in the run folder has every key and is a recipe too.
"""
COMMON_KEYS = (
    *("name", "model.source", "model.config", "data.source", "data.tokenizer", "data.length"),
    *("data.held_out", "batch.tokens", "optimizer.learning_rate", "schedule.warmup"),
    *("train.tokens", "evaluate.every"),
)
# Keys that are in no section, by their heading.
GROUPS = {
    "Name and run": ("name", "run_dir", "seed", "deterministic", "parity"),
    "Precision and weights": ("precision", "weights"),
}
# Headings and sections in the order of the page, with the guide of each.
GUIDES = {
    "Name and run": "training.md",
    "model": "training.md",
    "data": "data.md",
    "batch": "several_gpus.md",
    "optimizer": "training.md",
    "schedule": "training.md",
    "train": "training.md",
    "evaluate": "training.md#evaluation",
    "checkpoint": "training.md#checkpoints",
    "Precision and weights": "evidence.md",
    "fp8_config": "evidence.md",
    "log": "training.md#metrics",
    "health": "training.md#if-something-fails",
    "loss": "training.md#the-loss",
}
# Names of the types of JSON schema.
TYPES = {
    "boolean": "`true`, `false`",
    "integer": "integer",
    "number": "number",
    "string": "text",
    "object": "mapping",
}
Row = tuple[str, str, str, str]  # key, type, default, meaning


def page() -> str:
    """Return the text of docs/settings.md."""
    all_rows = list(rows(Recipe))
    parts = [HEAD, "## The 12 keys of most recipes", common_keys(all_rows)]
    for heading, guide in GUIDES.items():
        if heading in GROUPS:
            names, title, text = GROUPS[heading], heading, ""
        else:
            names, title = (heading,), f"`{heading}`"
            [cls] = sections_in(Recipe.model_fields[heading].annotation)
            text = introduction(cls)
        content = [row for name in names for row in all_rows if top_name(row) == name]
        link = f"Guide: [{guide.partition('#')[0]}]({guide})."
        parts += [f"## {title}", text, link, table(content)]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def top_name(row: Row) -> str:
    """Return the field of the recipe that the key of a row belongs to."""
    return re.split(r"[.\[]", row[0])[0]


def common_keys(all_rows: list[Row]) -> str:
    """Return a table with the first sentence about each of COMMON_KEYS."""
    meanings = {key: meaning for key, _, _, meaning in all_rows}
    lines = ["| key | meaning |", "|---|---|"]
    for key in COMMON_KEYS:
        sentence = re.split(r"(?<=\.) ", meanings[key])[0]
        lines.append(f"| `{key}` | {cell(sentence)} |")
    return "\n".join(lines)


def introduction(cls: type[BaseModel]) -> str:
    """Return the docstring of a section's class, wrapped at 100 columns. Empty without one."""
    paragraphs = inspect.cleandoc(vars(cls).get("__doc__") or "").split("\n\n")
    return "\n\n".join(textwrap.fill(paragraph, 100) for paragraph in paragraphs)


def rows(cls: type[BaseModel]) -> Iterator[Row]:
    """Yield the rows of all fields of `cls` and of its sections.

    A section that is a source, as `data` is, has a row of its own. Only the keys that `data` does
    not have are listed below it.
    """
    schemas = cls.model_json_schema()["properties"]
    for key, field in cls.model_fields.items():
        schema = schemas[key]
        is_list = "items" in json.dumps(schema)
        sections = sections_in(field.annotation)
        # Keys that the section inherits from a base class of `cls`, such as SourceSettings.
        shared_keys = {
            shared
            for section in sections
            for base in section.__mro__
            if issubclass(cls, base)
            for shared in getattr(base, "model_fields", {})
        }
        kind = words(schema)
        if is_list and sections:
            kind = " or ".join(filter(None, [kind, "list of sections"]))
        if kind or shared_keys:
            default = "required"
            if not field.is_required():
                default = in_yaml(field.get_default(call_default_factory=True))
            options = option_defaults(key) if cls is LowPrecisionSettings else ""
            yield key, kind or "section", options or default, one_line(field.description)
        for section in sections:
            for inner, inner_kind, default, meaning in rows(section):
                if inner in shared_keys:
                    continue
                # If the key may have another value than a section, no key of the section is
                # required.
                is_optional = default == "required" and kind and not is_list
                inner_key = f"{key}{'[]' if is_list else ''}.{inner}"
                yield inner_key, inner_kind, "" if is_optional else default, meaning


def one_line(text: str | None) -> str:
    """Return a docstring on one line."""
    return " ".join((text or "").split())


def table(content: list[Row]) -> str:
    """Return the rows as a Markdown table: key and default in a column, then the meaning.

    The type is part of the meaning, unless the default or the meaning shows it.
    """
    lines = ["| key and default | meaning |", "|---|---|"]
    for key, kind, default, meaning in content:
        value = "" if default in ("`null`", "required", "") else f" = {default}"
        notes = [] if value and shows_type(kind, default, meaning) else [kind]
        notes += ["required"] if default == "required" else []
        note = f"*{', '.join(notes)}.* " if notes else ""
        lines.append(f"| `{key}`{cell(value)} | {cell(note + meaning)} |")
    return "\n".join(lines)


def shows_type(kind: str, default: str, meaning: str) -> bool:
    """Return True if a reader knows the type of a key from its default and its meaning."""
    if default == "`[]`":
        return False
    named = set(re.findall(r"[\w+-]+", f"{default} {meaning}"))
    return kind == "`true`, `false`" or set(re.findall("`(.*?)`", kind)) <= named


def words(schema: dict[str, Any]) -> str:
    """Return the type of a JSON schema, such as "list of text".

    Returns "" for null and for a section.
    """
    if members := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(filter(None, map(words, members))))
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
        return ", ".join(f"`{value}`" for value in values)
    if schema.get("type") == "array":
        items = schema.get("prefixItems") or [schema["items"]]
        inside = dict.fromkeys(map(words, items))
        return f"list of {' or '.join(inside)}" if any(inside) else ""
    return "path" if schema.get("format") == "path" else TYPES.get(schema.get("type", ""), "")


def in_yaml(value: Any) -> str:
    """Return a default as a recipe spells it, in backticks."""
    return f"`{value if isinstance(value, (str, Path)) else json.dumps(value)}`"


def option_defaults(key: str) -> str:
    """Return the defaults of an option of single precisions, with the names of these precisions.

    Returns "" for a key that all precisions have.
    """
    names: dict[str, list[str]] = {}
    for precision in PRECISIONS.values():
        if key in precision.options:
            names.setdefault(in_yaml(precision.options[key]), []).append(precision.name)
    return "; ".join(f"{value} ({', '.join(precisions)})" for value, precisions in names.items())
