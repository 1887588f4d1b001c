"""What a command line meets is one message and an exit status."""

from __future__ import annotations

import argparse

import pytest

from foundation.command import number, run_command
from foundation.errors import InputError


def failing(error: BaseException):
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InputError("key: wrong; do this"), 2, "error: key: wrong; do this\n"),
        (PermissionError(13, "Permission denied", "/theirs"), 2, "error: [Errno 13] Permission denied: '/theirs'\n"),
        (KeyboardInterrupt(), 130, "\nstopped\n"),
    ],
)
def test_what_a_user_can_cause_is_a_message_and_a_status(error, status, message, capsys: pytest.CaptureFixture[str]):
    assert run_command(failing(error), on_ctrl_c="stopped") == status
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (number(), {"1e-9": 1e-9, "8_000": 8000.0}, ["0", "-1", "nan", "inf", "many", ""]),
        (number(0, 100), {"0": 0.0, "100": 100.0}, ["-0.1", "100.5"]),
        (number(0, 2**63 - 1, whole=True), {str(2**63 - 1): 2**63 - 1}, ["-1", "1.5", "nan", "9" * 40]),
    ],
)
def test_a_number_is_read_within_its_bounds(read, good, bad):
    assert {text: read(text) for text in good} == good
    for text in bad:
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            read(text)
