"""What the output of a process says of why it ended."""

from __future__ import annotations

import pytest

from foundation.ending import reason_in


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("error: no\nhalted: loss\nValueError: x\nthe end\n", "halted: loss"),
        ("Traceback\n  ValueError: x\n\nthe end\n", "ValueError: x"),
        ("nothing to see\n \n", "nothing to see"),
        ("\n", "it said nothing"),
    ],
)
def test_the_reason_is_our_message_or_else_an_error_or_else_the_last_line(output: str, reason: str) -> None:
    assert reason_in(output.splitlines()) == reason
