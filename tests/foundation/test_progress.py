"""What a user sees of a long task: on a terminal a bar, elsewhere little or nothing."""

from __future__ import annotations

import io
import sys

from foundation.progress import Progress, advance, say


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
