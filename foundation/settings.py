"""Typed settings that refuse keys they do not know, and messages for people out of pydantic's errors."""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Iterable
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from foundation.errors import InputError, shown
from foundation.reading import MOST_YAML_BYTES, one_line, parse_yaml, read_regular, reason_of, unusable_text


class Settings(BaseModel):
    """Base of every settings class: unknown keys are errors, numbers are finite, and a built object does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_said_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Counts have such a rule of their own. Where a field takes true and false beside a number, both are meant."""
        return _number(value) if info.field_name in _numbers_of(cls) else value


@cache
def _numbers_of(cls: type[BaseModel]) -> frozenset[str]:
    members = {name: _members(field.annotation) for name, field in cls.model_fields.items()}
    return frozenset(name for name, allowed in members.items() if float in allowed and bool not in allowed)


def _number(value: object) -> object:
    """Raises ValueError for true and false: to Python true is 1, and `learning_rate: true` would be a rate."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted, not true or false")
    return value


MOST = 2**63 - 1  # of a count: what fits into 64 bits with a sign, which tensors, files and other libraries hold


def _count(value: object) -> object:
    """The whole number that `364e6` or `3.64e+8` is: YAML reads the first as text and the second as a float. Every digit counts:
    in the text of a number all are there, and of a float so large that some may be lost ValueError asks for them."""
    if isinstance(value, bool):
        raise ValueError("a whole number is wanted, not true or false")
    if isinstance(value, str):
        text = value.replace("_", "")
        try:
            number = float(text)
        except ValueError:
            return value
        if not 2**53 <= abs(number) <= 2**63:
            value = number
        elif (exact := Decimal(text)) == int(exact):
            value = int(exact)
    if isinstance(value, float) and value.is_integer():
        if 2**53 <= abs(value) <= MOST:
            raise ValueError(f"so large a number loses digits with a point or an exponent; write all of them, as {int(value)}")
        value = int(value)
    if isinstance(value, int) and value > MOST:
        raise ValueError(f"too large; the most that a count can be is {MOST}")
    return value


Count = Annotated[int, BeforeValidator(_count), Field(ge=0)]
PositiveCount = Annotated[int, BeforeValidator(_count), Field(gt=0)]
Seed = Annotated[int, BeforeValidator(_count), Field(ge=0, le=MOST)]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0.0, lt=1.0)]  # which stands in lists, too


def at_home(value: Any) -> Any:
    """A text with the home folder in place of `~/` at its beginning, or of `~name/`; anything else as it is. A shell leaves the
    two alone behind `data.packs=`, and in a recipe it reads neither."""
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") and "/" in value else value


def _nameable(value: object) -> object:
    text = str(value)
    if unusable := unusable_text(text):
        raise ValueError(f"{unusable} is no path")
    if len(text.encode()) > 4000 or any(len(part.encode()) > 255 for part in text.split("/")):
        raise ValueError(f"{len(text):,} characters are too long for a path, or for a name in it")
    return value


# A path, or something else where the file system can be asked for it.
PathText = Annotated[str, BeforeValidator(at_home), AfterValidator(_nameable)]
FilePath = Annotated[Path, BeforeValidator(at_home), AfterValidator(_nameable)]
TextOrPath = Annotated[str, BeforeValidator(at_home)]  # a text too long for a path, or the file that holds it

S = TypeVar("S", bound=BaseModel)


def parse(cls: type[S], values: dict[str, Any], origin: str) -> S:
    """Build `cls` from `values`. Raises one InputError with a line for each mistake.

    origin: what each line starts with, the file's name.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        lines: dict[str, dict[str, None]] = {}
        described = [_describe(cls, item) for item in error.errors(include_url=False)]
        for key, what, offered in described:
            if any(inside.startswith(f"{key}.") for inside, _, _ in described):  # another member of a union got further
                continue
            line = f"{origin}: {what}"
            lines.setdefault(line, {})[offered] = None
        raise InputError("\n".join(line + ", or ".join(filter(None, offered)) for line, offered in lines.items())) from None


_A_MAPPING = "Input should be a mapping of keys to values"
_IN_PLACE_OF_CLASSES = {"path_type": "Input should be a path, as text", "model_type": _A_MAPPING, "dict_type": _A_MAPPING}


def _describe(cls: type[BaseModel], item: dict[str, Any]) -> tuple[str, str, str]:
    """The dotted key of one pydantic error, what is wrong, and what would be accepted (each member of a union has its own)."""
    path = _keys(cls, item["loc"])
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        fields = list(_section(cls, path[:-1]).model_fields)
        near = difflib.get_close_matches(path[-1], fields, n=1, cutoff=0.5)
        hint = f"did you mean `{'.'.join([*path[:-1], near[0]])}`?" if near else f"known keys here: {', '.join(sorted(fields))}"
        return key, f"unknown key `{key}`; {hint}", ""
    if item["type"] == "missing":
        return key, f"`{key}` is required and missing", ""
    if item["type"] == "invalid_key":
        return key, f"unknown key `{key}`, which is no text; keys are words", ""
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return key, f"`{key}`: {message}" if key else message, ""
    message = _IN_PLACE_OF_CLASSES.get(item["type"], message)
    message = message.partition(", unable to ")[0].replace("a valid tuple", "a valid list")  # as YAML calls it
    _, should, after = message.partition(" should ")  # as in "Input should be ...", "String should match pattern ..."
    message = re.sub(r" after validation, not \d+$", "", after if should else message)
    verb = "" if should and not message.startswith("be ") else "be "
    got = "a mapping" if isinstance(item["input"], dict) else "null" if item["input"] is None else shown(item["input"], repr)
    return key, f"`{key}` is {got}; it should {verb}", message.removeprefix("be ")


def first_mistake(error: ValidationError) -> str:
    """Returns what is wrong first in a file that a program has written, in a line: there, nobody corrects keys one by one."""
    item = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in item["loc"])
    return f"`{shown(where)}`: {shown(item['msg'].removeprefix('Value error, '))}"


def _keys(cls: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    """The user's keys in the location of a pydantic error, without the members of unions that pydantic puts between them."""
    keys: list[str] = []
    annotation: Any = cls
    for part in location:
        members = [member for member in _members(annotation) if member is not type(None)]
        if len(members) > 1:  # `part` says which of them was tried, as in `literal['auto']`, `constrained-int` or a class's name
            annotation = next((member for member in members if getattr(member, "__name__", None) == part), Any)
            continue
        annotation = members[0]
        if part == "[key]":  # what comes before is a key that is no text
            continue
        keys.append(str(part))
        field = annotation.model_fields.get(part) if _is_section(annotation) else None
        inside = typing.get_args(annotation)
        annotation = field.annotation if field else inside[-1] if inside and inside[-1] is not ... else Any
    return keys


def _members(annotation: Any) -> tuple[Any, ...]:
    """Returns what an annotation allows: the members of a union, of unions inside of it too, or itself."""
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return (annotation,)
    return tuple(member for part in typing.get_args(annotation) for member in _members(part))


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _section(cls: type[BaseModel], keys: list[str]) -> type[BaseModel]:
    """The settings class that the dotted key `keys` leads to from `cls`; the last known one where a key is unknown."""
    for key in keys:
        field = cls.model_fields.get(key)
        cls = next(iter(_settings_classes(field.annotation)), cls) if field else cls
    return cls


_QUOTED_BLANK = re.compile(r"""(['"])(\s*)\1""")  # text that cannot stand bare behind `key=`


def value_from_text(cls: type[BaseModel], key: str, text: str) -> Any:
    """What `key=text` on a command line means: YAML, but plain text for the keys of `cls` that hold text.

    YAML would read the template `{title}: {text}` as a mapping. Where a key may hold a list too, brackets begin one. Shells pass
    `\\n` in quotes on as two characters; in text they mean a line's end. `null` means none for every key, two quotes an empty
    text. Raises InputError where the text is not YAML, and where there is none, which a shell makes of an unset variable and YAML
    would read as null.
    """
    *parents, name = key.split(".")
    field = _section(cls, parents).model_fields.get(name)
    members = set(_members(field.annotation)) if field else set()
    if not text.strip():
        none = f"`{key}=null` for none" if not members or type(None) in members else "a value"
        raise InputError(f"command line: `{key}=` is empty; write {none}, or leave it out")
    if members & {str, Path} and (blank := _QUOTED_BLANK.fullmatch(text)):
        return blank[2]
    if members and all(typing.get_origin(member) in (list, tuple) for member in members) and not text.lstrip().startswith("["):
        return [text]  # one value is a list of one
    a_list = text.lstrip().startswith("[") and any(typing.get_origin(member) in (list, tuple) for member in members)
    if members & {str, Path} and text != "null" and not a_list:
        return text.replace("\\n", "\n").replace("\\t", "\t") if str in members else text
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise InputError(f"command line: the value of `{key}={shown(text)}` is not valid YAML: {one_line(error)}") from None


V = TypeVar("V")


def given_once(given: Iterable[tuple[str, V]]) -> dict[str, V]:
    """Returns by key what a command line sets. Raises InputError for a key that it sets twice."""
    found: dict[str, V] = {}
    for key, value in given:
        if key in found:
            both = f"{shown(found[key])} and as {shown(value)}"
            raise InputError(f"command line: `{key}` is given twice, as {both}; leave one of the two out")
        found[key] = value
    return found


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


def _settings_classes(annotation: object) -> list[type[BaseModel]]:
    if _is_section(annotation):
        return [annotation]
    return [c for part in typing.get_args(annotation) for c in _settings_classes(part)]


def load_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping that the YAML file at `path` holds; InputError where there is none."""
    path = Path(path)
    try:
        values = parse_yaml(str(read_regular(path, MOST_YAML_BYTES), "utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1, cutoff=0.5)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise InputError(f"{path}: no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {reason_of(error)}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: a mapping of keys to values is wanted, the file holds {type(values).__name__}")
    return values


def load_with_bases(path: str | os.PathLike[str]) -> list[tuple[Path, dict[str, Any]]]:
    """The YAML file at `path` and those that it builds on, each with what it holds itself; the first is what all build on.

    A file names the one before it as `base`, relative to itself. InputError where there is none, or where they go in a circle.
    """
    path, chain = Path(path), []
    while True:
        values = load_yaml(path)
        base = values.pop("base", None)
        chain.insert(0, (path, values))
        if base is None:
            return chain
        if not isinstance(base, str) or not base or unusable_text(base):
            raise InputError(f"{path}: `base` is {shown(base, repr)}; it should be the path of a recipe, from this file on")
        wanted = path.parent / at_home(base)
        if any(wanted.resolve() == there.resolve() for there, _ in chain):
            raise InputError(f"{path}: `base`: {base} builds on this file itself; leave one of the two out")
        if not wanted.is_file():
            raise InputError(f"{path}: `base`: {wanted} is no file; the path is taken from this file on")
        path = wanted
