"""Settings as people write them: true is no number, nothing is no value, and `~/` is the home folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from foundation.errors import InputError
from foundation.settings import (
    Count,
    FilePath,
    PathText,
    Settings,
    Share,
    TextOrPath,
    at_home,
    load_with_bases,
    parse,
    value_from_text,
)


class Every(Settings):
    layers: Count


class Example(Settings):
    rate: float = 1.0
    bound: float | None = None
    shares: tuple[Share, Share] = (0.0, 0.5)
    either: bool | float = False
    steps: Count | None = None
    recompute: Literal["none", "full"] | Every = "none"
    switch: bool | Every = False
    name: str | None = None
    folder: FilePath = Path("here")
    source: PathText = "there"
    template: TextOrPath = "{{ text }}"


@pytest.mark.parametrize("values", [{"rate": True}, {"bound": False}, {"shares": [False, 0.1]}, {"steps": True}], ids=str)
def test_true_and_false_are_no_numbers(values: dict) -> None:
    with pytest.raises(
        InputError, match=rf"^file: `{next(iter(values))}(\.0)?`: a (whole )?number is wanted, not true or false$"
    ):
        parse(Example, values, "file")


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ({"recompute": {"layers": -1}}, ["`recompute.layers` is -1; it should be greater than or equal to 0"]),
        ({"recompute": {}}, ["`recompute.layers` is required and missing"]),
        ({"switch": {"layers": 1, "layer": 1}}, ["unknown key `switch.layer`; did you mean `switch.layers`?"]),
        ({"recompute": 5}, ["`recompute` is 5; it should be 'none' or 'full', or a mapping of keys to values"]),
        ({"switch": "x"}, ["`switch` is 'x'; it should be a valid boolean, or a mapping of keys to values"]),
        ({"switch": {}, "rate": "x"}, ["`rate` is 'x'; it should be a valid number", "`switch.layers` is required and missing"]),
    ],
    ids=str,
)
def test_where_one_member_of_a_union_got_further_the_others_say_nothing(values: dict, lines: list[str]) -> None:
    with pytest.raises(InputError) as error:
        parse(Example, values, "file")
    assert str(error.value).splitlines() == [f"file: {line}" for line in lines]


def test_a_field_that_takes_true_and_numbers_takes_both() -> None:
    assert parse(Example, {"either": True}, "file").either is True and parse(Example, {"either": 0.5}, "file").either == 0.5


@pytest.mark.parametrize("text", ["", "  "])
@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("bound", "write `bound=null` for none"),
        ("steps", "write `steps=null` for none"),
        ("name", "write `name=null` for none"),
        ("rate", "write a value"),
        ("folder", "write a value"),
        ("unknown.key", "write `unknown.key=null` for none"),
    ],
)
def test_an_override_without_a_value_is_refused(key: str, remedy: str, text: str) -> None:
    with pytest.raises(InputError) as error:
        value_from_text(Example, key, text)
    assert str(error.value) == f"command line: `{key}=` is empty; {remedy}, or leave it out"


@pytest.mark.parametrize("text", ["null", "~"])
def test_none_is_said_by_null(text: str) -> None:
    assert value_from_text(Example, "bound", text) is None and value_from_text(Example, "name", "null") is None
    assert value_from_text(Example, "name", "''") == value_from_text(Example, "source", '""') == ""


def test_a_home_folder_is_written_out_and_a_name_that_begins_alike_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    found = parse(Example, {"folder": "~/packs", "source": "~/text", "template": "~/chat.jinja"}, "file")
    assert (found.folder, found.source) == (Path("/home/somebody/packs"), "/home/somebody/text")
    assert found.template == "/home/somebody/chat.jinja"
    for name in ("~", "~draft", "./~/packs", "a/~/b", "~nobody-has-this-name/x", "{{ a ~ '/' }}"):
        assert at_home(name) == name
    assert parse(Example, {"folder": "./~/packs"}, "file").folder == Path("~/packs"), "as for a shell"


def test_a_base_may_lie_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home/base.yaml").write_text("name: base\n")
    (tmp_path / "own.yaml").write_text("base: ~/base.yaml\n")
    assert [path.name for path, _ in load_with_bases(tmp_path / "own.yaml")] == ["base.yaml", "own.yaml"]


@pytest.mark.parametrize(
    "text", ["9007199254740993", "9007199254740993.0", "9_007_199_254_740_993", str(2**63 - 1), "123456789e10"]
)
def test_every_digit_of_a_large_count_in_quotes_is_kept(text: str) -> None:
    digits = {"123456789e10": 1234567890000000000}.get(text) or int(text.removesuffix(".0"))
    assert parse(Example, {"steps": text}, "here").steps == digits


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (9007199254740993.0, "so large a number loses digits .* write all of them, as 9007199254740992$"),
        ("9007199254740993.5", "`steps` is '9007199254740993.5'; it should be a valid integer"),
        (str(2**63), f"too large; the most that a count can be is {2**63 - 1}"),
        ("1e999999999", "`steps` is inf; it should be a finite number"),
        ("1e400", "`steps` is inf; it should be a finite number"),
        (1e300, "too large; the most that a count can be is"),
    ],
)
def test_a_count_whose_digits_are_lost_or_too_many_is_refused(value: object, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse(Example, {"steps": value}, "here")
