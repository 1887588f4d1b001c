"""Where a step's figures go: `metrics.jsonl`, and any of accelerate's trackers by name.

`metrics.jsonl` holds every step exactly once. A hosted service goes on with the run that `trackers.json` in the run folder names;
what it shows after a resume or a kill is its own business. A service that fails while the run trains gets nothing more, and costs
the training nothing.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from foundation.errors import InputError
from foundation.files import replace_file
from pretrain.metrics.jsonl import JsonlTracker
from pretrain.metrics.run_folder import METRICS_FILE, TRACKERS_FILE
from pretrain.settings.config import flatten
from pretrain.settings.recipe import LogSettings

# How the field calls what has another name in `metrics.jsonl`. Trackers get both.
OTHER_NAMES = {"mfu": "mfu_bf16_peak", "throughput_per_sec": "tokens_per_second", "grad_norm": "gradient_norm"}


def errors_of(name: str) -> tuple[type[Exception], ...]:
    """What a service raises that refuses or is away; most of it is OSError, as that of `requests` is."""
    if name == "wandb":
        import wandb

        return OSError, ValueError, RuntimeError, wandb.Error
    return OSError, ValueError, RuntimeError


@dataclass
class Service:
    """One of accelerate's trackers, of the run that the service knows by `id`."""

    name: str
    id: str
    tracker: GeneralTracker | None = None  # None before the start, and once it has failed

    def build(self, log: LogSettings, run_dir: Path, resumed_step: int) -> GeneralTracker:
        """The tracker as accelerate makes it, which goes on with the run where the service can."""
        make, title = LOGGER_TYPE_TO_CLASS[self.name], run_dir.name
        match self.name:
            case "tensorboard":  # purge_step takes back what a killed run logged beyond its checkpoint
                return make("tensorboard", run_dir, purge_step=resumed_step + 1 if resumed_step else None)
            case "wandb":  # a sweep's agent and WANDB_RUN_ID name the run themselves
                given = os.environ.get("WANDB_SWEEP_ID") or os.environ.get("WANDB_RUN_ID")
                return make(log.project, dir=str(run_dir), name=title, **({} if given else {"id": self.id, "resume": "allow"}))
            case "mlflow":
                return make(log.project, run_name=title)
            case "trackio":  # it finds a run by its name alone
                return make(log.project, name=f"{title}-{self.id}", resume="allow")
        return make(log.project, run_dir) if make.requires_logging_directory else make(log.project)

    def start(self, log: LogSettings, run_dir: Path, resumed_step: int, config: Mapping[str, Any]) -> None:
        """Open it and hand over the run's configuration as flat `section.key` pairs; InputError where the service refuses."""
        scalars = {k: v if isinstance(v, int | float | str) else json.dumps(v, default=str) for k, v in flatten(config).items()}
        try:
            self.tracker = self.build(log, run_dir, resumed_step)
            self.tracker.start()
            self.tracker.store_init_configuration(scalars)
        except errors_of(self.name) as error:
            raise InputError(f"`log.trackers`: {self.name} does not start: {error}; mend that, or take it out") from None

    def attempt(self, act: Callable[[GeneralTracker], object]) -> None:
        """Call `act` with the tracker; where the service fails, say so once, and leave it alone from then on."""
        if self.tracker is None:
            return
        try:
            act(self.tracker)
        except errors_of(self.name) as error:
            self.tracker = None
            logging.getLogger(__name__).warning(
                "`log.trackers`: %s has failed and gets nothing more until the next start: %s", self.name, error
            )

    def log(self, record: Mapping[str, Any]) -> None:
        """What the service can show of a line of `metrics.jsonl`: the numbers of a step or an evaluation, and samples."""
        step = record["step"]
        if "samples" in record:
            self.attempt(lambda tracker: log_samples(self.name, tracker, record["samples"], step))
        elif record.get("event", "evaluation") == "evaluation":
            numbers = {key: value for key, value in record.items() if type(value) in (int, float) and key != "step"}
            others = {name: numbers[ours] for name, ours in OTHER_NAMES.items() if ours in numbers}
            self.attempt(lambda tracker: tracker.log(numbers | others, step=step))


def log_samples(name: str, tracker: GeneralTracker, samples: Sequence[Mapping[str, str]], step: int) -> None:
    """Prompts and what the model wrote: a table in W&B, text in TensorBoard; other services have neither."""
    if name == "wandb":
        rows = [[step, each["prompt"], each["text"]] for each in samples]
        tracker.log_table("samples", columns=["step", "prompt", "text"], data=rows, step=step)
    elif name == "tensorboard":
        tracker.log({f"samples/{n}": f"{each['prompt']}{each['text']}" for n, each in enumerate(samples)}, step=step)


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

    def picture(self, path: Path, step: int) -> None:
        """Show the PNG at `path` in W&B."""
        for service in self.services:
            if service.name == "wandb":
                images = {f"{path.stem}_picture": [str(path)]}
                service.attempt(lambda tracker, images=images: tracker.log_images(images, step=step))

    def sync(self) -> None:
        """Call this before saving a checkpoint: after a resume from it, nothing repeats the steps before it."""
        if self.file:
            self.file.sync()

    def finish(self) -> None:
        if self.file:
            self.file.finish()
        for service in self.services:
            service.attempt(lambda tracker: tracker.finish())


def resolve(log: LogSettings, *, run_dir: Path, resumed_step: int = 0, main_process: bool = True) -> Trackers:
    """The trackers that `log` names, not yet started. On every process InputError for an unknown name, or a missing package."""
    names = [name for name in log.trackers if name != "jsonl"]
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            near = difflib.get_close_matches(name, LOGGER_TYPE_TO_CLASS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known trackers: {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
            raise InputError(f"`log.trackers`: there is no tracker {name!r}; {hint}")
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


def check_login(names: Sequence[str]) -> None:
    """InputError where W&B is wanted and has no key here, without asking the user anything. Called before GPUs have work."""
    if "wandb" not in names:
        return
    import wandb

    if wandb.setup().settings.mode not in ("online", "shared"):
        return
    try:
        reason = "" if wandb.login(prompt=False, timeout=10) else "it has no key"
    except errors_of("wandb") as error:  # a server that is away, a key that it does not take
        reason = str(error)
    if reason:
        raise InputError(
            f"`log.trackers`: wandb: {reason}; run `wandb login` or set WANDB_API_KEY. WANDB_MODE=offline writes the run into "
            "its folder, for `wandb sync` later"
        )
