"""What a user sees of a long task: on a terminal a bar, elsewhere little or nothing."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import sys
import termios

import pytest

from foundation import progress
from foundation.progress import Progress, advance, say


def on_a_terminal(act, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `act` writes to stderr where that is a pseudo-terminal."""
    monkeypatch.setattr(progress, "SHOWN_AFTER", 1e-9)
    monkeypatch.setattr(progress, "REDRAWN_EVERY", 0.0)
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 80))
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        act()
    text = b""
    with contextlib.suppress(OSError):
        while piece := os.read(reader, 100_000):
            text += piece
    os.close(reader)
    return text.decode()


def test_a_task_has_a_bar_which_makes_room_for_lines_and_is_gone_at_the_end(monkeypatch):
    def act():
        with Progress("evaluating", "packs", total=8, in_logs=False):
            advance(2, detail="the second")
            say("a line")

    text = on_a_terminal(act, monkeypatch)
    assert "evaluating:" in text and "2.00/8.00" in text and "the second" in text
    assert "\ra line\r\n" in text and text.rsplit("\r", 1)[1].strip() == ""


def test_a_wait_that_a_log_need_not_know_of_is_silent_there(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress("evaluating", "packs", total=8, in_logs=False):
        advance(4)
    assert sys.stderr.getvalue() == ""
    say("a line")
    assert sys.stderr.getvalue() == "a line\n"


def test_the_innermost_task_is_told_and_none_is_no_mistake():
    advance()
    with Progress("outer", "a", shown=False) as outer, Progress("inner", "b", shown=False, total=2) as inner:
        advance()
        advance(of="a")
        inner.update(5, 0.5)
    assert (outer.count, inner.count) == (0, 5)
