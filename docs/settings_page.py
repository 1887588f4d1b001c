"""docs/settings.md, made from the settings classes: `make docs`.

What a key means stands once, beside the key: in the comment that trails its line, or in the comment lines right above it. A
comment that ends with a colon is the heading of a group of keys and belongs to none of them.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from foundation.settings import Settings, sections_in
from foundation.units import cell
from pretrain.precision.settings import PRECISIONS, LowPrecisionSettings
from pretrain.settings.recipe import Recipe

HEAD = """\
# Settings

Every key that a recipe can have. `make docs` writes this page from the classes that check recipes,
and a test compares the two. To change it, change the comment beside the key: in
`pretrain/settings/recipe.py`, `packing/settings.py`, `pretrain/precision/settings.py` or the file
of a precision.

* A recipe is a YAML file. A key that is not listed here is an error that names the nearest known
  one.
* `base: other.yaml` at its top takes everything from another recipe, a path from this file on; what
  the recipe says itself overrides it, key by key: `train.tokens` replaces `train.steps`, and
  `model.config` is replaced as a whole.
* `key=value` on the command line overrides the recipe, with dots for nesting:
  `optimizer.learning_rate=1e-4 train.tokens=2e9`. Of a key given twice, the last value counts.
* Where the default is `null`, the last column says what that means.
* The run folder's `config.yaml` holds every key with the value that the run really had, of each of
  several sources too, and can be trained as a recipe.
* How processes are started, and the precision where the recipe names none, stand in the accelerate
  configuration (`accelerate_configs/`). `fp8_config` has the same keys there and here; here
  overrides there, key by key.
"""


def page() -> str:
    """The whole of docs/settings.md."""
    sections = {
        name: field for name, field in Recipe.model_fields.items() if is_section(Recipe, name)
    }
    own = [
        row for row in rows(Recipe) if row[0].partition(".")[0].partition("[")[0] not in sections
    ]
    parts = [HEAD, "## The recipe itself", table(own)]
    for name, field in sections.items():
        [cls] = sections_in(field.annotation)
        parts += [f"## `{name}`", introduction(cls), table(list(rows(cls, f"{name}.")))]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def introduction(cls: type[BaseModel]) -> str:
    """The docstring of a section's class, wrapped anew, where it has one of its own."""
    paragraphs = inspect.cleandoc(vars(cls).get("__doc__") or "").split("\n\n")
    return "\n\n".join(textwrap.fill(paragraph, 100) for paragraph in paragraphs)


def rows(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every field of `cls` and of its sections. A section that is a source, as `data` itself is,
    has just the keys that a source has not, and a row of its own."""
    meanings, schemas = comments(cls), cls.model_json_schema()["properties"]
    for name, field in cls.model_fields.items():
        key, schema = f"{prefix}{name}", schemas[name]
        listed = "items" in json.dumps(schema)
        sections = sections_in(field.annotation)
        known = {
            known
            for section in sections
            for base in section.__mro__
            if issubclass(cls, base)
            for known in keys_of(base)
        }
        kind = words(schema)
        if listed and sections:
            kind = " or ".join(filter(None, [kind, "list of sections"]))
        if kind or known:
            default = (
                "required"
                if field.is_required()
                else in_yaml(field.get_default(call_default_factory=True))
            )
            options = option_defaults(name) if cls is LowPrecisionSettings else ""
            yield key, kind or "section", options or default, meanings.get(name, "")
        for section in sections:
            for inner, kind_inside, default, meaning in rows(section):
                if inner not in known:
                    # beside other values none of the section's keys is
                    needed = default != "required" or listed or not kind
                    yield (
                        f"{key}{'[]' if listed else ''}.{inner}",
                        kind_inside,
                        default if needed else "",
                        meaning,
                    )


def keys_of(cls: type) -> set[str]:
    return set(getattr(cls, "model_fields", {}))


def is_section(cls: type[BaseModel], name: str) -> bool:
    """Whether a field holds a settings class and nothing else."""
    annotation = cls.model_fields[name].annotation
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def comments(cls: type[BaseModel]) -> dict[str, str]:
    """What the source of `cls` and of its bases says of each field: the comment that trails its line, then those right above."""
    meanings: dict[str, str] = {}
    for base in reversed([each for each in cls.__mro__ if issubclass(each, Settings)]):
        above: list[str] = []
        for line in inspect.getsource(base).splitlines():
            if comment := re.fullmatch(r"    # (.*)", line):
                above = [] if comment[1].endswith(":") else [*above, comment[1]]
                continue
            if field := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
                meanings[field[1]] = " ".join(filter(None, [field[2], *above]))
            above = []
    return meanings


def table(content: list[tuple[str, str, str, str]]) -> str:
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [" | ".join([f"| `{key}`", *map(cell, others)]) + " |" for key, *others in content]
    return "\n".join(lines)


def words(schema: dict[str, Any]) -> str:
    """The type of a JSON schema in words, with its bounds: "whole number, 1 or more". Empty for null, and for a section."""
    if members := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(filter(None, map(words, members))))
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
        return ", ".join(f"`{value}`" for value in values)
    if examples := schema.get("examples"):
        return f"as {', '.join(f'`{each}`' for each in examples)}"
    if schema.get("type") == "array":
        inside = dict.fromkeys(
            words(item) for item in schema.get("prefixItems") or [schema["items"]]
        )
        return f"list of {' or '.join(inside)}" if any(inside) else ""
    names = {
        "boolean": "`true`, `false`",
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "object": "mapping",
    }
    name = "path" if schema.get("format") == "path" else names.get(schema.get("type", ""), "")
    form = "{:,}" if name == "whole number" else "{:g}"
    bounds = {
        "exclusiveMinimum": "above {}",
        "minimum": "{} or more",
        "exclusiveMaximum": "below {}",
        "maximum": "at most {}",
    }
    limits = [
        text.format(form.format(schema[key])) for key, text in bounds.items() if key in schema
    ]
    return ", ".join([name, *limits])


def in_yaml(value: Any) -> str:
    return f"`{value if isinstance(value, (str, Path)) else json.dumps(value)}`"


def option_defaults(key: str) -> str:
    """The default of an option of single precisions, with the precisions that take it; empty for a key that all take."""
    taken: dict[str, list[str]] = {}
    for precision in PRECISIONS.values():
        if key in precision.options:
            taken.setdefault(in_yaml(precision.options[key]), []).append(precision.name)
    return "; ".join(f"{value} ({', '.join(names)})" for value, names in taken.items())


if __name__ == "__main__":
    print(page(), end="")
