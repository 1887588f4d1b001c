"""What a command line meets is one message and an exit status."""

from __future__ import annotations

import pytest

from foundation.command import run_command
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
