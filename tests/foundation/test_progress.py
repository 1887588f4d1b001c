"""What a user sees of a long task: on a terminal a bar that knows when it ends, elsewhere nothing or lines."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import sys
import time

import pytest

from foundation import progress
from foundation.progress import Progress, advance, say


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars appear after hundredths of a second, not seconds."""
    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.02)
    monkeypatch.setattr(progress, "_REDRAWN_EVERY", 0.01)


def on_a_terminal(act, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `act` writes to stderr where that is a pseudo-terminal."""
    reader, writer = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        act()
    text = b""
    with contextlib.suppress(OSError):
        while piece := os.read(reader, 100_000):
            text += piece
    os.close(reader)
    return text.decode()


def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_long_task_has_a_bar_with_what_is_left_and_it_is_gone_at_the_end(quickly, monkeypatch):
    def act():
        with Progress("evaluating", "packs", total=8, lines_every=None) as task:
            advance(2, "the second")
            until(lambda: task.bar is not None and task.bar.n == 2)
            until(lambda: task.bar.format_dict["elapsed"] > 0.05)
            time.sleep(0.05)  # drawn with both

    text = on_a_terminal(act, monkeypatch)
    assert "evaluating:  25 % |" in text and "2/8 packs" in text and " left, the second" in text
    assert "?" not in text.rsplit("2/8", 1)[1], "two of eight are done, so the time that is left is known"
    assert text.rsplit("\r", 1)[1].strip() == "", "the last thing drawn is nothing"


def test_what_is_done_soon_shows_no_bar(monkeypatch):
    def act():
        with Progress("evaluating", "packs", total=8, lines_every=None):
            advance(8)

    assert on_a_terminal(act, monkeypatch) == ""


def test_a_line_is_printed_above_the_bar(quickly, monkeypatch):
    def act():
        with Progress("evaluating", lines_every=None) as task:
            until(lambda: task.bar is not None and task.bar.n == 0)
            say("a line")

    before, after = on_a_terminal(act, monkeypatch).split("a line\r\n", 1)
    assert before.rsplit("\r", 1)[1] == "", "the bar has left its line"
    assert "evaluating:" in after, "and is drawn again below"


def test_a_count_may_be_asked_for_by_the_bar_itself(quickly, monkeypatch):
    def act():
        with Progress("saving", "B", lines_every=None, poll=lambda: (3_000_000, 12_000_000)) as task:
            until(lambda: task.bar is not None and task.bar.n == 3_000_000)
            time.sleep(0.05)

    assert "saving:  25 % |" in (text := on_a_terminal(act, monkeypatch)) and "3.00M/12.0M B" in text


def test_without_a_terminal_a_wait_is_silent_and_a_long_task_says_a_line(quickly, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("evaluating", "packs", total=8, lines_every=None):
        advance(4)
    assert stream.getvalue() == ""
    with Progress("tokenising", "tokens", lines_every=0.0001) as task:
        time.sleep(0.001)
        task.update(1000, 0.25, "3 documents")
    first, last = stream.getvalue().splitlines()
    assert first.startswith("tokenising: 1,000 tokens, 3 documents, ") and first.endswith(" left") and ", 25.0%, " in first
    assert last.startswith("tokenising: 1,000 tokens")


def test_the_innermost_task_is_told_and_none_is_no_mistake(monkeypatch):
    advance()
    with Progress("outer", "a", shown=False) as outer, Progress("inner", "b", shown=False, total=2) as inner:
        advance(total=3)
        advance(of="a")
    assert (outer.count, inner.count, inner.total) == (0, 1, 3)
