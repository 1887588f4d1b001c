"""Progress in a log is a sequence of complete lines."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

import pytest

from foundation import progress
from foundation.progress import Progress, advance, say


def test_a_log_has_whole_lines_of_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER", 0.0)
    monkeypatch.setattr(progress, "LOG_INTERVAL", 0.0)
    with Progress("tokenising", "tokens") as task:
        task.update(3)
        say("a message")
        with Progress("packing", "packs", total=2):
            advance()
    say("the end")
    log = capsys.readouterr().err
    assert not {"\r", "\x1b"} & set(log) and "\n\n" not in log
    lines = log.splitlines()
    assert lines[-1] == "the end" and "a message" in lines
    shown = [line for line in lines if line not in ("the end", "a message")]
    assert any("3.00 tokens" in line for line in shown)
    assert all(line.startswith(("tokenising: ", "packing: ")) for line in shown)


def test_a_bar_does_not_stay_after_a_line_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line above the bar shows the bar at once. The terminal has 80 columns."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with Progress("evaluating", "microbatches"):
            advance()
            say("a message")
        print("summary", file=terminal, flush=True)
        output = ""
        while not output.endswith("summary\r\n"):
            output += os.read(reader, 10_000).decode()
    os.close(reader)
    assert "evaluating: 1.00 microbatches" in output
    *_, erased, summary, _ = output.split("\r")
    assert erased.isspace() and summary == "summary", repr(output)
