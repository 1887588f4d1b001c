"""YAML and JSON files are read as plain values, and ambiguous YAML is rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from foundation.reading import load_object, load_with_bases, load_yaml, parse_yaml


def test_repeated_keys_and_tags_are_rejected():
    for text, message in (
        ("x: 1\nx: 2", "key `x` is repeated"),
        ("x: !!python/object/apply:os.system [x]", "tag"),
    ):
        with pytest.raises(yaml.YAMLError, match=message):
            parse_yaml(text)


def test_numbers_with_an_exponent_need_neither_a_dot_nor_a_sign():
    numbers = [1e6, 100.0, 1e6, 5.0, -1e-5, 10_000.0]
    assert parse_yaml("[1e6, 1E+2, 1.0e6, .5e1, -1e-5, 1_0e3]") == numbers
    assert parse_yaml("[e5, 0x1e5, 1e, v1e6, 'a 1e6']") == ["e5", 0x1E5, "1e", "v1e6", "a 1e6"]


def test_numbers_have_the_base_that_a_reader_expects():
    assert parse_yaml("[1_000, 0, -7, +3, 0x1F, 0b11, 1_000.5, .5, 7., .inf, -.Inf]") == [
        *(1000, 0, -7, 3, 31, 3, 1000.5, 0.5, 7.0, float("inf"), -float("inf"))
    ]
    # YAML 1.1 reads these as 90, 90.5, 15, 3600, and as dates.
    texts = ["1:30", "1:30.5", "017", "1:00:00", "2026-11-28", "2026-11-28 10:00:00", "0o17", "08"]
    assert parse_yaml(f"[{', '.join(texts)}]") == texts


# The last three characters end a line of YAML.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0\x85\u2028\u2029"))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_values_come_back_from_yaml_as_they_were_written(value):
    assert parse_yaml(yaml.safe_dump(value, allow_unicode=True)) == value


def test_a_file_is_loaded_after_its_bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, text in (
        ("home/first.yaml", "a: 1"),
        ("second.yaml", "base: ~/first.yaml"),
        ("sub/third.yaml", "base: ../second.yaml"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    names = [path.name for path, _ in load_with_bases(tmp_path / "sub/third.yaml")]
    assert names == ["first.yaml", "second.yaml", "third.yaml"]
    (tmp_path / "home/first.yaml").write_text(f"base: {tmp_path / 'second.yaml'}")
    for load in (
        load_with_bases,
        lambda path: load_yaml(path.with_name("thrd.yaml")),
        lambda path: load_object(path, "restore it"),
    ):
        with pytest.raises(InputError, match=str(tmp_path)):
            load(tmp_path / "sub/third.yaml")
