"""Show the progress of long tasks: a bar on a terminal, or a line every 30 seconds in a log.

Code inside a task calls `advance` for each unit of work, without a reference to the progress bar.
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

# Seconds. A shorter task shows no bar.
SHOW_AFTER = 2.0
# Least number of seconds between two updates of a bar.
TERMINAL_INTERVAL = 0.5
# Least number of seconds between two lines in a log.
LOG_INTERVAL = 30.0

# Running tasks. The innermost task is the last one.
_running_tasks: list[Progress] = []


def say(text: str, shown: bool = True) -> None:
    """Print `text` to stderr, above a progress bar if there is one. Print nothing unless `shown`.

    stdout is kept for the results of a command.
    """
    if shown:
        tqdm.write(text, file=sys.stderr)


def advance() -> None:
    """Add one unit to the innermost running task of this process. Do nothing without a task."""
    if _running_tasks:
        _running_tasks[-1].update()


class _LogLines:
    """Stream that writes each state of a bar to stderr as a line, for a log.

    tqdm also writes texts that only move the cursor or clear a line. These texts are dropped.
    """

    def write(self, text: str) -> None:
        if text.startswith("\r") and (line := text.strip()):
            sys.stderr.write(f"{line}\n")


class Progress(tqdm):
    """Context manager that shows the progress of one task.

    Args:
        task: Text before the bar.
        unit: Noun that is counted, such as "tokens". Without a unit, only `task` is shown.
        shown: False to show nothing.
        options: Options of tqdm, such as `total`, or `initial` (the number of units already done).
    """

    def __init__(self, task: str, unit: str = "", shown: bool = True, **options: Any) -> None:
        on_terminal = sys.stderr.isatty()
        counting = {"unit": f" {unit}", "unit_scale": True, "delay": SHOW_AFTER}
        options |= counting if unit else {"bar_format": "{desc}"}
        super().__init__(
            desc=task,
            file=sys.stderr if on_terminal else _LogLines(),
            leave=False,
            dynamic_ncols=True,
            mininterval=TERMINAL_INTERVAL if on_terminal else LOG_INTERVAL,
            # A task without a unit shows only its name, and erases the name at the end. In a log,
            # show nothing for such a task.
            disable=not shown or not (unit or on_terminal),
            **options,
        )

    def __enter__(self) -> Progress:
        _running_tasks.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _running_tasks.pop()
        # `close` does not erase a bar that was shown before SHOW_AFTER, after a line above it.
        self.clear()
        self.close()
