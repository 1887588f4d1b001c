"""Every command reads its command line in one way: options anywhere, and a mistake is one message."""

from __future__ import annotations

import subprocess
import sys

import pytest

from packing.__main__ import main as packing
from pretrain.__main__ import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistyped_option_is_one_line_and_exit_status_2(command: str, capsys: pytest.CaptureFixture[str]):
    assert main([command, "--bogus"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: command line: ") and said.endswith("; --help lists the options\n") and said.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["prepar"], ["--bogus"]])
def test_packing_without_a_command_that_there_is_names_those_that_there_are(arguments, capsys):
    assert packing(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: command line: ") and "prepare" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "nowhere", "--dtype", "bf16", "out"], "no checkpoint is there"),
        (["sample", "nowhere", "--tokens", "5", "def"], "nowhere"),
    ],
)
def test_what_has_no_name_may_follow_an_option(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    found = capsys.readouterr().err
    assert said in found and "unrecognized" not in found, "all arguments are read before anything is looked for"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["flops", "recipes/smoke.yaml", "--length", "33.7"], "--length: 33.7: a whole number of 1 or more is wanted"),
        (["matrix", "recipes/matrices/demo.yaml", "--cell", "-1"], "--cell: -1: a whole number of 0 or more is wanted"),
        (["matrix", "recipes/matrices/demo.yaml", "--at-once", "0"], "--at-once: 0: a whole number of 1 or more is wanted"),
        (["matrix", "recipes/matrices/demo.yaml", "--max-hours", "nan"], "--max-hours: nan: a finite number above 0 is wanted"),
        (["phases", "phases.yaml", "--gpus", "1.5"], "--gpus: 1.5: a whole number of 1 or more is wanted"),
        (["inspect", "packs", "--index", "-1"], "--index: -1: a whole number of 0 or more is wanted"),
        (
            ["tokenizer", "text", "--out", "x", "--vocabulary", "many"],
            "--vocabulary: many: a whole number of 1 or more is wanted",
        ),
    ],
)
def test_a_number_out_of_its_range_is_told_which_it_has(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_the_demos_sample_refuses_to_draw_no_token_in_one_line():
    done = subprocess.run([sys.executable, "-m", "demo.sample", "x", "def", "--tokens", "0"], capture_output=True, text=True)
    said = "error: command line: argument --tokens: 0: a whole number of 1 or more is wanted; --help lists the options\n"
    assert (done.returncode, done.stderr) == (2, said)
