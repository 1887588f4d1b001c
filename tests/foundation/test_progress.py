"""Progress in a log is a sequence of complete lines."""

from __future__ import annotations

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
