"""Where a step's figures go: `metrics.jsonl` and any of accelerate's trackers, by name.

After a resume `metrics.jsonl` is cut back to the checkpoint, so it holds every step exactly once. The other trackers go on with
the run that they had, which `trackers.json` in the run folder names.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from foundation.errors import InputError
from foundation.files import replace_file, save_file
from foundation.locks import in_place
from foundation.reading import load_object, parse_json, read_lines, reason_of
from pretrain.metrics.run_folder import METRICS_FILE, TRACKERS_FILE
from pretrain.metrics.services import check_installed, errors_of
from pretrain.metrics.tracked_run import CONTINUED, TrackedRun, does_not_start, kind_of
from pretrain.settings.recipe import LogSettings


class JsonlTracker:
    """One JSON object a line, flushed at each: a killed run loses at most the line it was writing, which `start` removes."""

    name = "jsonl"

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        self.path = path
        self.resumed_step = resumed_step
        self._file: TextIO | None = None

    def start(self) -> None:
        """Remove the steps after the resumed checkpoint's from the file, and open it to append."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            cut_back(self.path, self.resumed_step)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {reason_of(error)}; move it away") from None

    def log(self, values: Mapping[str, Any]) -> None:
        """Write `values`, which hold their own `step`; JSON has no infinity and no not-a-number, so these become null."""
        finite = json.loads(json.dumps(values), parse_constant=lambda _: None)
        try:
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # it cannot flush either; the next start removes a part of a line
                self._file.close()
            remedy = "Raise `ulimit -f`" if error.errno == errno.EFBIG else "Free space there"
            raise InputError(
                f"{self.path}: cannot be written: {error.strerror}; every checkpoint is untouched. {remedy}, then start the same "
                "command again to resume."
            ) from None

    def sync(self) -> None:
        """Flush to the disk before a checkpoint is saved: a power cut must not lose the steps before it."""
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        self._file.close()

    @property
    def in_place(self) -> bool:
        """Whether what is written still goes into the file of that name."""
        return in_place(self._file, self.path)

    def go_back(self, step: int) -> None:
        """Take the steps after `step` out of the file, and go on after it."""
        self.finish()
        self.resumed_step = step
        self.start()


@dataclass(frozen=True)
class Trackers:
    """What is told of one run: its `metrics.jsonl`, and trackers of accelerate's.

    Other processes than the main one have neither, and there every call does nothing.
    """

    file: JsonlTracker | None = None
    others: Sequence[TrackedRun] = ()
    kept_in: Path = Path(TRACKERS_FILE)
    kept: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # of all that this run has ever had, as of its start

    def start(self, config: Mapping[str, Any]) -> None:
        """Open all of them, and hand over the run's whole configuration. What a tracker does not have yet, it gets now.

        Accelerate's trackers want its state to exist: make the Accelerator first. InputError where one does not start.
        """
        if self.file is None:
            return
        self.file.start()
        for tracker in self.others:
            try:
                tracker.start(config)
            except errors_of(tracker.name) as error:
                raise does_not_start(tracker.name, error, self.kept_in) from None
        self._keep()  # before they are given anything: a kill must not cost them the run that they have begun
        missed = [tracker for tracker in self.others if tracker.name in CONTINUED]
        for line in read_lines(self.file.path) if missed else ():
            for tracker in missed:
                tracker.log(parse_json(line))
        self._keep()

    def _keep(self) -> None:
        """Write down which run each tracker goes on with, and what it has; those that are not named any more fall behind."""
        entries = {name: entry | {"complete": False} for name, entry in self.kept.items()}
        entries |= {tracker.name: tracker.kept for tracker in self.others if tracker.name in CONTINUED}
        if entries:
            save_file(self.kept_in, json.dumps(entries, indent=2).encode() + b"\n", "put that right, then start again")

    def log(self, record: Mapping[str, Any]) -> None:
        """Give `record`, a line of `metrics.jsonl`, to the file whole, and to the others what they can show of it."""
        if self.file is None:
            return
        self.file.log(record)
        failed_before = [tracker.failed for tracker in self.others]
        for tracker in self.others:
            tracker.log(record)
        if kind_of(record) != "step" or failed_before != [tracker.failed for tracker in self.others]:
            # Now: an evaluation may come after the checkpoint of its step, and a failed tracker must not be taken to have more.
            self._keep()

    @property
    def in_place(self) -> bool:
        return self.file is None or self.file.in_place

    def picture(self, path: Path, step: int) -> None:
        """Show the PNG at `path` in the trackers that can."""
        for tracker in self.others:
            tracker.picture(path, step)

    def sync(self) -> None:
        """Call this before saving a checkpoint: after a resume from it, nothing repeats the steps before it."""
        if self.file:
            self.file.sync()
            self._keep()

    def finish(self) -> None:
        if self.file is None:
            return
        self.file.finish()
        for tracker in self.others:
            tracker.finish()
        self._keep()


def resolve(log: LogSettings, *, run_dir: Path, resumed_step: int = 0, main_process: bool = True) -> Trackers:
    """The trackers that `log` names, not yet started. On every process InputError for an unknown name, or a missing package."""
    for name in log.trackers:
        check_installed(name)
    if not main_process:
        return Trackers()
    kept_in, file = run_dir / TRACKERS_FILE, run_dir / METRICS_FILE
    kept = read_kept(kept_in) if file.exists() else {}  # without its metrics, what trains there begins anew
    written = last_steps(file) if kept else {}
    for entry in kept.values():
        if entry["complete"]:  # it has all that the file has had; older versions wrote so at the start, and `seen` as of then
            entry["seen"] = {kind: max(entry["seen"].get(kind, 0), written.get(kind, 0)) for kind in entry["seen"] | written}
    names = (name for name in log.trackers if name != "jsonl")
    others = tuple(TrackedRun(name, run_dir, log, resumed_step, kept.get(name, {})) for name in names)
    return Trackers(JsonlTracker(file, resumed_step), others, kept_in, kept)


def read_kept(path: Path) -> dict[str, dict[str, Any]]:
    """What `_keep` has written: of each tracker its run's `id`, what it has for sure, and whether it ended with all."""
    kept = load_object(path, "remove it, and trackers begin another run") if path.exists() else {}
    for entry in kept.values():
        seen = entry.get("seen") if isinstance(entry, dict) else None
        if not isinstance(seen, dict) or not all(type(step) is int for step in seen.values()) or "complete" not in entry:
            raise InputError(f"{path}: is not what a run writes there; remove it, and trackers begin another run")
    return kept


def last_steps(path: Path) -> dict[str, int]:
    """Returns the last step of each kind of record in the metrics file at `path`."""
    last: dict[str, int] = {}
    for line in read_lines(path):
        if math.isfinite(step := _step_of(line)):
            last[kind_of(parse_json(line))] = int(step)
    return last


def cut_back(path: Path, last_step: int) -> None:
    """Rewrite the metrics file at `path` without the steps after `last_step` and without lines that were not written whole."""
    if not path.exists():
        return
    lines = read_lines(path)
    kept = [line for line in lines if _step_of(line) <= last_step]
    if len(kept) < len(lines):
        replace_file(path, b"".join(kept))


def _step_of(line: bytes) -> float:
    """The step of a line of metrics, or infinity where a kill or crash left only a part of the line."""
    if not (line.endswith(b"\n") and line.rstrip().endswith(b"}")):  # an editor may have ended lines as Windows does
        return math.inf
    try:
        step = parse_json(line).get("step")
    except ValueError:
        return math.inf
    return step if type(step) is int else math.inf
