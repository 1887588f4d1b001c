"""What a command line meets is one message and an exit status."""

from __future__ import annotations

import argparse
import importlib

import pytest

from foundation.command import CommandParser, number, run_command
from foundation.errors import InputError


def test_a_package_that_is_not_installed_is_named(capsys: pytest.CaptureFixture[str]):
    assert run_command(lambda: importlib.import_module("no_such_package.part") and 0, on_ctrl_c="stopped") == 2
    error = "error: the package `no_such_package` is not installed: python -m pip install -r requirements.txt\n"
    assert capsys.readouterr().err == error


def test_a_module_of_ours_that_is_not_there_is_a_bug_and_no_message():
    with pytest.raises(ModuleNotFoundError, match=r"foundation\.no_such"):
        run_command(lambda: importlib.import_module("foundation.no_such") and 0, on_ctrl_c="stopped")


@pytest.mark.parametrize(
    ("bounds", "good", "bad", "wanted"),
    [
        ((), {"1e-9": 1e-9, "8_000": 8000.0}, ["0", "-1", "nan", "inf", "many", ""], "a finite number above 0 is wanted"),
        ((None, 1), {"1": 1.0}, ["0", "1.1", "inf"], "a number above 0 and of at most 1 is wanted"),
        ((0, 100), {"0": 0.0, "100": 100.0}, ["-0.1", "100.5"], "a number of 0 to 100 is wanted"),
        ((1,), {"1": 1.0, "82e9": 82e9}, ["0.5", "inf"], "a finite number of 1 or more is wanted"),
    ],
)
def test_a_number_is_read_within_its_bounds_and_others_are_told_them(bounds, good, bad, wanted):
    read = number(*bounds)
    assert {text: read(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            read(text)
        assert str(refused.value) == f"{text}: {wanted}"


def test_a_whole_number_is_read_to_its_last_digit():
    read = number(0, 2**63 - 1, whole=True)
    assert read(str(2**63 - 1)) == 2**63 - 1 and isinstance(read("0"), int)
    assert [repr(read(text)) for text in ("1e3", "8.0", f"{2**53 - 1}.0")] == ["1000", "8", str(2**53 - 1)], "as in recipes"
    for text in (str(2**63), "-1", "-1e3", "1.5", f"{2**53}.0", f"{2**53 + 1}.0", "nan", "inf", "9" * 5000):
        with pytest.raises(argparse.ArgumentTypeError, match=f"a whole number of 0 to {2**63 - 1} is wanted"):
            read(text)


def test_a_text_that_is_refused_is_told_by_its_beginning():
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        number(1, whole=True)("9" * 5000)
    assert str(refused.value) == f"{'9' * 200}...: a whole number of 1 or more is wanted"


def test_a_mistyped_command_is_one_message_that_names_the_option():
    parser = CommandParser()
    parser.add_argument("--gpus", type=number(1, whole=True))
    assert parser.parse_args(["--gpus", "8"]).gpus == 8
    said = "command line: argument --gpus: 0: a whole number of 1 or more is wanted; --help lists the options"
    with pytest.raises(InputError, match=f"^{said}$"):
        parser.parse_args(["--gpus", "0"])
