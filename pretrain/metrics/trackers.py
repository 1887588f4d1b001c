"""Where a step's figures go: `metrics.jsonl`, one JSON object a line, and any of accelerate's trackers by name.

`metrics.jsonl` holds every step exactly once, however often the training is stopped and started. W&B and trackio go on with the
run that `trackers.json` in the run folder names; what a service shows after a resume or a kill is its own business. A service
that fails while the run trains gets nothing more, and costs the training nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from foundation.errors import InputError
from foundation.files import replace_file, write_json
from foundation.reading import refusing
from pretrain.metrics.run_folder import METRICS_FILE, TRACKERS_FILE
from pretrain.settings.config import flatten
from pretrain.settings.recipe import LogSettings

# How the field calls what has another name in `metrics.jsonl`. Trackers get both.
OTHER_NAMES = {
    "mfu": "mfu_bf16_peak",
    "throughput_per_sec": "tokens_per_second",
    "grad_norm": "gradient_norm",
}
# MLflow's own default is a database, which `mlflow-skinny` cannot open: a folder, unless the user names a place.
MLFLOW_IN_A_FOLDER = {"MLFLOW_TRACKING_URI": "mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}


class JsonlTracker:
    """The file at `path`, flushed at each line: a killed run loses at most the line it was writing, which `start` removes. On
    processes other than the main one every call does nothing."""

    def __init__(self, path: Path, resumed_step: int = 0, *, main_process: bool = True) -> None:
        self.path = path
        self.resumed_step = resumed_step
        self.main_process = main_process
        self._file: TextIO | None = None

    def start(self) -> None:
        """Remove the steps after the resumed checkpoint's from the file, and a last line that is not whole; open it to append."""
        if not self.main_process:
            return
        with refusing(
            (OSError, ValueError), f"{self.path}: cannot be read or written", "move it away"
        ):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
            whole = [
                line
                for line in lines
                if line.endswith(b"\n") and json.loads(line)["step"] <= self.resumed_step
            ]
            if len(whole) < len(lines):
                replace_file(self.path, b"".join(whole))
            self._file = self.path.open("a", encoding="utf-8")

    def log(self, values: Mapping[str, Any]) -> None:
        """Write `values`, which hold their own `step`; JSON has no infinity and no not-a-number, so these become null."""
        if self._file is None:
            return
        finite = json.loads(json.dumps(values), parse_constant=lambda _: None)
        try:
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        except OSError as error:
            # it cannot flush either; the next start removes a part of a line
            with contextlib.suppress(OSError):
                self._file.close()
            raise InputError(
                f"{self.path}: cannot be written: {error.strerror}; checkpoints are untouched. Free space, then start again"
            ) from None

    def finish(self) -> None:
        if self._file:
            self._file.close()

    def go_back(self, step: int) -> None:
        """Take the steps after `step` out of the file, and go on after it."""
        self.finish()
        self.resumed_step = step
        self.start()


class Trackers:
    """The `metrics.jsonl` of one run, and the services that `log` names. Only the main process has any."""

    def __init__(
        self, log: LogSettings, run_dir: Path, resumed_step: int = 0, *, main_process: bool = True
    ) -> None:
        self.file = JsonlTracker(run_dir / METRICS_FILE, resumed_step, main_process=main_process)
        # by name, those that have started and have not failed
        self.services: dict[str, GeneralTracker] = {}
        self._log, self._run_dir = log, run_dir

    def start(self, config: Mapping[str, Any]) -> None:
        """Open all of them, and hand `config` over to services as flat `section.key` pairs. InputError where one refuses.
        Accelerate's trackers want its state to exist: make the Accelerator first."""
        self.file.start()
        names = [name for name in self._log.trackers if name != "jsonl" and self.file.main_process]
        run_id = self._run_id() if names else ""
        flat = flatten(config).items()
        scalars = {
            key: each if isinstance(each, int | float | str) else json.dumps(each, default=str)
            for key, each in flat
        }
        for name in names:
            try:
                self.services[name] = service = self._make(name, run_id)
                service.start()
                service.store_init_configuration(scalars)
            except Exception as error:  # each service has classes of its own
                raise InputError(
                    f"`log.trackers`: {name} does not start: {_said(error)}; mend that, or take it out"
                ) from None

    def _run_id(self) -> str:
        """What services know the run by: a new name, or, where it resumes, the one that it had."""
        path = self._run_dir / TRACKERS_FILE
        if not (self.file.resumed_step and path.exists()):
            write_json(path, {"run": secrets.token_hex(4)})
        return json.loads(path.read_bytes())["run"]

    def _make(self, name: str, run_id: str) -> GeneralTracker:
        """The tracker `name`, which goes on with the run of an earlier start where the service can."""
        make, title, resumed_step, options = (
            LOGGER_TYPE_TO_CLASS[name],
            self._run_dir.name,
            self.file.resumed_step,
            {},
        )
        # a sweep's agent names the run itself
        named = os.environ.get("WANDB_SWEEP_ID") or os.environ.get("WANDB_RUN_ID")
        # in a folder in the run's; what was logged beyond the checkpoint goes
        if name == "tensorboard":
            return make(
                "tensorboard", self._run_dir, purge_step=resumed_step + 1 if resumed_step else None
            )
        if name == "wandb":
            resumes = {} if named else {"id": run_id, "resume": "allow"}
            options = {"dir": str(self._run_dir), "name": title} | resumes
        elif name == "trackio":  # it finds a run by its name alone
            options = {"name": f"{title}-{run_id}", "resume": "allow"}
        elif name == "mlflow":
            options = {"run_name": title}
            os.environ.update({} if "MLFLOW_TRACKING_URI" in os.environ else MLFLOW_IN_A_FOLDER)
        return make(
            self._log.project,
            *([self._run_dir] if make.requires_logging_directory else []),
            **options,
        )

    def log(self, record: Mapping[str, Any]) -> None:
        """Give `record`, a line of `metrics.jsonl`, to the file whole, and to the services what they can show of it: the numbers
        of a step or an evaluation; W&B and TensorBoard get samples as text, prompts and what the model wrote."""
        self.file.log(record)
        texts = {
            f"samples/{n}": f"{each['prompt']}{each['text']}"
            for n, each in enumerate(record.get("samples", ()))
        }
        numbers = {
            key: value
            for key, value in record.items()
            if type(value) in (int, float) and key != "step"
        }
        numbers |= {name: numbers[ours] for name, ours in OTHER_NAMES.items() if ours in numbers}
        for name in list(self.services):
            if record.get("event", "evaluation") == "evaluation":
                self._tell(name, "log", numbers, step=record["step"])
            elif texts and name in ("wandb", "tensorboard"):
                self._tell(name, "log", texts, step=record["step"])

    def _tell(self, name: str, method: str, *arguments: Any, **options: Any) -> None:
        """Call a method of a service; where it fails, say so once, and leave it alone from then on."""
        try:
            getattr(self.services[name], method)(*arguments, **options)
        except Exception as error:  # each service has classes of its own
            del self.services[name]
            logging.getLogger(__name__).warning(
                "`log.trackers`: %s has failed and gets nothing more until the next start: %s",
                name,
                _said(error),
            )

    def finish(self) -> None:
        self.file.finish()
        for name in list(self.services):
            self._tell(name, "finish")


def check_trackers(log: LogSettings) -> None:
    """InputError for a name that accelerate does not know, or whose package is missing."""
    for name in sorted({*log.trackers} - {"jsonl"}):
        if name not in LOGGER_TYPE_TO_CLASS:
            raise InputError(
                f"`log.trackers`: there is no tracker {name!r}; there are {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
            )
        if name not in map(str, get_available_trackers()):
            package = name.replace("_", "-")
            raise InputError(
                f"`log.trackers`: {name!r} is not installed; `pip install {package}`, or take it out"
            )


def _said(error: Exception) -> str:
    """Return the class and the message of an error, without passwords and queries of addresses."""
    secret = r"(?<=//)[^/\s]*@|\?[^\s\"')]*=[^\s\"')]*"
    return re.sub(secret, "", f"{type(error).__name__}: {error}")
