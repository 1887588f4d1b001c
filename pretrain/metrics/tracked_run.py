"""A tracker of accelerate's that goes on with one run of its service, however often the training is stopped and started.

What no service can take back is not given twice: steps that are trained again after a resume are passed over up to the last one
that the service has. What it does not have yet, because it was named later, had failed, or held it back when the run was killed,
it is given from `metrics.jsonl`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from foundation.errors import InputError
from foundation.reading import one_line
from pretrain.metrics.delivered import WRITTEN_THROUGH, last_delivered
from pretrain.metrics.run_folder import TENSORBOARD
from pretrain.metrics.services import errors_of
from pretrain.settings.config import flatten
from pretrain.settings.recipe import LogSettings

CONTINUED = ("tensorboard", "wandb", "mlflow", "trackio")  # that can go on with a run; of others each start is a run of its own
TAKEN_BACK = ("tensorboard",)  # from which steps can be taken back
# How the reference, and much else, calls what has another name in `metrics.jsonl`. Trackers get both.
OTHER_NAMES = {"mfu": "mfu_bf16_peak", "throughput_per_sec": "tokens_per_second", "grad_norm": "gradient_norm"}


def kind_of(record: Mapping[str, Any]) -> str:
    """`step`, `evaluation`, `samples`, ...: each kind stands in `metrics.jsonl` once a step."""
    return record.get("event", "step")


class TrackedRun:
    """The tracker `name` of the run in `run_dir`. Open it with `start`; `kept` is what the next start has to know.

    id: by which the service knows the run; None before the first start, and where a service has none.
    seen: of each kind of record, the last step that the service has been given.
    """

    def __init__(self, name: str, run_dir: Path, log: LogSettings, resumed_step: int, kept: Mapping[str, Any]) -> None:
        self.name = name
        self.id: str | None = kept.get("id")
        self.seen: dict[str, int] = dict(kept.get("seen", {}))
        self.failed = False
        self._ended_well: bool = kept.get("complete", True)
        self._safe = dict(self.seen)  # what a kill cannot take from the service any more
        self._run_dir = run_dir
        self._log = log
        self._resumed_step = resumed_step
        self._tracker: GeneralTracker | None = None

    @property
    def kept(self) -> dict[str, Any]:
        sure = self._ended_well or self.name in WRITTEN_THROUGH
        return {"id": self.id, "seen": self.seen if sure else self._safe, "complete": self._ended_well}

    def _build(self) -> GeneralTracker:
        tracker, project, title = LOGGER_TYPE_TO_CLASS[self.name], self._log.project, self._run_dir.name
        if self.name == "tensorboard":
            # purge_step: TensorBoard's own way of taking back what a killed run logged beyond its checkpoint.
            last, begun = self._resumed_step, bool(self.seen) or (self._run_dir / TENSORBOARD).exists()
            seen = self.seen or dict.fromkeys(("step", "evaluation", "samples") if begun else (), last)
            self.seen = {kind: min(step, last) for kind, step in seen.items()}
            if not isinstance(threading.excepthook, partial):
                threading.excepthook = partial(_unless_tensorboards, threading.excepthook)
            return tracker("tensorboard", self._run_dir, purge_step=last + 1 if begun else None)
        if self.name == "wandb":
            return tracker(project, **self._wandb_run())
        if self.name == "mlflow":
            return tracker(project, run_id=self.id, run_name=title)
        if self.name == "trackio":
            # It finds a run by its name alone, and folders may have equal names. One killed before it had a step is not there.
            self.id = self.id or f"{title}-{secrets.token_hex(4)}"
            return tracker(project, name=self.id, resume="must" if self.seen else "allow")
        return tracker(project, self._run_dir) if tracker.requires_logging_directory else tracker(project)

    def _wandb_run(self) -> dict[str, Any]:
        """One id over all starts. Before it goes that of a sweep's agent, which gives each trial its own, and a user's
        WANDB_RUN_ID."""
        import wandb

        given = os.environ.get("WANDB_RUN_ID")
        if given and given != self.id:
            self.seen = {}
        self.id = given or self.id or secrets.token_hex(4)
        names = {"dir": str(self._run_dir), "name": self._run_dir.name}
        if not os.environ.get("WANDB_SWEEP_ID"):  # which has an id and an entity of its own
            names |= {"id": self.id}
        return names if wandb.setup().settings.mode == "offline" else names | {"resume": "allow"}

    def start(self, config: Mapping[str, Any]) -> None:
        """Open it, and hand over the run's whole configuration as flat `section.key` pairs of scalars."""
        self._tracker = self._build()
        self._tracker.start()
        if self.id and not self._ended_well:
            there = last_delivered(self.name, self._tracker, self._run_dir, self.id)
            self.seen = {kind: max(self.seen.get(kind, 0), there.get(kind, 0)) for kind in self.seen | there}
        self._safe, self._ended_well = dict(self.seen), False
        scalars = {k: v if isinstance(v, (int, float, str)) else json.dumps(v, default=str) for k, v in flatten(config).items()}
        if self.name == "mlflow":
            import mlflow

            self.id = self._tracker.tracker.info.run_id
            there = mlflow.get_run(self.id).data.params  # which MLflow lets nobody change
            scalars = {key: value for key, value in scalars.items() if key not in there}
        if self.name != "tensorboard" or not self.seen:  # there, each time adds another run to the page of hyper-parameters
            self._tracker.store_init_configuration(scalars)

    def log(self, record: Mapping[str, Any]) -> None:
        """Give it a line of `metrics.jsonl`: the numbers of a step or an evaluation, the texts of samples."""
        kind, step = kind_of(record), record["step"]
        if self.failed or step <= self.seen.get(kind, -1):
            return
        try:
            if kind == "samples":
                self._log_samples(record["samples"], step)
            elif kind in ("step", "evaluation"):
                numbers = {key: value for key, value in record.items() if type(value) in (int, float) and key != "step"}
                others = {name: numbers[ours] for name, ours in OTHER_NAMES.items() if ours in numbers}
                self._tracker.log(numbers | others, step=step)
        except errors_of(self.name) as error:
            self._give_up(error)
            return
        if self.name in CONTINUED:
            self.seen[kind] = step

    def _log_samples(self, samples: list[dict[str, Any]], step: int) -> None:
        rows = [[step, each["prompt"], each["text"]] for each in samples]
        if self.name == "tensorboard":
            texts = {f"samples/{number}": f"{prompt}{text}" for number, (_, prompt, text) in enumerate(rows)}
            self._tracker.log(texts, step=step)
        elif self.name == "wandb":
            self._tracker.log_table("samples", columns=["step", "prompt", "text"], data=rows, step=step)
        elif self.name == "mlflow":
            import mlflow

            mlflow.log_text("\n\n".join(f"{prompt}{text}" for _, prompt, text in rows), f"samples/step-{step:08d}.txt")
        elif self.name == "trackio":
            import trackio

            self._tracker.log({"samples": trackio.Table(columns=["step", "prompt", "text"], data=rows)}, step=step)

    def picture(self, path: Path, step: int) -> None:
        """Give it the PNG at `path`, where it can show one."""
        if self.failed:
            return
        try:
            if self.name == "tensorboard":
                from matplotlib.image import imread

                self._tracker.tracker.add_image(path.stem, imread(path), global_step=step, dataformats="HWC")
            elif self.name == "wandb":
                import wandb

                self._tracker.log({f"{path.stem}_picture": wandb.Image(str(path))}, step=step)
            elif self.name == "mlflow":
                self._tracker.log_artifact(str(path))
            elif self.name == "trackio":
                import trackio

                self._tracker.log({f"{path.stem}_picture": trackio.Image(str(path))}, step=step)
        except errors_of(self.name) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """A service that fails after the start must not cost the training; the next start makes up for what it misses."""
        self.failed = True
        logging.getLogger(__name__).warning(
            "`log.trackers`: %s has failed and gets nothing more of this run: %s. metrics.jsonl has every step; when the run is "
            "started again, the tracker gets what it has missed",
            self.name,
            one_line(error),
        )

    def finish(self) -> None:
        if self.failed:
            return
        try:
            self._tracker.finish()
            self._ended_well = True
        except errors_of(self.name) as error:  # at the latest here TensorBoard says that it could not write
            self._give_up(error)


def _unless_tensorboards(say: Callable[[threading.ExceptHookArgs], object], failed: threading.ExceptHookArgs) -> None:
    """An error of TensorBoard's writing thread needs no traceback: the next call raises it again, and it is told in a line."""
    if not type(failed.thread).__module__.startswith("tensorboard."):
        say(failed)


def does_not_start(name: str, error: Exception, kept_in: Path) -> InputError:
    """One message for what a service refuses after all: a key that it does not know, a run that it no longer has."""
    remedy = "`wandb login` again, or WANDB_MODE=offline" if name == "wandb" else "mend that, or take it out"
    again = f". To begin another run there, remove {kept_in}" if kept_in.exists() else ""
    return InputError(f"`log.trackers`: {name} does not start: {one_line(error, 500)}; {remedy}{again}")
