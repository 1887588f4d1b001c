"""What a user sees of a long task: on a terminal a bar, elsewhere little or nothing."""

from __future__ import annotations

from foundation.progress import Progress, advance


def test_the_innermost_task_is_told_and_none_is_no_mistake():
    advance()
    with Progress("outer", "a") as outer, Progress("inner", "b", total=2) as inner:
        advance()
        inner.update(5)
    assert (outer.n, inner.n) == (0, 6)
