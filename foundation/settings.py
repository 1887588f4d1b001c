"""Typed settings that refuse keys they do not know, and messages for people out of pydantic's errors."""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from foundation.errors import InputError, shown
from foundation.reading import one_line, parse_yaml


class Settings(BaseModel):
    """Base of every settings class: unknown keys are errors, numbers are finite, and a built object does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


MOST = 2**63 - 1  # what fits into 64 bits with a sign, which tensors, files and other libraries hold


def at_home(value: Any) -> Any:
    """A text with the home folder in place of `~/` at its beginning; anything else as it is. A shell leaves it alone behind
    `data.packs=`, and in a recipe no shell reads it."""
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") and "/" in value else value


Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
PathText = Annotated[str, BeforeValidator(at_home)]  # a path, or something else where the file system can be asked for it
FilePath = Annotated[Path, BeforeValidator(at_home)]

S = TypeVar("S", bound=BaseModel)


def parse(cls: type[S], values: dict[str, Any], origin: str) -> S:
    """Build `cls` from `values`. Raises one InputError with a line for each mistake, which begins with `origin`, the file's name.

    Of a union each member has a mistake of its own: one line says what all of them would take.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        mistakes = [(_keys(item["loc"]), item) for item in error.errors(include_url=False)]
        lines: dict[str, dict[str, None]] = {}
        for keys, item in mistakes:
            if any(inside[: len(keys)] == keys and inside != keys for inside, _ in mistakes):  # another member got further
                continue
            what, wanted = _describe(cls, keys, item)
            lines.setdefault(f"{origin}: {what}", {})[wanted] = None
        raise InputError("\n".join(line + ", or ".join(filter(None, wanted)) for line, wanted in lines.items())) from None


_MEMBER = re.compile(r"[A-Z]\w*|.*[\[\]-].*|bool|int|float|str|tuple|dict")  # how pydantic's locations name a union's members


def _keys(location: tuple[str | int, ...]) -> list[str]:
    """The user's keys in the location of a pydantic error, without the members of unions that pydantic puts between them. An
    unknown key is what the user wrote, and comes last."""
    return [str(part) for part in location if not (isinstance(part, str) and _MEMBER.fullmatch(part))]


def _describe(cls: type[BaseModel], keys: list[str], item: dict[str, Any]) -> tuple[str, str]:
    """What is wrong in one pydantic error, and what would be taken instead, where it says so."""
    message, _, wanted = item["msg"].removeprefix("Value error, ").partition(" should ")
    key = ".".join(keys)
    if item["type"] == "extra_forbidden":
        *parents, unknown = [*_keys(item["loc"][:-1]), str(item["loc"][-1])]
        fields = list(_section(cls, parents).model_fields)
        near = difflib.get_close_matches(unknown, fields, n=1, cutoff=0.5)
        hint = f"did you mean `{'.'.join([*parents, near[0]])}`?" if near else f"known keys here: {', '.join(sorted(fields))}"
        return f"unknown key `{'.'.join([*parents, unknown])}`; {hint}", ""
    if item["type"] == "missing":
        return f"`{key}` is required and missing", ""
    if item["type"] == "value_error":
        return f"`{key}`: {item['ctx']['error']}" if key else str(item["ctx"]["error"]), ""
    if item["type"] in ("model_type", "dict_type"):
        wanted = "be a mapping of keys to values"
    value = "a mapping" if isinstance(item["input"], dict) else "null" if item["input"] is None else shown(item["input"], repr)
    return f"`{key}` is {value}; it should ", wanted or message


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


# ── `key=value` on a command line ─────────────────────────────────────────────────────────────────────────────────────────────


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
    if not text.strip():
        raise InputError(f"command line: `{key}=` is empty; write a value, `{key}=null` for none, or leave it out")
    lists = {member for member in members if typing.get_origin(member) in (list, tuple)}
    begins_list = text.lstrip().startswith("[")
    if members and members == lists and not begins_list:
        return [text]
    if members & {str, Path} and text != "null" and not (lists and begins_list):
        text = "" if text in ("''", '""') else text
        return text.replace("\\n", "\n").replace("\\t", "\t") if str in members else text
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise InputError(f"command line: the value of `{key}={shown(text)}` is not valid YAML: {one_line(error)}") from None


V = TypeVar("V")


def given_once(given: Iterable[tuple[str, V]]) -> dict[str, V]:
    """Returns by key what a command line sets. Raises InputError for a key that it sets twice."""
    values: dict[str, V] = {}
    for key, value in given:
        if key in values:
            both = f"{shown(values[key])} and as {shown(value)}"
            raise InputError(f"command line: `{key}` is given twice, as {both}; leave one of the two out")
        values[key] = value
    return values


def place_of(values: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Returns where in nested `values` the dotted `key` of a command line is set: its section, made where it is not there, and
    its name in it. Raises InputError where something else than a section is in the way."""
    *parents, name = key.split(".")
    for part in parents:
        if values.get(part) is None:  # not there, or said to be none
            values[part] = {}
        values = values[part]
        if not isinstance(values, dict):
            raise InputError(f"command line: `{key}` cannot be set: `{part}` holds {shown(values, repr)}, not keys of its own")
    return values, name
