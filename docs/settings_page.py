"""docs/settings.md, made from the settings classes: `make docs`.

What a key means stands once, beside the key: in the comment that trails its line, or in the comment lines right above it. A
comment that ends with a colon is the heading of a group of keys and belongs to none of them. A key that is made elsewhere (an
option of a precision, say) brings its meaning as the `description` of its pydantic field.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Discriminator, Tag
from pydantic.fields import FieldInfo

from foundation.settings import Settings
from pretrain.precision.settings import PRECISIONS, LowPrecisionSettings, PrecisionName
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
  `optimizer.learning_rate=1e-4 train.tokens=2e9`. A key that is given twice is refused. In braces a
  colon needs no blank: `data.streaming={window:1e7}`.
* Where the default is `null`, the last column says what that means.
* The run folder's `config.yaml` holds every key with the value that the run really had, of each of
  several sources too, and can be trained as a recipe.
* How processes are started, and the precision where the recipe names none, stand in the accelerate
  configuration (`accelerate_configs/`). `fp8_config` has the same keys there and here; here
  overrides there, key by key.
"""


def page() -> str:
    """The whole of docs/settings.md."""
    own = [row for row in rows(Recipe) if "." not in row[0].replace("[].", "")]
    parts = [HEAD, "## The recipe itself", table(own)]
    for name, field in Recipe.model_fields.items():
        for cls in settings_classes(field.annotation):
            parts += [f"## `{name}`", introduction(cls), table(list(rows(cls, f"{name}.")))]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def introduction(cls: type[BaseModel]) -> str:
    """The docstring of a section's class, wrapped anew, where it has one of its own."""
    paragraphs = inspect.cleandoc(vars(cls).get("__doc__") or "").split("\n\n")
    return "\n\n".join(textwrap.fill(paragraph, 100) for paragraph in paragraphs)


def rows(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every field of `cls`, those of its sections included when a `prefix` is given."""
    said = comments(cls)
    for name, field in cls.model_fields.items():
        below = settings_classes(field.annotation)
        key, meaning = f"{prefix}{name}", field.description or said.get(name, "")
        if below and not prefix:
            continue  # a section of the recipe, which has a table of its own
        options = option_defaults(name) if cls is LowPrecisionSettings else ""
        others = [part for part in union(field.annotation) if part not in below]
        if others or not below:
            yield key, kind(field), options or default(field), meaning
        for section in in_list(field.annotation):
            for inner, *said_of_it in rows(section, ""):
                if inner not in in_common(cls, section):
                    yield f"{key}[].{inner}", *said_of_it
        for section in below:
            if in_the_table := in_common(cls, section):
                yield key, "section", default(field), meaning
            for inner, type_, default_, meaning in rows(section, f"{key}."):
                if inner.removeprefix(f"{key}.") not in in_the_table:
                    # Beside `others` none of the section's keys is needed.
                    yield inner, type_, "" if others and default_ == "required" else default_, meaning


def in_common(cls: type[BaseModel], section: type[BaseModel]) -> set[str]:
    """The keys of `section` that it has from a class from which `cls` has them, too."""
    return {name for base in section.__mro__ if issubclass(cls, base) for name in getattr(base, "model_fields", {})}


def comments(cls: type[BaseModel]) -> dict[str, str]:
    """What the source of `cls` and of its bases says of each field: the comment that trails its line, then those right above."""
    said: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Settings):
            with contextlib.suppress(OSError, TypeError):  # a class that was made by a call has no source
                said |= _comments_in(inspect.getsource(base))
    return said


def _comments_in(source: str) -> dict[str, str]:
    said, above = {}, []
    for line in source.splitlines():
        if comment := re.fullmatch(r"    # (.*)", line):
            above = [] if comment[1].endswith(":") else [*above, comment[1]]
        else:
            if field := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
                said[field[1]] = " ".join(filter(None, [field[2], *above]))
            above = []
    return said


def table(content: list[tuple[str, str, str, str]]) -> str:
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [" | ".join([f"| `{key}`", *(cell.replace("|", "\\|") for cell in said)]) + " |" for key, *said in content]
    return "\n".join(lines)


def settings_classes(annotation: Any) -> list[type[BaseModel]]:
    """The settings classes in `annotation`, which may be a union."""
    return [part for part in union(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]


def in_list(annotation: Any) -> list[type[BaseModel]]:
    """The settings classes of which `annotation` is a list."""
    tuples = [part for part in union(annotation) if typing.get_origin(part) is tuple]
    return [inner for part in tuples for inner in settings_classes(typing.Union[typing.get_args(part)[:1]])]  # noqa: UP007


def union(annotation: Any) -> list[Any]:
    """The members of a union without None, of unions inside of it too; anything else by itself."""
    inner = typing.get_args(annotation)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return [member for part in inner if part is not type(None) for member in union(part)]
    if typing.get_origin(annotation) is typing.Annotated and isinstance(inner[-1], Discriminator):
        return union(inner[0])
    if typing.get_origin(annotation) is typing.Annotated and isinstance(inner[-1], Tag):  # what tells it from the others
        return union(typing.Annotated[inner[:-1]] if inner[1:-1] else inner[0])
    if typing.get_origin(annotation) is typing.Annotated and typing.get_origin(inner[0]) is tuple:
        return [inner[0]]
    return [annotation]


def kind(field: FieldInfo) -> str:
    parts = [part for part in union(field.annotation) if part not in settings_classes(field.annotation)]
    return " or ".join(dict.fromkeys(words(part, field.metadata) for part in parts))


def words(annotation: Any, constraints: list[Any]) -> str:
    """A type in words, with its bounds: "whole number, 1 or more"."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if union(annotation) != [annotation]:
        return " or ".join(words(part, []) for part in union(annotation))
    a_name = annotation == PrecisionName or (constraints and typing.Annotated[(annotation, *constraints)] == PrecisionName)
    if a_name or origin is Literal:
        return ", ".join(f"`{value}`" for value in (inner if origin is Literal else PRECISIONS))
    if origin is typing.Annotated:
        nested = (item.metadata if isinstance(item, FieldInfo) else [item] for item in inner[1:])
        return words(inner[0], [each for item in nested for each in item])
    if origin is tuple:
        return f"list of {' or '.join(dict.fromkeys(words(part, []) for part in inner if part is not Ellipsis))}"
    if settings_classes(annotation):
        return "sections"
    if dict in (origin, annotation):
        return "mapping"
    names = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text", Path: "path"}
    return ", ".join([names.get(annotation, str(annotation)), *bounds(annotation, constraints)])


def bounds(annotation: Any, constraints: list[Any]) -> list[str]:
    limits = []
    for each in constraints if annotation in (int, float) else []:
        for name, form in {"gt": "above {}", "ge": "{} or more", "lt": "below {}", "le": "at most {}"}.items():
            if (limit := getattr(each, name, None)) is not None:
                above = annotation is int and name == "gt"
                text = f"{limit + above:,}" if annotation is int else f"{limit:g}"
                limits.append(("{} or more" if above else form).format(text))
    return limits


def default(field: FieldInfo) -> str:
    return "required" if field.is_required() else in_yaml(field.get_default(call_default_factory=True))


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
