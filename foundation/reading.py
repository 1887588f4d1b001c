"""Reading YAML and JSON: plain values only."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from foundation.errors import InputError


# libyaml's: most of a report over many runs was reading their settings
class _Loader(yaml.CSafeLoader):
    """Refuses a repeated key, where YAML silently takes the last value, and takes `1e6`, `1e-5` and `1.0e6` for numbers, which
    YAML reads as text: without a dot, or without a sign after the e."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if (key := self.construct_object(key_node, deep=True)) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key `{key}` stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Raises yaml.YAMLError, also for repeated keys and for tags; ValueError for a
    date that is none, TypeError for a key that is a list."""
    return yaml.load(text, Loader=_Loader)


def load_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping that the YAML file at `path` holds; InputError where there is none."""
    path = Path(path)
    with refusing(
        (OSError, ValueError, TypeError, yaml.YAMLError),
        f"{path}: no YAML that can be read",
    ):
        values = parse_yaml(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise InputError(
            f"{path}: a mapping of keys to values is wanted, the file holds {type(values).__name__}"
        )
    return values


def load_with_bases(
    path: str | os.PathLike[str], above: tuple[Path, ...] = ()
) -> list[tuple[Path, dict[str, Any]]]:
    """The YAML file at `path` and those that it builds on, each with what it holds itself; the first is what all build on.

    A file names the one before it as `base`, relative to itself. InputError where there is none, or where they go in a circle;
    `above`: the files that build on this one.
    """
    path, values = Path(path), load_yaml(path)
    if path.resolve() in above:
        raise InputError(f"{path}: builds on itself; leave out a `base`")
    base = values.pop("base", None)
    below = (
        load_with_bases(path.parent / os.path.expanduser(str(base)), (*above, path.resolve()))
        if base
        else []
    )
    return [*below, (path, values)]


def load_object(path: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file; InputError, with the `remedy`, where it cannot be read or holds something else."""
    with refusing((OSError, ValueError), f"{path}: cannot be read", remedy):
        value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise InputError(
            f"{path}: a JSON object is wanted, here is {type(value).__name__}; {remedy}"
        )
    return value


def one_line(error: BaseException, *, named: bool = False) -> str:
    """What an error says in one line, cut to 300 characters; its type where it says nothing, and before it if `named`."""
    kind, text = type(error).__name__, " ".join(str(error).split())[:300]
    return f"{kind}: {text}" if named and text else text or kind


@contextmanager
def refusing(kinds: tuple[type[Exception], ...], what: str, remedy: str = "") -> Iterator[None]:
    """Entered around what another library may refuse: an error of `kinds` becomes an InputError that says `what` was the matter,
    the error in a line, and the `remedy`."""
    try:
        yield
    except kinds as error:
        said = one_line(
            error, named=isinstance(error, (LookupError, AttributeError, AssertionError))
        ).rstrip(". ")
        if isinstance(error, OSError) and error.filename and str(error.filename) in what:
            said = error.strerror  # without the name again
        raise InputError(f"{what}: {said}{remedy and f'; {remedy}'}") from None
