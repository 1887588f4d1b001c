"""Where a step's figures go: `metrics.jsonl` and any of accelerate's trackers, by name.

After a resume `metrics.jsonl` and TensorBoard are cut back to the checkpoint, so they hold every step exactly once. The hosted
services cannot remove a point; there each resume is a new segment, grouped under the run folder's name where groups exist.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.error import HTTPError
from urllib.request import urlopen

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from foundation.errors import InputError
from foundation.files import replace_file
from foundation.reading import parse_json, read_regular, reason_of
from pretrain.settings.config import flatten

METRICS_FILE = "metrics.jsonl"
REACHED_WITHIN = 5  # seconds in which a hosted service must answer at the start

# For trackers whose name is not that of their module and package: the modules, of which one is enough, and the package.
_PACKAGES = {
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"),
    "comet_ml": (("comet_ml",), "comet-ml"),
}


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
            raise InputError(
                f"{self.path}: cannot be written: {error.strerror}; every checkpoint is untouched. Free space there, then start "
                "the same command again to resume."
            ) from None

    def sync(self) -> None:
        """Flush to the disk before a checkpoint is saved: a power cut must not lose the steps before it."""
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        self._file.close()

    @property
    def in_place(self) -> bool:
        """Whether what is written still goes into the file of that name: nobody has deleted, moved or replaced it."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except OSError:
            return False

    def go_back(self, step: int) -> None:
        """Take the steps after `step` out of the file, and go on after it."""
        self.finish()
        self.resumed_step = step
        self.start()


@dataclass(frozen=True)
class Trackers:
    """The trackers of one run; other processes than the main one have none, and there every call does nothing."""

    trackers: Sequence[GeneralTracker | JsonlTracker]

    def start(self, config: Mapping[str, Any]) -> None:
        """Open all of them, and hand over the run's whole configuration as flat `section.key` pairs of scalars.

        Accelerate's trackers want its state to exist: make the Accelerator first.
        """
        scalars = {k: v if isinstance(v, (int, float, str)) else json.dumps(v, default=str) for k, v in flatten(config).items()}
        for tracker in self.trackers:
            with _refusals_of(tracker):
                tracker.start()
            if not isinstance(tracker, JsonlTracker):
                tracker.store_init_configuration(dict(scalars))

    def log(self, record: Mapping[str, Any]) -> None:
        """Give `record`, a step's or an evaluation's object, to every tracker: whole to the file, its numbers to the others."""
        numbers = {key: value for key, value in record.items() if type(value) in (int, float) and key != "step"}
        for tracker in self.trackers:
            if isinstance(tracker, JsonlTracker):
                tracker.log(record)
            else:
                tracker.log(dict(numbers), step=record["step"])

    @property
    def in_place(self) -> bool:
        return all(tracker.in_place for tracker in self.trackers if isinstance(tracker, JsonlTracker))

    def note(self, event: Mapping[str, Any]) -> None:
        """Give `event`, which is neither a step nor an evaluation, to the file alone: the others draw curves."""
        for tracker in self.trackers:
            if isinstance(tracker, JsonlTracker):
                tracker.log(event)

    def log_samples(self, record: Mapping[str, Any]) -> None:
        """Give `record`, of an evaluation's samples, to the file, and each text to the trackers that show texts."""
        self.note(record)
        texts = {f"samples/{number}": each["prompt"] + each["text"] for number, each in enumerate(record["samples"])}
        for tracker in self.trackers:
            if tracker.name in ("tensorboard", "wandb"):
                tracker.log(dict(texts), step=record["step"])

    def sync(self) -> None:
        """Call this before saving a checkpoint: after a resume from it, nothing repeats the steps before it."""
        for tracker in self.trackers:
            if isinstance(tracker, JsonlTracker):
                tracker.sync()

    def finish(self) -> None:
        for tracker in self.trackers:
            tracker.finish()


def resolve(names: Sequence[str], *, run_dir: Path, project: str, resumed_step: int = 0, main_process: bool = True) -> Trackers:
    """The trackers called `names`, not yet started; on every process InputError for a name unknown or a package not installed."""
    for name in names:
        _check(name)
    if not main_process:
        return Trackers(())
    return Trackers(tuple(_build(name, run_dir, project, resumed_step) for name in dict.fromkeys(names)))


def check_services(names: Sequence[str]) -> None:
    """InputError where W&B is wanted and has no key here, or cannot be reached: before the model is built, and without asking.

    wandb itself tries to reach its server for half a minute, and then raises.
    """
    if "wandb" not in names:
        return
    import wandb

    settings = wandb.setup().settings
    if settings.mode not in ("online", "shared"):
        return
    offline = "WANDB_MODE=offline writes the run into its folder, for `wandb sync` later; or take wandb out of `log.trackers`"
    try:  # first: with a key, wandb's own check waits for the server
        with contextlib.suppress(HTTPError):  # an answer all the same
            urlopen(settings.base_url, timeout=REACHED_WITHIN).close()
    except OSError as error:
        what = f"cannot be reached within {REACHED_WITHIN} s ({getattr(error, 'reason', error)})"
        raise InputError(f"`log.trackers`: wandb's server {settings.base_url} {what}. {offline}") from None
    try:
        known = wandb.login(prompt=False)
    except wandb.Error as error:
        raise InputError(f"`log.trackers`: wandb does not take the key that it finds: {error}; `wandb login` again") from None
    if not known:
        raise InputError(
            f"`log.trackers`: wandb has no key for {settings.base_url}; run `wandb login` or set WANDB_API_KEY. {offline}"
        )


@contextlib.contextmanager
def _refusals_of(tracker: GeneralTracker | JsonlTracker) -> Iterator[None]:
    """One message for what W&B refuses after all: a key that it does not know, a project that is not the user's."""
    if tracker.name != "wandb":
        yield
        return
    import wandb

    try:
        yield
    except wandb.Error as error:
        what = " ".join(str(error).split())
        raise InputError(f"`log.trackers`: wandb does not start: {what}; `wandb login` again, or WANDB_MODE=offline") from None


def cut_back(path: Path, last_step: int) -> None:
    """Rewrite the metrics file at `path` without the steps after `last_step` and without lines that were not written whole."""
    if not path.exists():
        return
    old = read_regular(path)
    new = b"".join(line for line in old.splitlines(keepends=True) if _step_of(line) <= last_step)
    if new != old:
        replace_file(path, new)


def _step_of(line: bytes) -> float:
    """The step of a line of metrics, or infinity where a kill or crash left only a part of the line."""
    if not line.endswith(b"}\n"):
        return math.inf
    try:
        step = parse_json(line).get("step")
    except ValueError:
        return math.inf
    return step if type(step) is int else math.inf


def _check(name: str) -> None:
    known = ["jsonl", *LOGGER_TYPE_TO_CLASS]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known trackers: {', '.join(sorted(known))}"
        raise InputError(f"`log.trackers`: there is no tracker {name!r}; {hint}")
    modules, package = _PACKAGES.get(name, ((name,), name))
    if name != "jsonl" and not any(importlib.util.find_spec(module) for module in modules):
        raise InputError(
            f"`log.trackers`: {name!r} needs a package that is not installed; `pip install {package}`, or take it out"
        )


def _build(name: str, run_dir: Path, project: str, resumed_step: int) -> GeneralTracker | JsonlTracker:
    if name == "jsonl":
        return JsonlTracker(run_dir / METRICS_FILE, resumed_step)
    tracker = LOGGER_TYPE_TO_CLASS[name]
    if name == "tensorboard":  # purge_step: TensorBoard's own way of taking back what a killed run logged beyond its checkpoint
        return tracker("tensorboard", run_dir, purge_step=resumed_step + 1 if resumed_step else None)
    if name == "wandb":
        return tracker(project, dir=str(run_dir), name=run_dir.name, group=run_dir.name)
    if name == "trackio":
        return tracker(project, name=f"{run_dir.name}-{resumed_step}" if resumed_step else run_dir.name, group=run_dir.name)
    return tracker(project, run_dir) if tracker.requires_logging_directory else tracker(project)
