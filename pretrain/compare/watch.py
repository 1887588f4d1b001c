"""`report --watch`: the page of runs that are still going, written again whenever one of them has come further."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from pretrain.metrics.run_folder import RunFolder

Mark = tuple[int, int] | None  # of a file: when it was changed, and its bytes; None where there is none


def follow(
    folders: Sequence[Path],
    page: Path,
    make: Callable[[float | None], Any],
    every: float,
    *,
    say: Callable[[str], None] = lambda text: print(text, flush=True),
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Call `make` for `page` whenever a run has written more, until all have ended or Ctrl-C comes.

    make: writes the page; with seconds, one that is read again by the browser, and with None its last. A run that has no step yet
    is waited for, which is said once. Any other InputError ends it.
    """
    seen: dict[Path, Mark] | None = None
    waiting_for = ""
    say(f"following {', '.join(str(folder) for folder in folders)}: {page} is written again as they go; Ctrl-C ends it")
    try:
        while not (seen and all(map(has_ended, folders))):
            missing = [folder for folder in folders if not _has_steps(folder)]
            if missing:
                said = ", ".join(map(str, missing))
                if said != waiting_for:
                    say(f"waiting for the first step of {said}")
                waiting_for = said
            elif (now := {folder: mark_of(RunFolder(folder, owner=False).metrics) for folder in folders}) != seen:
                seen = now
                comparison = make(every)
                at = ", ".join(f"{each.look.label} step {each.run.summary['steps']:,}" for each in comparison.standings)
                say(f"{time.strftime('%H:%M:%S')}  {at}: {page}")
            if not (seen and all(map(has_ended, folders))):
                sleep(every)
    except KeyboardInterrupt:
        say("")
    if seen:
        say(f"{make(None).answer()}\n\nPage: {page}")


def has_ended(folder: Path) -> bool:
    """Whether its run has written its summary, the last thing it does, and no step since. Of a killed run nobody can tell."""
    run = RunFolder(folder, owner=False)
    summary, metrics = mark_of(run.summary), mark_of(run.metrics)
    return summary is not None and metrics is not None and summary[0] >= metrics[0]


def mark_of(path: Path) -> Mark:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return status.st_mtime_ns, status.st_size


def _has_steps(folder: Path) -> bool:
    """Whether a whole line has been written: it may be an event, but a run's first is a step."""
    try:
        with RunFolder(folder, owner=False).metrics.open("rb") as file:
            return file.readline().endswith(b"\n")
    except OSError:
        return False
