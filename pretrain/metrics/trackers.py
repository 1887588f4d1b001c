"""Where a step's figures go: `metrics.jsonl`, one JSON object a line, and any of accelerate's trackers by name.

`metrics.jsonl` holds every step exactly once, however often the training is stopped and started. A hosted service goes on with
the run that `trackers.json` in the run folder names; what it shows after a resume or a kill is its own business. A service that
fails while the run trains gets nothing more, and costs the training nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from foundation.errors import InputError
from foundation.files import replace_file
from pretrain.metrics.run_folder import METRICS_FILE, TRACKERS_FILE
from pretrain.settings.config import flatten
from pretrain.settings.recipe import LogSettings

# How the field calls what has another name in `metrics.jsonl`. Trackers get both.
OTHER_NAMES = {"mfu": "mfu_bf16_peak", "throughput_per_sec": "tokens_per_second", "grad_norm": "gradient_norm"}


class JsonlTracker:
    """The file at `path`, flushed at each line: a killed run loses at most the line it was writing, which `start` removes."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        self.path = path
        self.resumed_step = resumed_step
        self._file: TextIO | None = None

    def start(self) -> None:
        """Remove the steps after the resumed checkpoint's from the file, and a last line that is not whole; open it to append."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
            whole = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= self.resumed_step]
            if len(whole) < len(lines):
                replace_file(self.path, b"".join(whole))
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error.strerror}; move it away") from None

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

    def go_back(self, step: int) -> None:
        """Take the steps after `step` out of the file, and go on after it."""
        self.finish()
        self.resumed_step = step
        self.start()


@dataclass
class Service:
    """One of accelerate's trackers, of the run that the service knows by `id`."""

    name: str
    id: str
    tracker: GeneralTracker | None = None  # None before the start, and once it has failed

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        """What a service raises that refuses or is away; most of it is OSError, as that of `requests` is."""
        own = [importlib.import_module("wandb").Error] if self.name == "wandb" else []
        return OSError, ValueError, RuntimeError, *own

    def start(self, log: LogSettings, run_dir: Path, resumed_step: int, config: Mapping[str, Any]) -> None:
        """Open it, going on with the run where the service can, and hand over the run's configuration as flat `section.key`
        pairs; InputError where the service refuses."""
        make, title = LOGGER_TYPE_TO_CLASS[self.name], run_dir.name
        named = os.environ.get("WANDB_SWEEP_ID") or os.environ.get("WANDB_RUN_ID")  # a sweep's agent names the run itself
        options = {
            "tensorboard": {"purge_step": resumed_step + 1 if resumed_step else None},  # logged beyond the checkpoint
            "wandb": {"dir": str(run_dir), "name": title} | ({} if named else {"id": self.id, "resume": "allow"}),
            "mlflow": {"run_name": title},
            "trackio": {"name": f"{title}-{self.id}", "resume": "allow"},  # it finds a run by its name alone
        }.get(self.name, {})
        project = "tensorboard" if self.name == "tensorboard" else log.project  # a folder in the run's
        try:
            self.tracker = make(project, *([run_dir] if make.requires_logging_directory else []), **options)
            self.tracker.start()
            flat = flatten(config).items()
            scalars = {key: v if isinstance(v, int | float | str) else json.dumps(v, default=str) for key, v in flat}
            self.tracker.store_init_configuration(scalars)
        except self._errors as error:
            raise InputError(f"`log.trackers`: {self.name} does not start: {error}; mend that, or take it out") from None

    def tell(self, method: str, *arguments: Any, **options: Any) -> None:
        """Call a method of the tracker; where the service fails, say so once, and leave it alone from then on."""
        if self.tracker is None:
            return
        try:
            getattr(self.tracker, method)(*arguments, **options)
        except self._errors as error:
            self.tracker = None
            logging.getLogger(__name__).warning(
                "`log.trackers`: %s has failed and gets nothing more until the next start: %s", self.name, error
            )

    def log(self, record: Mapping[str, Any]) -> None:
        """What the service can show of a line of `metrics.jsonl`: the numbers of a step or an evaluation; W&B and TensorBoard get
        samples as text, prompts and what the model wrote."""
        samples = record.get("samples", ()) if self.name in ("wandb", "tensorboard") else ()
        values = {f"samples/{n}": f"{each['prompt']}{each['text']}" for n, each in enumerate(samples)}
        if record.get("event", "evaluation") == "evaluation":
            values = {key: value for key, value in record.items() if type(value) in (int, float) and key != "step"}
            values |= {name: values[ours] for name, ours in OTHER_NAMES.items() if ours in values}
        if values:
            self.tell("log", values, step=record["step"])


@dataclass(frozen=True)
class Trackers:
    """What is told of one run: its `metrics.jsonl`, and services. Processes other than the main one have neither, and there every
    call does nothing."""

    file: JsonlTracker | None = None
    services: Sequence[Service] = ()
    settings: LogSettings = field(default_factory=LogSettings)

    def start(self, config: Mapping[str, Any]) -> None:
        """Open all of them. Accelerate's trackers want its state to exist: make the Accelerator first."""
        if self.file is None:
            return
        self.file.start()
        run_dir = self.file.path.parent
        if self.services:
            ids = known_ids(run_dir) | {service.name: service.id for service in self.services}
            replace_file(run_dir / TRACKERS_FILE, json.dumps(ids, indent=2).encode() + b"\n")
        for service in self.services:
            service.start(self.settings, run_dir, self.file.resumed_step, config)

    def log(self, record: Mapping[str, Any]) -> None:
        """Give `record`, a line of `metrics.jsonl`, to the file whole, and to the services what they can show of it."""
        if self.file is not None:
            self.file.log(record)
        for service in self.services:
            service.log(record)

    def sync(self) -> None:
        """Call this before saving a checkpoint: after a resume from it, nothing repeats the steps before it."""
        if self.file:
            self.file.sync()

    def finish(self) -> None:
        if self.file:
            self.file.finish()
        for service in self.services:
            service.tell("finish")


def resolve(log: LogSettings, *, run_dir: Path, resumed_step: int = 0, main_process: bool = True) -> Trackers:
    """The trackers that `log` names, not yet started. On every process InputError for an unknown name, or a missing package."""
    names = [name for name in log.trackers if name != "jsonl"]
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise InputError(f"`log.trackers`: there is no tracker {name!r}; there are {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}")
        if name not in map(str, get_available_trackers()):
            package = name.replace("_", "-")
            raise InputError(f"`log.trackers`: {name!r} is not installed; `pip install {package}`, or take it out")
    if not main_process:
        return Trackers()
    ids = known_ids(run_dir) if resumed_step else {}
    services = tuple(Service(name, ids.get(name) or secrets.token_hex(4)) for name in names)
    return Trackers(JsonlTracker(run_dir / METRICS_FILE, resumed_step), services, log)


def known_ids(run_dir: Path) -> dict[str, str]:
    """Return the ids by which services know the run in `run_dir`."""
    path = run_dir / TRACKERS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
