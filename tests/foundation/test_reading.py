"""What others wrote is read within limits: hostile YAML and JSON, and what is no file, are refused at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from foundation.reading import MOST_DEPTH, one_line, parse_json, parse_yaml, read_regular, reason_of
from foundation.settings import load_yaml

BOMB = "l0: &l0 [x]\n" + "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 20))


@pytest.mark.parametrize(
    "text, says",
    [
        (BOMB, "its aliases stand for more than 100,000 values"),
        ("x: &x [*x]", r"`\*x` stands inside of what it names"),
        ("? [a]\n: b", "a list or mapping cannot be a key"),
        ("x: " + "[" * 20_000, "nested deeper than 64"),
        ("x: " + "9" * 5000, "a number of 5,000 digits"),
        ("x: " + ":".join(["59"] * 300), "a number of 899 digits"),
        ("x: !!python/object/apply:os.system [x]", "tags are not read"),
        ("x: !!int word", "tags are not read"),
        ("x: 2001-99-99", "a value cannot be read: month must be in 1..12"),
        ('x: "a\\0b"', "text with a NUL character"),
        ('x: "\\ud800"', "text that is not UTF-8"),
        ("x: 1\nx: 2", "key `x` stands twice"),
        ("x: 010", "`010` is a number of base 8 to YAML; write it as a plain number, or as text in quotes"),
        ("x: -0_10", "`-0_10` is a number of base 8"),
        ("x: 1:30", "`1:30` is a number of base 60"),
        ("x: 1:30.5", "`1:30.5` is a number of base 60"),
        ("x: &x {y: 1}\nz: {<<: *x}", "`<<`: keys are not merged; write them out"),
    ],
)
def test_hostile_yaml_is_refused_with_what_is_wrong(text: str, says: str):
    with pytest.raises(yaml.YAMLError, match=says):
        parse_yaml(text)


def test_numbers_that_mean_the_same_to_everybody_are_read():
    assert parse_yaml("[0, 00, 007, -7, +1_000, 0x10, 0b11, 1.5, .5, 1e-3, 1.0e-3]")[:8] == [0, 0, 7, -7, 1000, 16, 3, 1.5]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{window:5}", {"window": 5}),
        ("[{until:0.8,use: nvfp4}, {use:bf16,until:null}]", [{"until": 0.8, "use": "nvfp4"}, {"use": "bf16", "until": None}]),
        ("{a: {source:s3://x/y.jsonl,weight:1}}", {"a": {"source": "s3://x/y.jsonl", "weight": 1}}),
        ("a: {b:true}", {"a": {"b": True}}),
        ("{http://x: 1, 'a:b', \"c:d\": '', e: f:g}", {"http://x": 1, "a:b": None, "c:d": "", "e": "f:g"}),
        ('{a:"b"}', {'a:"b"': None}),
        ("[http://x, a:b, '12:30', C:\\x]", ["http://x", "a:b", "12:30", "C:\\x"]),
    ],
)
def test_in_braces_a_colon_needs_no_blank_and_elsewhere_it_is_a_part_of_text(text: str, value: object):
    assert parse_yaml(text) == value
    with pytest.raises(yaml.YAMLError, match="key `a` stands twice"):
        parse_yaml("{a:1,a:2}")
    with pytest.raises(yaml.YAMLError, match="`12:30` is a number of base 60"):
        parse_yaml("{at:12:30}")


def test_yaml_with_aliases_that_stand_for_little_is_read():
    assert parse_yaml("a: &a [1, 2]\nb: {c: *a, d: *a}\n") == {"a": [1, 2], "b": {"c": [1, 2], "d": [1, 2]}}


TEXT = st.text(
    st.characters(codec="utf-8", exclude_characters="\0\x85\u2028\u2029")
)  # the last three end a line of YAML, which folds them
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_values_come_back_from_yaml_and_json_as_they_were_written(value):
    assert parse_yaml(yaml.safe_dump(value, allow_unicode=True)) == value
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("depth, read", [(MOST_DEPTH - 1, True), (MOST_DEPTH + 1, False), (100_000, False)])
def test_json_is_read_down_to_a_depth_that_nothing_of_ours_has(depth: int, read: bool):
    text = "[" * depth + "]" * depth
    if read:
        assert json.dumps(parse_json(text)) == text
    else:
        with pytest.raises(ValueError, match="nested deeper than 64"):
            parse_json(text)


def test_a_file_beyond_its_limit_is_not_read(tmp_path: Path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match="sparse: cannot be read: it is longer than the 1 MiB that are read"):
        load_yaml(tmp_path / "sparse")
    assert read_regular(Path(__file__)) == Path(__file__).read_bytes()


def test_why_something_failed_is_one_line_which_is_never_empty():
    assert one_line(ValueError("404 Client Error.\n\n  Repository Not Found\n")) == "404 Client Error. Repository Not Found"
    assert one_line(AssertionError()) == one_line(AssertionError(), named=True) == "AssertionError"
    assert one_line(ValueError("one\ntwo three"), 7, named=True) == "ValueError: one two"
    with pytest.raises(OSError) as raised:
        Path("/not/there").read_bytes()
    assert reason_of(raised.value) == "No such file or directory" and "/not/there" in one_line(raised.value)
