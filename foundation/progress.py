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


def advance() -> None:
    """Tell the innermost task under way in this process, if there is one, that one more of its units is done."""
    if _under_way:
        _under_way[-1].update()


class Progress(tqdm):
    """Shows how far one task is, as a context manager. `unit`: what is counted; without one just the task is named. `options`:
    tqdm's, such as the `total` and what is done already (`initial`)."""

    def __init__(self, task: str, unit: str = "", shown: bool = True, **options: int) -> None:
        counted = (
            {"unit": f" {unit}", "unit_scale": True, "delay": SHOWN_AFTER}
            if unit
            else {"bar_format": "{desc}"}
        )
        every = REDRAWN_EVERY if sys.stderr.isatty() else IN_LOGS_EVERY
        how = {"file": sys.stderr, "leave": False, "dynamic_ncols": True, "mininterval": every}
        # a name that is wiped again serves no log
        how["disable"] = not shown or not (unit or sys.stderr.isatty())
        super().__init__(desc=task, **how, **counted, **options)

    def __enter__(self) -> Progress:
        _under_way.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _under_way.pop()
        self.close()
