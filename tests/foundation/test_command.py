"""What a command line meets is one message and an exit status."""

from __future__ import annotations

import importlib

import pytest

from foundation.command import run_command


def test_a_package_that_is_not_installed_is_named(capsys: pytest.CaptureFixture[str]):
    assert run_command(lambda: importlib.import_module("no_such_package.part") and 0, on_ctrl_c="stopped") == 2
    error = "error: the package `no_such_package` is not installed: python -m pip install -r requirements.txt\n"
    assert capsys.readouterr().err == error


def test_a_module_of_ours_that_is_not_there_is_a_bug_and_no_message():
    with pytest.raises(ModuleNotFoundError, match=r"foundation\.no_such"):
        run_command(lambda: importlib.import_module("foundation.no_such") and 0, on_ctrl_c="stopped")
