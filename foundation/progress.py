"""Progress of long tasks: a bar on a terminal, or a line at most every half minute in a log.

Code inside a task calls `advance`. It does not know where the progress is shown.
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

SHOW_AFTER = 2.0  # seconds; a shorter task shows no bar
TERMINAL_INTERVAL = 0.5  # seconds between two updates of a bar, at least
LOG_INTERVAL = 30.0  # seconds between two lines in a log, at least

_running_tasks: list[Progress] = []  # the innermost task is the last


def say(text: str, shown: bool = True) -> None:
    """Print `text` to stderr above any progress bar, so that stdout has results only."""
    if shown:
        tqdm.write(text, file=sys.stderr)


def advance() -> None:
    """Count one more unit of the innermost running task of this process, if there is one."""
    if _running_tasks:
        _running_tasks[-1].update()


class Progress(tqdm):
    """Context manager that shows the progress of one task.

    Args:
        task: The text before the bar.
        unit: The noun that is counted. Without a unit only the task's name is shown.
        shown: Whether to show anything at all.
        options: Options of tqdm, such as `total` and `initial`, the number already done.
    """

    def __init__(self, task: str, unit: str = "", shown: bool = True, **options: Any) -> None:
        on_terminal = sys.stderr.isatty()
        counting = {"unit": f" {unit}", "unit_scale": True, "delay": SHOW_AFTER}
        options |= counting if unit else {"bar_format": "{desc}"}
        super().__init__(
            desc=task,
            file=sys.stderr,
            leave=False,
            dynamic_ncols=True,
            mininterval=TERMINAL_INTERVAL if on_terminal else LOG_INTERVAL,
            # A bare name that is erased afterwards is useless in a log.
            disable=not shown or not (unit or on_terminal),
            **options,
        )

    def __enter__(self) -> Progress:
        _running_tasks.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _running_tasks.pop()
        self.close()
