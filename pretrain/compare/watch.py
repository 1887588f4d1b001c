"""`report --watch`: the page of runs that are still going, written again whenever one of them has come further."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.reading import load_object
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import NoStepYet

Mark = tuple[int, int] | None  # of a file: when it was changed, and its bytes; None where there is none


def follow(
    folders: Sequence[Path],
    page: Path,
    make: Callable[[float | None], Any],
    every: float,
    *,
    say: Callable[[str], None] = lambda text: print(text, flush=True),
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """Call `make` for `page` whenever a run has written more, until all have ended or Ctrl-C comes. Returns what its last call
    returned, None where Ctrl-C came before there was a page.

    make: writes the page; with seconds, one that is read again by the browser, and with None its last. A run that has no step yet
    is waited for, which is said once. Any other InputError ends it.
    """
    seen: dict[Path, Mark] = {}
    figures: dict[Path, Mapping[str, Any]] = {}  # of the runs as the page has them, which was read for both
    waiting_for = ""
    say(f"following {', '.join(str(folder) for folder in folders)}: {page} is written again as they go; Ctrl-C ends it")
    try:
        while not (figures and all(has_ended(folder, figures[folder]) for folder in folders)):
            if seen:
                sleep(every)
            now = {folder: mark_of(RunFolder(folder, owner=False).metrics) for folder in folders}
            if now == seen:
                continue
            seen = now
            missing = [folder for folder, mark in now.items() if mark is None]
            try:
                comparison = None if missing else make(every)
            except NoStepYet as none:
                if none.run_dir not in now:  # a baseline that is not followed
                    raise
                comparison, missing = None, [none.run_dir]
            if comparison is None:
                figures, said = {}, ", ".join(map(str, missing))
                if said != waiting_for:
                    say(f"waiting for the first step of {said}")
                waiting_for = said
            else:
                figures = {each.run.path: each.run.summary for each in comparison.standings}
                at = ", ".join(f"{each.look.label} step {each.run.summary['steps']:,}" for each in comparison.standings)
                say(f"{time.strftime('%H:%M:%S')}  {at}: {page}")
    except KeyboardInterrupt:
        say("")
    if not figures:
        return None
    last = make(None)
    say(f"{last.answer()}\n\nPage: {page}")
    return last


def has_ended(folder: Path, figures: Mapping[str, Any]) -> bool:
    """Returns whether the run in `folder`, whose metrics come to `figures`, has halted, or has written its summary, the last
    thing it does, and no step since. What the files hold decides, as the times of those that were copied say nothing. Of a killed
    run nobody can tell."""
    if "halted" in figures:
        return True
    written = RunFolder(folder, owner=False).summary
    return written.exists() and load_object(written, "start the run again to write it").get("steps") == figures["steps"]


def mark_of(path: Path) -> Mark:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return status.st_mtime_ns, status.st_size
