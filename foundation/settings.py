"""Typed settings that refuse keys they do not know, and messages for people out of pydantic's errors."""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from foundation.errors import InputError
from foundation.reading import parse_yaml, refusing


class Settings(BaseModel):
    """Base of every settings class: unknown keys are errors, numbers are finite, and a built object does not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


def at_home(value: Any) -> Any:
    """A text with the home folder in place of `~/` at its beginning; anything else as it is. A shell leaves it alone behind
    `data.packs=`, and in a recipe no shell reads it."""
    return (
        os.path.expanduser(value)
        if isinstance(value, str) and value.startswith("~") and "/" in value
        else value
    )


Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]
# what tensors, files and other libraries hold in 64 bits
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
# a path, or something else where the file system can be asked for it
PathText = Annotated[str, BeforeValidator(at_home)]
FilePath = Annotated[Path, BeforeValidator(at_home)]

S = TypeVar("S", bound=BaseModel)


def parse(cls: type[S], values: dict[str, Any], origin: str) -> S:
    """Build `cls` from `values`. Raises one InputError with a line for each mistake, which begins with `origin`, the file's name.

    Of a union each member has a mistake of its own: one line says what all would take, or a mistake inside of one.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        by_key: dict[str, list[str]] = {}
        for item in error.errors(include_url=False):
            key, mistake = _describe(cls, item)
            by_key.setdefault(key, []).append(mistake)
        innermost = [
            key for key in by_key if not any(other.startswith(f"{key}.") for other in by_key)
        ]
        lines = [
            f"{origin}: {f'`{key}`: ' * bool(key)}{', or '.join(dict.fromkeys(by_key[key]))}"
            for key in innermost
        ]
        raise InputError("\n".join(lines)) from None


# how pydantic's locations name a union's members
_MEMBER = re.compile(r"[A-Z]\w*|.*[\[\]-].*|bool|int|float|str|tuple|dict")


def _describe(cls: type[BaseModel], item: dict[str, Any]) -> tuple[str, str]:
    """The dotted key of one pydantic error, without the members of unions that pydantic puts into it, and what is wrong."""
    *parents, last = item["loc"] or [""]
    unknown = item["type"] == "extra_forbidden"  # then the last part is what the user wrote
    parts = parents if unknown else item["loc"]
    keys = [str(part) for part in parts if not (isinstance(part, str) and _MEMBER.fullmatch(part))]
    if unknown:
        return ".".join([*keys, str(last)]), f"unknown key; {_hint(cls, keys, str(last))}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "model_type":  # a value where a section is
        message = f"a section; its keys: {', '.join(sorted(_section(cls, keys).model_fields))}"
    value = "" if item["type"] in ("missing", "value_error") else f", and is {item['input']!r:.200}"
    return ".".join(keys), message + value


def _hint(cls: type[BaseModel], keys: list[str], name: str) -> str:
    """What somebody may have meant by `name` in the section that `keys` lead to: a key there or anywhere, or what other programs
    call it, which `OTHER_NAMES` of `cls` says."""
    here = ".".join([*keys, ""]) if keys else ""
    by_name: dict[str, str] = {}
    for key in sorted(
        _keys_of(cls),
        key=lambda key: not (key.startswith(here) and "." not in key.removeprefix(here)),
    ):
        by_name.setdefault(key.rpartition(".")[2].lower(), key)
    if keys:  # anything may have a name: the run's is not meant
        by_name.pop("name", None)
    if key := by_name.get(name.lower()) or getattr(cls, "OTHER_NAMES", {}).get(name.lower()):
        return f"did you mean `{key}`?"
    if near := difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.8):
        return f"did you mean `{by_name[near[0]]}`?"
    listed = ", ".join(sorted(_section(cls, keys).model_fields))
    return f"known keys here: {listed}; docs/coming_from.md has other trainers' names"


def _keys_of(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key that a settings class and its sections have."""
    for name, field in cls.model_fields.items():
        yield f"{prefix}{name}"
        for section in sections_in(field.annotation):
            yield from _keys_of(section, f"{prefix}{name}.")


def _members(annotation: Any) -> tuple[Any, ...]:
    """What an annotation allows: the members of a union, of unions inside of it too, or itself."""
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return (annotation,)
    return tuple(member for part in typing.get_args(annotation) for member in _members(part))


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The settings classes in an annotation, those of its lists too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in sections_in(part)]


def _section(cls: type[BaseModel], keys: list[str]) -> type[BaseModel]:
    """The settings class that the dotted key `keys` leads to from `cls`; the last known one where a key is unknown."""
    for key in keys:
        field = cls.model_fields.get(key)
        cls = next(iter(sections_in(field.annotation)), cls) if field else cls
    return cls


def value_from_text(cls: type[BaseModel], key: str, text: str) -> Any:
    """What `key=text` on a command line means: YAML, but plain text for the keys of `cls` that hold text.

    YAML would read the template `{title}: {text}` as a mapping. Where a key may hold a list too, brackets begin one; one value is
    a list of one. Shells pass `\\n` in quotes on as two characters; in text they mean a line's end. `null` means none for every
    key, two quotes an empty text. Raises InputError where the text is not YAML, and where there is none, which a shell makes of
    an unset variable and YAML would read as null.
    """
    *parents, name = key.split(".")
    field = _section(cls, parents).model_fields.get(name)
    members = set(_members(field.annotation)) if field else set()
    lists = {member for member in members if typing.get_origin(member) in (list, tuple)}
    begins_list = text.lstrip().startswith("[")
    if not text.strip():
        raise InputError(
            f"command line: `{key}=` is empty; write a value, `{key}=null` for none, or leave it out"
        )
    if lists and members == lists and not begins_list:
        return [text]
    if members & {str, Path} and text != "null" and not (lists and begins_list):
        return "" if text in ("''", '""') else text.replace("\\n", "\n").replace("\\t", "\t")
    with refusing(
        (ValueError, TypeError, yaml.YAMLError),
        f"command line: the value of `{key}={text:.200}` is not valid YAML",
    ):
        return parse_yaml(text)


def set_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets the dotted `key` of a command line in nested `values`; makes sections that are not there. Raises InputError where
    something else than a section is in the way."""
    *parents, name = key.split(".")
    for part in parents:
        if values.get(part) is None:  # not there, or said to be none
            values[part] = {}
        values = values[part]
        if not isinstance(values, dict):
            raise InputError(
                f"command line: `{key}` cannot be set: `{part}` holds {values!r:.200}, not keys of its own"
            )
    values[name] = value
