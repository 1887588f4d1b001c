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

This page lists every key of a recipe. `make docs` writes it from the classes that check recipes.
The text of a key is the docstring below its field, in `pretrain/settings/recipe.py`,
`packing/settings.py` or `pretrain/precision/settings.py`.

* A recipe is a YAML file. A key that is not on this page is an error, which names the most similar
  key.
* `base: other.yaml` at the top of a recipe includes another recipe. Its path is relative to the
  recipe. Keys of the recipe override the included ones one by one: `train.tokens` replaces
  `train.steps`. `model.config` is replaced as a whole.
* `key=value` on the command line overrides the recipe, with dots for nesting:
  `optimizer.learning_rate=1e-4 train.tokens=2e9`. If a key is given twice, the last value counts.
  `train.steps`, `train.tokens` and `train.epochs` count as one key here.
* If the default is `null`, the last column explains `null`.
* YAML reads `on`, `yes`, `off` and `no` as true and false, and `12` as a number. A text that YAML
  would read so needs quotation marks: `name: "no"`. A date, `017` and `1:30` are texts.
* **In an editor** with a YAML language server, such as VS Code with the YAML extension,
  [`schema.json`](../recipes/schema.json) completes and explains keys, and marks mistakes. Recipes
  in `recipes/` name the schema in their first line. In a recipe of your own, this line is
  `# yaml-language-server: $schema=PATH`, where PATH is relative to the recipe.
* `config.yaml` in the run folder has every key with the value that the run used. It can be used as
  a recipe.
* The recipe [overrides](precision.md#where-a-precision-is-set) the precision and the `fp8_config`
  of the Accelerate configuration (`accelerate_configs/`) key by key.
"""
# Names of the types of JSON schema.
TYPES = {
    "boolean": "`true`, `false`",
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "object": "mapping",
}
BOUNDS = {
    "exclusiveMinimum": "above {}",
    "minimum": "{} or more",
    "exclusiveMaximum": "below {}",
    "maximum": "at most {}",
}

Row = tuple[str, str, str, str]  # key, type, default, meaning


def page() -> str:
    """Return the text of docs/settings.md."""
    sections = {
        name: field for name, field in Recipe.model_fields.items() if is_section(Recipe, name)
    }
    top_level = [row for row in rows(Recipe) if re.split(r"[.\[]", row[0])[0] not in sections]
    parts = [HEAD, "## The recipe itself", table(top_level)]
    for name, field in sections.items():
        [cls] = sections_in(field.annotation)
        parts += [f"## `{name}`", introduction(cls), table(list(rows(cls, f"{name}.")))]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def introduction(cls: type[BaseModel]) -> str:
    """Return the docstring of a section's class, wrapped at 100 columns. Empty without one."""
    paragraphs = inspect.cleandoc(vars(cls).get("__doc__") or "").split("\n\n")
    return "\n\n".join(textwrap.fill(paragraph, 100) for paragraph in paragraphs)


def rows(cls: type[BaseModel], prefix: str = "") -> Iterator[Row]:
    """Yield the rows of all fields of `cls` and of its sections.

    A section that is a source, as `data` is, has a row of its own. Only the keys that `data` does
    not have are listed below it.
    """
    schemas = cls.model_json_schema()["properties"]
    for name, field in cls.model_fields.items():
        key = f"{prefix}{name}"
        schema = schemas[name]
        is_list = "items" in json.dumps(schema)
        sections = sections_in(field.annotation)
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
            options = option_defaults(name) if cls is LowPrecisionSettings else ""
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


def is_section(cls: type[BaseModel], name: str) -> bool:
    """Return whether the only type of a field is a settings class."""
    annotation = cls.model_fields[name].annotation
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def one_line(text: str | None) -> str:
    """Return a docstring on one line."""
    return " ".join((text or "").split())


def table(content: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [" | ".join([f"| `{key}`", *map(cell, values)]) + " |" for key, *values in content]
    return "\n".join(lines)


def words(schema: dict[str, Any]) -> str:
    """Return the type of a JSON schema with its bounds, such as "whole number, 1 or more".

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
    name = "path" if schema.get("format") == "path" else TYPES.get(schema.get("type", ""), "")
    number = "{:,}" if name == "whole number" else "{:g}"
    limits = [
        text.format(number.format(schema[key])) for key, text in BOUNDS.items() if key in schema
    ]
    return ", ".join([name, *limits])


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


if __name__ == "__main__":
    print(page(), end="")
