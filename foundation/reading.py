"""Reading what others wrote: regular files only, and YAML and JSON within limits of size and depth.

A FIFO would block for ever and `/dev/zero` never ends; an alias bomb of 300 bytes holds billions of values, and a thousand
brackets end the interpreter's stack. Each is one InputError that names the file.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from foundation.errors import InputError

MOST_YAML_BYTES = 2**20
MOST_YAML_VALUES = 100_000  # aliases counted as often as they are used
MOST_JSON_BYTES = 2**28
MOST_DEPTH = 64  # of collections within each other
_NO_BLANK = re.compile(r"""([^:]+):([^'"].*)""", re.DOTALL)  # a key and its value in braces; what is quoted needs the blank
MOST_DIGITS = 400  # of a number; Python needs quadratic time for them, and refuses to print thousands


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """The regular file at `path`, open for reading. Raises OSError, at once also for a folder, FIFO, socket or device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
            raise OSError(f"it is {names.get(kind, 'a device')}, where a file is wanted")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str], most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """The content of a regular file. Raises OSError, also where it is longer than `most_bytes`."""
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(f"it is longer than the {most_bytes // 2**20} MiB that are read")
    return data


def read_lines(path: str | os.PathLike[str]) -> list[bytes]:
    """The lines of a regular file with their ends, however many: of what a run writes itself, a line a step. Raises OSError."""
    with open_regular(path) as file:
        return file.readlines()


def load_json(path: str | os.PathLike[str]) -> Any:
    """The value in a JSON file. Raises OSError where the file cannot be read, ValueError where it holds no JSON."""
    return parse_json(str(read_regular(path), "utf-8"))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also where it is nested deeper than MOST_DEPTH."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {MOST_DEPTH}") from None
    level = [value]
    for _ in range(MOST_DEPTH):
        inside = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [item for items in inside for item in items]
        if not level:
            return value
    raise ValueError(f"nested deeper than {MOST_DEPTH}")


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Raises yaml.YAMLError, also for repeated keys, tags, and what goes beyond the limits above."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, ArithmeticError) as error:  # the 99th of a month, a number of base 60 beyond all bounds
        raise yaml.YAMLError(f"a value cannot be read: {error}") from None


class _Loader(yaml.SafeLoader):
    """Plain values only. Refuses a repeated key, where YAML silently takes the last value."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._values = 0  # composed so far, those behind an alias once more for each use
        self._sizes: dict[int, int] = {}  # by id of a node: how many values it stands for

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node:
        event = self.peek_event()
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                raise yaml.composer.ComposerError(None, None, f"`*{event.anchor}` stands inside of what it names", mark)
            self._values += self._sizes[id(node)]
        else:
            if event.tag not in (None, "!"):
                raise yaml.composer.ComposerError(
                    None, None, f"the tag {event.tag!r}: tags are not read; write a plain value", mark
                )
            if self._depth >= MOST_DEPTH:
                raise yaml.composer.ComposerError(None, None, f"nested deeper than {MOST_DEPTH}", mark)
            before, self._depth = self._values, self._depth + 1
            node = super().compose_node(parent, index)
            self._depth -= 1
            self._values += 1
            self._sizes[id(node)] = self._values - before
        if self._values > MOST_YAML_VALUES:
            raise yaml.composer.ComposerError(None, None, f"its aliases stand for more than {MOST_YAML_VALUES:,} values", mark)
        return node

    def construct_scalar(self, node: yaml.Node) -> Any:
        text = super().construct_scalar(node)
        if unusable := unusable_text(text):
            raise yaml.constructor.ConstructorError(None, None, unusable, node.start_mark)
        return text

    def construct_yaml_int(self, node: yaml.Node) -> int:
        if len(node.value) > MOST_DIGITS:
            raise yaml.constructor.ConstructorError(None, None, f"a number of {len(node.value):,} digits", node.start_mark)
        value = super().construct_yaml_int(node)
        digits = node.value.lstrip("+-0").replace("_", "")
        if ":" in digits or (digits.isdecimal() and int(digits) != abs(value)):
            self._refuse_base(node, 60 if ":" in digits else 8)
        return value

    def construct_yaml_float(self, node: yaml.Node) -> float:
        if ":" in node.value:
            self._refuse_base(node, 60)
        return super().construct_yaml_float(node)

    @staticmethod
    def _refuse_base(node: yaml.Node, base: int) -> None:
        """Who writes `seed: 010` for the tenth run means ten, and who writes `1:30` means no ninety."""
        what = f"`{node.value}` is a number of base {base} to YAML; write it as a plain number, or as text in quotes"
        raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)

    def _with_blank(self, key: yaml.Node, value: yaml.Node) -> tuple[yaml.Node, yaml.Node]:
        """`{window:5}`, as one types it on a command line, is to YAML a key without a value; here it is `{window: 5}`."""
        bare = key.tag.endswith(":str") and key.style is None and value.tag.endswith(":null") and value.value == ""
        if not (bare and (typed := _NO_BLANK.fullmatch(key.value))):
            return key, value
        marks = key.start_mark, key.end_mark
        return tuple(yaml.ScalarNode(self.resolve(yaml.ScalarNode, text, (True, False)), text, *marks) for text in typed.groups())

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        if node.flow_style:
            node.value = [self._with_blank(*pair) for pair in node.value]
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                what = "`<<`: keys are not merged; write them out, or build on another file by `base`"
                raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a list or mapping cannot be a key", key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


def unusable_text(text: str) -> str | None:
    """Why no file can be named and nothing printed with `text`; None where that is possible."""
    if "\0" in text:
        return "text with a NUL character in it"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"text that is not UTF-8: half a character, {text[error.start]!a}"
    return None


def one_line(error: BaseException, most: int = 300, *, named: bool = False) -> str:
    """What an error says in one line, cut to `most` characters; its type where it says nothing, and before it if `named`."""
    kind, said = type(error).__name__, " ".join(str(error).split())[:most]
    return f"{kind}: {said}" if named and said else said or kind


def reason_of(error: Exception) -> str:
    """Why a file could not be read, in one line and without its path, which the message around it names."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(error)


def load_object(path: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file; InputError, with the `remedy`, where it cannot be read or holds something else."""
    try:
        value = load_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {reason_of(error)}; {remedy}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: a JSON object is wanted, here is {type(value).__name__}; {remedy}")
    return value
