"""How far a long task is and when it will be done: on a terminal a bar, which tqdm draws, for tasks of more than two seconds.

Elsewhere (a log file, CI) a task may say so in lines of its own, `lines_every` seconds apart, or be silent. Code inside a task
tells by `advance` how far it is, and knows nothing of who shows it.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

from tqdm import tqdm

from foundation.units import duration

SHOWN_AFTER = 2.0  # seconds; what is done sooner needs no bar
_REDRAWN_EVERY = 0.5
_WIDEST = 110  # columns
_SCALED_FROM = 10_000  # of a unit: tokens and bytes as 12.3M
_BAR = "{desc}: {percentage:3.0f} % |{bar}| {n_fmt}/{total_fmt}{unit}, {elapsed}, {remaining} left{postfix}"
_NO_BAR = "{desc}: {n_fmt}{unit}, {elapsed} so far{postfix}"
_JUST_TIME = "{desc}: {elapsed} so far{postfix}"

_under_way: list[Progress] = []  # the innermost last


def say(text: str, shown: bool = True) -> None:
    """Print to stderr, where progress goes, so that stdout stays free for results."""
    if shown:
        with above_bars():
            print(text, file=sys.stderr, flush=True)


def advance(count: int = 1, detail: str = "", total: int | None = None, of: str | None = None) -> None:
    """Tell the innermost task under way in this process, if there is one, that `count` more of its units are done, what it is at,
    and how many they are in `total` once that is known. `of`: only a task that counts this unit is meant."""
    if _under_way and of in (None, _under_way[-1].unit):
        task = _under_way[-1]
        task.total = total or task.total
        task.update(task.count + count, detail=detail)


def above_bars(stream: TextIO | None = None) -> AbstractContextManager[None]:
    """Around printing to `stream` (default: stderr): a bar that is on the screen makes room, and is drawn again below."""
    if any(task.bar is not None for task in _under_way):
        return tqdm.external_write_mode(file=stream or sys.stderr)
    return nullcontext()


class Progress:
    """Shows how far one task is, as a context manager.

    `unit`: what is counted. `already_done`: units that an earlier run has finished; they do not count towards this run's rate.
    `lines_every`: seconds between lines where there is no terminal, and anywhere a line at the end; None: no lines. `poll`: gives
    count and total where nobody tells them; it is asked from another thread.
    """

    def __init__(
        self,
        task: str,
        unit: str = "",
        shown: bool = True,
        already_done: int = 0,
        *,
        total: int | None = None,
        lines_every: float | None = 10.0,
        poll: Callable[[], tuple[int, int | None]] | None = None,
    ) -> None:
        self.task, self.unit, self.shown, self.total = task, unit, shown, total
        self.count = self._first_count = already_done
        self.bar: tqdm | None = None
        self._detail, self._share = "", None
        self._first_share: float | None = None
        self._lines_every, self._poll = lines_every, poll
        self._on_terminal = shown and _is_terminal()
        self._started = self._printed = time.monotonic()
        self._updated = False
        self._ended, self._drawing = threading.Event(), threading.Thread(target=self._draw, daemon=True)

    def __enter__(self) -> Progress:
        _under_way.append(self)
        if self._on_terminal:
            self._drawing.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._on_terminal:
            self._drawing.join()
        _under_way.remove(self)
        if self.shown and self._lines_every and self._updated:
            self._print()

    def update(self, count: int, share: float | None = None, detail: str = "") -> None:
        """Report `count` units done, which are `share` (0 to 1) of all, where that is known; else of `total`."""
        self.count, self._detail, self._updated = count, detail, True
        self._share = share if share is not None else count / self.total if self.total else None
        if self._first_share is None:
            self._first_share = self._share if self._first_count else 0.0
        wants_line = self.shown and self._lines_every and not self._on_terminal
        if wants_line and time.monotonic() - self._printed >= self._lines_every:
            self._print()

    def _draw(self) -> None:
        """Runs in the bar's own thread: what is told may be minutes apart, and the time goes on."""
        if self._ended.wait(SHOWN_AFTER):
            return
        try:
            unit = f" {self.unit}" if self.unit else ""
            size = {"ncols": 79, "nrows": 24}  # until the first redrawing
            silent = {"mininterval": 0, "delay": 1e-9}  # it draws when it is told to
            self.bar = tqdm(desc=self.task, unit=unit, initial=self._first_count, leave=False, file=sys.stderr, **size, **silent)
            self.bar.start_t -= SHOWN_AFTER
            while True:
                self._refresh(self.bar)
                if self._ended.wait(_REDRAWN_EVERY):
                    return
        except OSError:  # the terminal is gone; the task is not
            return
        finally:
            bar, self.bar = self.bar, None
            if bar is not None:
                bar.close()

    def _refresh(self, bar: tqdm) -> None:
        if self._poll:
            self.count, self.total = self._poll()
        bar.n, bar.total = self.count, self.total or (round(self.count / self._share) if self._share and self.count else None)
        bar.unit_scale = (bar.total or bar.n) >= _SCALED_FROM
        bar.bar_format = _BAR if bar.total else _NO_BAR if self.unit else _JUST_TIME
        columns, bar.nrows = shutil.get_terminal_size()  # which may have changed, and is never 0, as some pseudo-terminals say
        bar.ncols = min(columns - 1, _WIDEST)
        bar.set_postfix_str(self._detail, refresh=False)
        bar.refresh()

    def _print(self) -> None:
        self._printed = time.monotonic()
        elapsed = self._printed - self._started
        rate = (self.count - self._first_count) / max(elapsed, 1e-9)
        parts = [f"{self.task}: {self.count:,} {self.unit}", self._detail, f"{rate:,.0f} {self.unit}/s"]
        if self._share is not None:
            gained = self._share - (self._first_share or 0.0)
            unfinished = gained > 0 and self._share < 1
            parts += [f"{self._share:.1%}", duration(elapsed * (1 - self._share) / gained if unfinished else elapsed)]
            parts[-1] += " left" if unfinished else " taken"
        say(", ".join(filter(None, parts)))


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
