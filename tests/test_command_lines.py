"""Test command lines: a mistake is one message, and --help does not import torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pretrain.__main__ import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistyped_option_is_one_line_and_exit_status_2(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--bogus"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: command line: ")
    assert "--help" in message
    assert message.count("\n") == 1


def test_help_and_mistakes_do_not_import_torch() -> None:
    code = """
import contextlib, sys
from pretrain.__main__ import COMMANDS, main
for command in COMMANDS:
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    main([command, "--bogus"])
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(COMMANDS), done.stderr
