"""Read YAML and JSON files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from foundation.errors import InputError, as_input_error


# Use the loader with libyaml, because a report reads many YAML files. libyaml is faster than
# PyYAML's parser in Python.
class _Loader(yaml.CSafeLoader):
    """YAML loader that rejects repeated keys, and reads numbers as they are usually meant.

    PyYAML's own loaders silently use the last of several equal keys. They also read a number with
    an exponent as a text, unless the number has both a dot and a sign after the `e`. They read
    `1:30` as 90 (base 60), `017` as 15 (base 8), and `2026-11-28` as a date. Here, `1e6` is a
    number, and the other three are texts.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key `{key}` is repeated", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_REPLACED = (":int", ":float", ":timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if not pair[0].endswith(_REPLACED)]
    for first, pairs in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0|[1-9][\d_]*|0b[01_]+|0x[\da-fA-F_]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?((\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+|\d[\d_]*\.[\d_]*|\.\d[\d_]*"
        r"|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        yaml.YAMLError: The text is not YAML, repeats a key, or has a tag.
        ValueError: The text has a number without digits, such as `0x_`.
        TypeError: A key of a mapping is a list.
    """
    return yaml.load(text, Loader=_Loader)


def load_yaml(path: str | os.PathLike[str], remedy: str = "") -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises InputError if the file does not exist. If the file cannot be read or is not a YAML
    mapping, the message of the InputError ends with `remedy`.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file")
    with as_input_error(
        (OSError, ValueError, TypeError, yaml.YAMLError),
        f"{path}: cannot be read as YAML",
        remedy,
    ):
        values = parse_yaml(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise InputError(
            f"{path}: a mapping of keys to values is expected, but the file holds "
            f"{type(values).__name__}{remedy and f'; {remedy}'}"
        )
    return values


def load_with_bases(
    path: str | os.PathLike[str], above: tuple[Path, ...] = ()
) -> list[tuple[Path, dict[str, Any]]]:
    """Load a YAML file and its chain of `base` files.

    The key `base` of a file is the path of its base file, relative to the folder of the file.
    Returns a list of pairs (path, values), one for each file, with the deepest base first. `values`
    has no key `base`. Only recursive calls set `above`, the paths of the files that have `path` as
    their base, directly or through other files. Raises InputError if a file cannot be read, or if a
    file is its own base, directly or through other files.
    """
    path = Path(path)
    remedy = f"if this is data, set data.source={path}; to resume a run, name its config.yaml"
    values = load_yaml(path, remedy)
    if path.resolve() in above:
        raise InputError(
            f"{path}: this file is its own base, directly or through other files; remove one `base`"
        )
    base = values.pop("base", None)
    if not base:
        return [(path, values)]
    base_path = path.parent / os.path.expanduser(str(base))
    return [*load_with_bases(base_path, (*above, path.resolve())), (path, values)]


def load_object(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file as a dict.

    Raises InputError, with `remedy`, if the file cannot be read or its value is not an object.
    """
    with as_input_error((OSError, ValueError, RecursionError), f"{path}: cannot be read", remedy):
        value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise InputError(
            f"{path}: a JSON object is expected, but the file holds {type(value).__name__}; "
            f"{remedy}"
        )
    return value
