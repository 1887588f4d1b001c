"""`report --watch`: the page of runs that are still going, written again whenever one of them has come further."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.reading import load_object
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import read_metrics, summary

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
            missing = [folder for folder in folders if not _figures_of(folder)["steps"]]
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
    """Whether its run has halted, or has written its summary, the last thing it does, and no step since. By what the files hold:
    the times of those that were copied say nothing. Of a killed run nobody can tell."""
    run, figures = RunFolder(folder, owner=False), _figures_of(folder)
    if "halted" in figures:
        return True
    return run.summary.exists() and load_object(run.summary, "start the run again to write it").get("steps") == figures["steps"]


def mark_of(path: Path) -> Mark:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return status.st_mtime_ns, status.st_size


def _figures_of(folder: Path) -> dict[str, Any]:
    """What comes of its metrics so far; no step where there are none yet."""
    mark = mark_of(RunFolder(folder, owner=False).metrics)
    return {"steps": 0} if mark is None else _figures_as_of(folder, mark)


@lru_cache(maxsize=1024)
def _figures_as_of(folder: Path, mark: Mark) -> dict[str, Any]:
    return summary(read_metrics(folder))
