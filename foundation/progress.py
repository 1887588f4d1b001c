"""How far a long task is: a bar on a terminal, drawn by tqdm; in a log at most a mark every half minute, or nothing.

Code inside a task tells by `advance` how far it is, and knows nothing of who shows it.
"""

from __future__ import annotations

import sys

from tqdm import tqdm

SHOWN_AFTER = 2.0  # seconds; what is done sooner needs no bar
REDRAWN_EVERY, IN_LOGS_EVERY = 0.5, 30.0  # seconds, at most

_under_way: list[Progress] = []  # the innermost last


def say(text: str, shown: bool = True) -> None:
    """Print to stderr, where progress goes, so that stdout stays free for results; above bars that are on the screen."""
    if shown:
        tqdm.write(text, file=sys.stderr)


def advance(count: int = 1, *, detail: str = "", of: str | None = None) -> None:
    """Tell the innermost task under way in this process, if there is one, that `count` more of its units are done, and what it is
    at. `of`: only a task that counts this unit is meant."""
    if _under_way and of in (None, _under_way[-1].unit):
        _under_way[-1].update(_under_way[-1].count + count, detail=detail)


class Progress:
    """Shows how far one task is, as a context manager.

    `unit`: what is counted; without one just the task is named. `already_done`: units that an earlier run has finished.
    `in_logs`: whether a log file is told too.
    """

    def __init__(
        self,
        task: str,
        unit: str = "",
        shown: bool = True,
        already_done: int = 0,
        *,
        total: int | None = None,
        in_logs: bool = True,
    ) -> None:
        self.unit, self.count = unit, already_done
        self._bar: tqdm | None = None
        self._task, self._total = task, total
        self._shown = shown and (in_logs or sys.stderr.isatty())

    def __enter__(self) -> Progress:
        _under_way.append(self)
        if self._shown:
            counted = {"unit": f" {self.unit}", "unit_scale": True, "delay": SHOWN_AFTER}
            self._bar = tqdm(
                desc=self._task,
                file=sys.stderr,
                initial=self.count,
                total=self._total,
                leave=False,
                dynamic_ncols=True,
                mininterval=REDRAWN_EVERY if sys.stderr.isatty() else IN_LOGS_EVERY,
                **(counted if self.unit else {"bar_format": "{desc}"}),
            )
        return self

    def __exit__(self, *exception: object) -> None:
        _under_way.remove(self)
        if self._bar is not None:
            self._bar.close()

    def update(self, count: int, share: float | None = None, detail: str = "") -> None:
        """Report `count` units done, which are `share` (0 to 1) of all, where that is known."""
        done, self.count = count - self.count, count
        if self._bar is not None:
            if share:
                self._bar.total = round(count / share)
            if detail:
                self._bar.set_postfix_str(detail, refresh=False)
            self._bar.update(done)
