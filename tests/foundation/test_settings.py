"""Settings from files and command lines, and the messages for mistakes in them."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml

from foundation.errors import InputError
from foundation.settings import (
    Count,
    FilePath,
    PathText,
    Settings,
    Share,
    TemplateText,
    parse,
    set_value,
    value_from_text,
)


class Recompute(Settings):
    layers: Count


class Example(Settings):
    OTHER_NAMES: ClassVar = {
        "lr": "rate",
        "recompute": "recompute.layers",
        "layer": "layers are out of scope",
    }
    REMOVED: ClassVar = {"until": None}
    UNKNOWN_KEY_HELP: ClassVar = "; see docs/keys.md"

    rate: float = 1.0
    bound: float | None = None
    shares: tuple[Share, Share] = (0.0, 0.5)
    either: bool | float = False
    steps: Count | None = None
    recompute: Literal["none", "full"] | Recompute = "none"
    switch: bool | Recompute = False
    length: Literal["auto", "full"] | Count = "auto"
    warmup: Count = 0
    name: str | None = None
    names: tuple[str, ...] = ()
    folder: FilePath = Path("packs")
    source: PathText = "corpus"
    template: TemplateText = "text"


SWITCH = "must not be true or false (yes, no, on, off), but is "
MISTAKES: list[tuple[dict, str | tuple[str, ...]]] = [
    ({"steps": 1.5}, "`steps`"),
    ({"shares": [0.5, 1]}, "`shares.1`"),
    ({"recompute": {"layers": -1}}, "`recompute.layers`"),
    ({"switch": {"layers": 1, "layer": 1}}, "`switch.layer`: unknown key; layers are out of scope"),
    *(({key: True}, f"`{key}`: {SWITCH}True") for key in ("rate", "bound", "steps", "length")),
    ({"shares": [0.1, True]}, "(yes, no, on, off), but is [0.1, True]"),
    ({"name": False}, "`name`: Input should be a text in quotes, but is False"),
    ({"names": None}, "`names`: Input should be a valid list, but is None"),
    ({"recompute": 5}, "(its keys: layers), but is 5; did you mean `recompute.layers`?"),
    ({"warmup": 0.1}, "but is 0.1"),
    ({"rate": [1, 2]}, "`rate`: Input should be a valid number, but is [1, 2]"),
    ({"shares": [0.5, [1]]}, "but is [1]"),
    ({"Rate": 1}, "`Rate`: unknown key; did you mean `rate`?"),
    ({"layers": 1}, "`layers`: unknown key; did you mean `recompute.layers`?"),
    ({"lr": 1}, "`lr`: unknown key; did you mean `rate`?"),
    ({"switch": {"layers": 1, "layerz": 1}}, "did you mean `switch.layers`?"),
    ({"lora": 1, "adapter": 1}, "`lora`, `adapter`: unknown key; known keys here: "),
    ({"deepspeed": 1}, "shares, source, steps, switch, template, warmup; see docs/keys.md"),
    ({"switch": {}, "rate": "x"}, ("`rate`", "`switch.layers`")),
]


@pytest.mark.parametrize(("values", "named"), MISTAKES, ids=str)
def test_a_mistake_is_one_line_that_names_the_key(
    values: dict, named: str | tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as error:
        parse(Example, values, "file")
    parts = (named,) if isinstance(named, str) else named
    for line, part in zip(str(error.value).splitlines(), parts, strict=True):
        assert line.startswith("file: ") and part in line


def test_deep_wide_long_and_many_values_have_a_short_message() -> None:
    # Lists that are nested deeper than the recursion limit, and a list with 9^9 texts.
    deep: list = reduce(lambda inner, _: [inner], range(5000), [])
    wide: list = reduce(lambda inner, _: [inner] * 9, range(9), ["x"])
    for value in (deep, wide, "y" * 10**6, [True, wide]):
        for key in ("rate", "recompute", "names.0", "shares"):
            values: dict[str, Any] = {}
            set_value(values, key, value)
            with pytest.raises(InputError, match="but is") as error:
                parse(Example, values, "file")
            assert max(map(len, str(error.value).splitlines())) < 1000
    with pytest.raises(InputError) as error:
        parse(Example, {f"key{number}": 1 for number in range(10_000)}, "file")
    (line,) = str(error.value).splitlines()
    assert line.startswith("file: `key0`, `key1`, ") and line.count("`key") == 20


def test_a_setting_of_both_kinds_takes_numbers_and_switches() -> None:
    for value in (True, False, 1, 0, 0.5):
        either = parse(Example, {"either": value}, "file").either
        assert either == value and isinstance(either, bool) == isinstance(value, bool)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("bound", "~", None),
        ("steps", "364e6", 364_000_000),
        ("name", "null", None),
        ("name", "{title}: {text}\\n", "{title}: {text}\\n"),
        ("names", "Hello, you", ["Hello, you"]),
        ("names", "null", None),
        ("names", "[a, b]", ["a", "b"]),
        ("recompute.layers", "2", 2),
        ("unknown", "[1, {a: b}]", [1, {"a": "b"}]),
    ],
)
def test_a_value_on_a_command_line_is_yaml_except_for_texts(
    key: str, text: str, value: object
) -> None:
    assert value_from_text(Example, key, text) == value


@pytest.mark.parametrize(
    ("key", "text"), [("bound", ""), ("name", "  "), ("rate", "[1"), ("unknown.key", "")]
)
def test_an_empty_or_broken_override_is_rejected(key: str, text: str) -> None:
    with pytest.raises(InputError, match=rf"command line: .*`{key}="):
        value_from_text(Example, key, text)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"{title}\n\n{body}", "{title}\n\n{body}"),
        (r"{a}\t{b}\n", "{a}\t{b}\n"),
        (r"{{ '\n' }}", "{{ '\n' }}"),
        (r"{{ '\\n' }}\r\x", r"{{ '\\n' }}\r\x"),
    ],
)
def test_templates_have_equal_line_breaks_in_recipes_and_arguments(written: str, read: str) -> None:
    in_single_quotes = yaml.safe_load("template: '" + written.replace("'", "''") + "'")
    in_block = yaml.safe_load(f"template: |-\n  {written}")
    on_command_line = {"template": value_from_text(Example, "template", written)}
    for values in (in_single_quotes, in_block, on_command_line, {"template": read}):
        assert parse(Example, values, "file").template == read


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [
        ("folder", "~/packs", "/home/somebody/packs"),
        ("source", "~/text", "/home/somebody/text"),
        *(("source", name, name) for name in ("~draft", "./~/packs", "a/~/b", "{{ a ~ '/' }}")),
        *(("folder", name, name) for name in ("runs/a", "/s3:/b", "a:b", "c:/x", "runs/x://y")),
        *((key, "file:///data/x", "/data/x") for key in ("folder", "source")),
        *(("source", name, name) for name in ("s3://bucket/run", "gs://b", "https://a.org/b")),
        # Neither a revision nor a pattern is a secret.
        *(("source", name, name) for name in ("hf://datasets/a/b@main/c", "s3://b/part-?.jsonl")),
        *(("folder", name, None) for name in ("s3://b/run", "gs://b", "hf://a/b", "https://a/b")),
    ],
)
def test_a_path_is_expanded_and_is_no_address(
    key: str, written: str, read: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    if read is None:
        with pytest.raises(InputError, match=f"file: `{key}`: {written} is an address"):
            parse(Example, {key: written}, "file")
        return
    value = getattr(parse(Example, {key: written}, "file"), key)
    assert value == (Path(read) if key == "folder" else read)


def test_a_removed_key_is_read_in_records_and_with_its_former_default() -> None:
    assert parse(Example, {"until": [0.5], "rate": 2}, "run/config.yaml") == Example(rate=2)
    assert parse(Example, {"until": None, "rate": 2}, "x") == Example(rate=2)
    with pytest.raises(InputError, match="x: `until`: unknown key"):
        parse(Example, {"until": [0.5]}, "x")
