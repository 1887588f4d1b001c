"""Define typed settings that reject unknown keys, and write clear messages for their errors."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from foundation.errors import InputError, as_input_error, shown
from foundation.reading import parse_yaml
from foundation.storage import address_of, is_address, path_for

# Validation context of settings that a run has recorded.
_RECORD = "record"


class Settings(BaseModel):
    """Base class of settings. Objects are immutable and reject unknown keys and non-finite numbers.

    A subclass may define two class variables for messages. `OTHER_NAMES` maps names of settings
    in other programs, in lower case, to keys of the subclass. A name without such a key is mapped
    to a sentence instead. `UNKNOWN_KEY_HELP`, which begins with "; ", is appended if no key has a
    similar name.
    """

    # Map removed keys to their former defaults. The config.yaml of an earlier run may have them.
    REMOVED: ClassVar[Mapping[str, Any]] = {}

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_removed(cls, values: Any, info: ValidationInfo) -> Any:
        """Drop removed keys of a record. In other files, drop them if they have former defaults.

        A removed key with another value stays, and is reported as an unknown key.
        """
        if not isinstance(values, dict):
            return values
        is_record = info.context == _RECORD
        dropped = [
            key
            for key, default in cls.REMOVED.items()
            if is_record or values.get(key, default) == default
        ]
        return {key: value for key, value in values.items() if key not in dropped}

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_switches(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject true and false for a number.

        YAML reads `on`, `yes`, `off` and `no` as true and false, which pydantic would convert to 1
        and 0.
        """
        parts = _parts(cls.model_fields[str(info.field_name)].annotation)
        takes_numbers = int in parts or float in parts
        given = value if isinstance(value, (list, tuple)) else (value,)
        if takes_numbers and bool not in parts and bool in map(type, given):
            raise ValueError(f"must not be true or false (yes, no, on, off), but is {shown(value)}")
        return value


def at_home(value: Any) -> Any:
    """Expand `~` at the beginning of a text, or remove `file://`. Return other values unchanged.

    Raises InputError if the text is an address that may contain a secret.

    A shell does not expand `~/` inside of an argument such as `data.packs=~/packs`, and a recipe is
    not read by a shell.
    """
    if not isinstance(value, str) or is_address(value):
        return value
    return os.path.expanduser(value.removeprefix("file://"))


def with_escapes(text: str) -> str:
    """Replace `\\n` and `\\t` in `text` by a line feed and a tab.

    A shell passes each of them on as two characters, and so does YAML without double quotes. After
    another backslash they are not replaced, because a chat template may contain such a text.
    """
    escapes = {"\\n": "\n", "\\t": "\t"}
    return re.sub(r"(?<!\\)\\[nt]", lambda match: escapes[match[0]], text)


class AddressError(argparse.ArgumentTypeError, ValueError):
    """An address is given instead of a path. argparse and pydantic both print the message."""


def local_path(value: Any) -> Any:
    """Expand `~` at the beginning of a path, like `at_home`.

    Raises AddressError for an address such as s3://bucket/run. As a path, it would be a folder
    `s3:` in the present folder.
    """
    if isinstance(value, str) and is_address(value):
        raise AddressError(
            f"{value} is an address, but a path on this machine is needed; mount the bucket as a "
            "folder, or use a folder on a shared disk"
        )
    return at_home(value)


def _share_or_step(number: float) -> float | int:
    """Validate the end of a phase. Return a share of all steps as float, or a step as int."""
    if 0 < number < 1:
        return number
    if number < 2 or number != number // 1:
        raise ValueError(
            f"{number:g} is neither a share of the steps (above 0 and below 1) nor a step number "
            "(2 or more)"
        )
    return int(number)


# The end of a phase: a share of all steps, or the number of the phase's last step.
PhaseEnd = Annotated[float, AfterValidator(_share_or_step)]


def last_steps(key: str, untils: Sequence[float | int | None], steps: int) -> list[int]:
    """Return the last step of each phase in a run of `steps` steps.

    `key` is the setting with the phases, for a message. `untils` are the values of `PhaseEnd`, and
    None for the last phase. Shares are rounded to whole steps, in the same way as the first step of
    the learning rate's decay. Raise InputError if a phase would have no step.
    """
    phases = [1.0 if until is None else until for until in untils]
    ends = [round(end * steps) if isinstance(end, float) else end for end in phases]
    for number, (previous_end, end) in enumerate(pairwise([0, *ends]), 1):
        if end <= previous_end or (end >= steps and number < len(ends)):
            raise InputError(
                f"`{key}`: phase {number} of {len(ends)} would begin after step "
                f"{previous_end:,} and end after step {end:,} of {steps:,}, but every phase needs "
                "at least one step; either end phases at other steps, or train longer (`train`)"
            )
    return ends


def copied_path(value: Any) -> Any:
    """Return the path of the copy of an address (`foundation.storage`), or expand `~` of a path."""
    is_remote = isinstance(value, str) and is_address(value)
    return path_for(value) if is_remote else at_home(value)


Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]
# Tensors, files and other libraries store a seed as a signed integer of 64 bits.
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
# A path, or a name such as the name of a Hugging Face dataset. The value is a path if this path
# exists.
PathText = Annotated[str, BeforeValidator(at_home)]
# A template of documents.
TemplateText = Annotated[str, AfterValidator(with_escapes)]
# A path on this machine. An address such as s3://bucket/run is refused.
FilePath = Annotated[Path, BeforeValidator(local_path)]
LocalPath = Annotated[str, BeforeValidator(local_path)]
# A path, or an address in object storage. The value is the path of the address's copy. In files it
# is the address.
CopiedPath = Annotated[
    Path, BeforeValidator(copied_path), PlainSerializer(address_of, when_used="json")
]

S = TypeVar("S", bound=BaseModel)


def parse(cls: type[S], values: dict[str, Any], origin: str) -> S:
    """Return an object of the class `cls` with the given `values`.

    Raises one InputError with a line for each mistake, which names all keys with this mistake. Each
    line begins with `origin`, such as the name of a file. In the config.yaml of a run, removed keys
    may have any value.
    """
    is_record = origin.endswith("/config.yaml")
    try:
        return cls.model_validate(values, context=_RECORD if is_record else None)
    except ValidationError as error:
        lines = []
        for mistake, keys in _keys_by_mistake(cls, error).items():
            # A mistake in the file as a whole has no key.
            named = ", ".join(f"`{key}`" for key in keys if key)
            lines.append(f"{origin}: {named}: {mistake}" if named else f"{origin}: {mistake}")
        raise InputError("\n".join(lines)) from None


def _keys_by_mistake(cls: type[BaseModel], error: ValidationError) -> dict[str, list[str]]:
    """Map a message about each mistake to all keys that have this mistake.

    If the type of a key is a union, pydantic reports a mistake for each type in the union. The
    messages of these mistakes are joined.
    """
    by_key: dict[str, list[str]] = {}
    # A file that is no recipe may have thousands of mistakes, so report only the first ones.
    for item in error.errors(include_url=False)[:20]:
        key, mistake = _describe(cls, item)
        by_key.setdefault(key, []).append(mistake)
    by_mistake: dict[str, list[str]] = {}
    for key, mistakes in by_key.items():
        # Skip a section if the mistake in one of its keys is reported.
        if not any(other.startswith(f"{key}.") for other in by_key):
            mistake = ", or ".join(dict.fromkeys(mistakes))
            by_mistake.setdefault(mistake, []).append(key)
    return by_mistake


# Names of the members of a union. pydantic inserts them into the location of an error.
_MEMBER = re.compile(r"[A-Z]\w*|.*[\[\]-].*|bool|int|float|str|tuple|dict")


def _describe(cls: type[BaseModel], item: Mapping[str, Any]) -> tuple[str, str]:
    """Return the dotted key of a pydantic error, and a message about the mistake in its value.

    `item` is one element of `ValidationError.errors()`. The location in `item` may contain names of
    union members. They are removed from the key.
    """
    location = [
        str(part) for part in item["loc"] if not (isinstance(part, str) and _MEMBER.fullmatch(part))
    ]
    if item["type"] == "extra_forbidden":
        # The last part is the key that the user wrote, which may look like the name of a member.
        unknown = str(item["loc"][-1])
        keys = location[:-1] if location[-1:] == [unknown] else location
        hint = f"known keys here: {_keys_in(cls, keys)}{getattr(cls, 'UNKNOWN_KEY_HELP', '')}"
        if meant := closest_key(cls, unknown, keys):
            hint = advice(meant)
        return ".".join([*keys, unknown]), f"unknown key; {hint}"
    key = ".".join(location)
    message = item["msg"].removeprefix("Value error, ").replace("valid string", "text in quotes")
    # The settings store the lists of a recipe as tuples.
    message = message.replace("tuple", "list").replace("Tuple", "List")
    if item["type"] in ("missing", "value_error"):
        return key, message
    given = f", but is {shown(item['input'])}"
    if item["type"] == "model_type":
        message = f"must be a section (its keys: {_keys_in(cls, location)}){given}"
        meant = closest_key(cls, location[-1], location[:-1])
        return key, message if meant in (None, key) else f"{message}; {advice(meant)}"
    return key, message + given


def _keys_in(cls: type[BaseModel], keys: list[str]) -> str:
    """Return the keys of the section at the path `keys`, for a message."""
    return ", ".join(sorted(_section(cls, keys).model_fields))


def advice(match: str) -> str:
    """Return a question for a result of `closest_key` that is a key, or `match` for a sentence."""
    return match if is_sentence(match) else f"did you mean `{match}`?"


def closest_key(cls: type[BaseModel], name: str, keys: Sequence[str]) -> str | None:
    """Return the dotted key that the unknown key `name` probably means, a sentence, or None.

    `advice` returns a text about the result. The result is the first one that is found in this
    order: the key or the sentence for a name that another program uses (`OTHER_NAMES` of `cls`), a
    key with the same name, a key with a similar name. If several sections have keys with equal
    names, the key in the section `keys` is preferred.
    """
    section = ".".join(keys)
    by_name: dict[str, str] = {}
    # Sort the keys of the section before all other keys.
    for key in sorted(_keys_of(cls), key=lambda key: key.rpartition(".")[0] != section):
        by_name.setdefault(key.rpartition(".")[2].lower(), key)
    if keys:
        # Do not suggest the top-level key `name`, the name of the run, for an unknown key `name` in
        # a section. The user meant something else.
        by_name.pop("name", None)
    other_names = getattr(cls, "OTHER_NAMES", {})
    if match := other_names.get(name.lower()) or by_name.get(name.lower()):
        return match
    similar = difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.8)
    return by_name[similar[0]] if similar else None


def is_sentence(match: str) -> bool:
    """Return True if a result of `closest_key` is a sentence. A key has no spaces."""
    return " " in match


def _keys_of(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a settings class and its sections."""
    for name, field in cls.model_fields.items():
        yield f"{prefix}{name}"
        for section in sections_in(field.annotation):
            yield from _keys_of(section, f"{prefix}{name}.")


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, including the members of nested unions.

    For an annotation that is not a union, return a tuple with this annotation.
    """
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return (annotation,)
    return tuple(member for part in typing.get_args(annotation) for member in _members(part))


def _parts(annotation: Any) -> list[Any]:
    """Return an annotation, and everything inside of it: types, and values of Literal."""
    return [annotation, *(part for inner in typing.get_args(annotation) for part in _parts(inner))]


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the settings classes in an annotation, including those inside of lists and unions."""
    return [
        part
        for part in _parts(annotation)
        if isinstance(part, type) and issubclass(part, BaseModel)
    ]


def _section(cls: type[BaseModel], keys: list[str]) -> type[BaseModel]:
    """Return the settings class at the path `keys` below `cls`. Unknown keys are skipped."""
    for key in keys:
        if field := cls.model_fields.get(key):
            cls = next(iter(sections_in(field.annotation)), cls)
    return cls


def value_from_text(cls: type[BaseModel], key: str, text: str) -> Any:
    """Return the value of the argument `key=text` of a command line.

    The first rule that applies decides:

    1. `null` means None. `parse` refuses None for a key that needs a value.
    2. If the key may hold a list, a text that begins with `[` is parsed as YAML.
    3. If the key holds only lists, the text becomes the only element of a list.
    4. If the key may hold a text or a path, the value is the text. YAML would read the template
       `{title}: {text}` as a mapping.
    5. Any other text is parsed as YAML.

    Raises InputError if `text` is not YAML or is empty. A text from an unset shell variable is
    empty, and YAML would read the empty text as null.
    """
    if not text.strip():
        raise InputError(
            f"command line: `{key}=` has no value; either write a value, write `{key}=null` for "
            f"no value, or remove `{key}=`"
        )
    *parents, name = key.split(".")
    field = _section(cls, parents).model_fields.get(name)
    members = set(_members(field.annotation)) if field else set()
    lists = {member for member in members if typing.get_origin(member) in (list, tuple)}
    is_list = bool(lists) and text.lstrip().startswith("[")
    if text != "null" and not is_list:
        holds_only_lists = bool(lists) and members == lists
        if holds_only_lists:
            return [text]
        if members & {str, Path}:
            return text
    with as_input_error(
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
        # The section may be missing or null.
        if values.get(part) is None:
            values[part] = {}
        values = values[part]
        if not isinstance(values, dict):
            raise InputError(
                f"command line: `{key}` cannot be set, because `{part}` is not a section but "
                f"{shown(values)}"
            )
    values[name] = value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys: {"data": {"length": 1}} -> {"data.length": 1}.

    `prefix` is prepended to every key.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
