"""Typed settings that reject unknown keys, and readable messages for pydantic's errors."""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from foundation.errors import InputError
from foundation.reading import parse_yaml, refusing


class Settings(BaseModel):
    """Base class of settings: immutable, without unknown keys or non-finite numbers.

    A subclass may define two class variables for the message about an unknown key. `OTHER_NAMES`
    maps names of other programs, in lower case, to keys. `UNKNOWN_KEY_HELP` is a sentence that is
    added when no similar key exists.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


def at_home(value: Any) -> Any:
    """Expand `~/` at the beginning of a text. Return any other value unchanged.

    A shell does not expand `~/` behind `data.packs=`, and no shell reads a recipe.
    """
    if isinstance(value, str) and value.startswith("~") and "/" in value:
        return os.path.expanduser(value)
    return value


Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]
# Tensors, files and other libraries store a seed in 64 bits.
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
# A path or a name, such as that of a dataset. Used where the file system decides which it is.
PathText = Annotated[str, BeforeValidator(at_home)]
FilePath = Annotated[Path, BeforeValidator(at_home)]

S = TypeVar("S", bound=BaseModel)


def parse(cls: type[S], values: dict[str, Any], origin: str) -> S:
    """Build `cls` from `values`.

    Raises one InputError with a line for each wrong key. Each line begins with `origin`, the name
    of the file. pydantic reports one mistake for each member of a union. They are joined in one
    line, or replaced by the mistake in a key inside of a member.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        by_key: dict[str, list[str]] = {}
        for item in error.errors(include_url=False):
            key, mistake = _describe(cls, item)
            by_key.setdefault(key, []).append(mistake)
        lines = []
        for key, mistakes in by_key.items():
            if any(other.startswith(f"{key}.") for other in by_key):
                continue  # the mistake inside of this section is reported instead
            subject = f"{origin}: `{key}`: " if key else f"{origin}: "
            lines.append(subject + ", or ".join(dict.fromkeys(mistakes)))
        raise InputError("\n".join(lines)) from None


# The names that pydantic gives to the members of a union in an error's location.
_MEMBER = re.compile(r"[A-Z]\w*|.*[\[\]-].*|bool|int|float|str|tuple|dict")


def _describe(cls: type[BaseModel], item: Mapping[str, Any]) -> tuple[str, str]:
    """Return the dotted key of a pydantic error and the mistake in its value.

    The key has no names of union members, which pydantic puts into the location.
    """
    *parents, last = item["loc"] or [""]
    is_unknown = item["type"] == "extra_forbidden"  # then `last` is the key that the user wrote
    parts = parents if is_unknown else item["loc"]
    keys = [str(part) for part in parts if not (isinstance(part, str) and _MEMBER.fullmatch(part))]
    if is_unknown:
        return ".".join([*keys, str(last)]), f"unknown key; {_hint(cls, keys, str(last))}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "model_type":  # the value should be a section
        message = f"a section; its keys: {', '.join(sorted(_section(cls, keys).model_fields))}"
    if item["type"] not in ("missing", "value_error"):
        message += f", and is {item['input']!r:.200}"
    return ".".join(keys), message


def _hint(cls: type[BaseModel], keys: list[str], name: str) -> str:
    """Suggest a key for the unknown key `name` in the section `keys`.

    Keys of this section come before keys of other sections, exact names before names of other
    programs (`OTHER_NAMES` of `cls`), and those before similar names.
    """
    section = ".".join([*keys, ""]) if keys else ""

    def is_outside(key: str) -> bool:
        return not key.startswith(section) or "." in key.removeprefix(section)

    by_name: dict[str, str] = {}
    for key in sorted(_keys_of(cls), key=is_outside):
        by_name.setdefault(key.rpartition(".")[2].lower(), key)
    if keys:
        # Many things have a name. A `name` inside of a section does not mean the run's name.
        by_name.pop("name", None)
    other_names = getattr(cls, "OTHER_NAMES", {})
    if match := by_name.get(name.lower()) or other_names.get(name.lower()):
        return f"did you mean `{match}`?"
    if similar := difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.8):
        return f"did you mean `{by_name[similar[0]]}`?"
    known_keys = ", ".join(sorted(_section(cls, keys).model_fields))
    help_text = getattr(cls, "UNKNOWN_KEY_HELP", "")
    return f"known keys here: {known_keys}{help_text and f'; {help_text}'}"


def _keys_of(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a settings class and its sections."""
    for name, field in cls.model_fields.items():
        yield f"{prefix}{name}"
        for section in sections_in(field.annotation):
            yield from _keys_of(section, f"{prefix}{name}.")


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the types that an annotation allows: members of nested unions, or the type itself."""
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return (annotation,)
    return tuple(member for part in typing.get_args(annotation) for member in _members(part))


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the settings classes in an annotation, including those inside of lists and unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in sections_in(part)]


def _section(cls: type[BaseModel], keys: list[str]) -> type[BaseModel]:
    """Return the settings class at the dotted key `keys`. Unknown keys are ignored."""
    for key in keys:
        field = cls.model_fields.get(key)
        if field:
            cls = next(iter(sections_in(field.annotation)), cls)
    return cls


def value_from_text(cls: type[BaseModel], key: str, text: str) -> Any:
    """Return the value of `key=text` on a command line.

    `text` is YAML, unless the key holds a text or a path: YAML would read the template
    `{title}: {text}` as a mapping. For those keys:

    * `null` is None and two quotes are the empty text.
    * `\\n` and `\\t` are a line feed and a tab, because a shell passes them on as two characters.
    * If the key may hold a list too, `[` begins a list. If it holds only lists, any other text is a
      list of one.

    Raises InputError if the text is not YAML or is empty. An unset shell variable makes it empty,
    and YAML would read that as null.
    """
    if not text.strip():
        raise InputError(
            f"command line: `{key}=` is empty; write a value, `{key}=null` for none, "
            "or leave it out"
        )
    *parents, name = key.split(".")
    field = _section(cls, parents).model_fields.get(name)
    members = set(_members(field.annotation)) if field else set()
    lists = {member for member in members if typing.get_origin(member) in (list, tuple)}
    begins_list = text.lstrip().startswith("[")
    if lists and members == lists and not begins_list:
        return [text]
    if members & {str, Path} and text != "null" and not (lists and begins_list):
        if text in ("''", '""'):
            return ""
        return text.replace("\\n", "\n").replace("\\t", "\t")
    with refusing(
        (ValueError, TypeError, yaml.YAMLError),
        f"command line: the value of `{key}={text:.200}` is not valid YAML",
    ):
        return parse_yaml(text)


def set_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted `key` in the nested dictionary `values`, and create missing sections.

    Raises InputError if a parent of the key holds a value that is not a section.
    """
    *parents, name = key.split(".")
    for part in parents:
        if values.get(part) is None:  # missing, or set to null
            values[part] = {}
        values = values[part]
        if not isinstance(values, dict):
            raise InputError(
                f"command line: `{key}` cannot be set: `{part}` holds {values!r:.200}, "
                "which has no keys"
            )
    values[name] = value
