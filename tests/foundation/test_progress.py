"""What a user sees of a long task: on a terminal a bar, elsewhere little or nothing."""

from __future__ import annotations

from foundation.progress import Progress, advance


def test_the_innermost_task_is_told_and_none_is_no_mistake():
    advance()
    with Progress("outer", "a", shown=False) as outer, Progress("inner", "b", shown=False, total=2) as inner:
        advance()
        inner.update(5)
    assert (outer.count, inner.count) == (0, 5)
