"""Log the records of a run to `metrics.jsonl` and to accelerate's trackers.

`metrics.jsonl` has one JSON object per line, and every step exactly once, however often the run is
stopped and resumed. W&B and trackio continue the run that `trackers.json` in the run folder names.
After a resume or a kill, a tracker may still show steps that the run has repeated. A tracker that
fails during the run gets no more records, and the training continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import traceback
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

# Common names of keys in `metrics.jsonl`. Trackers get the values under both names.
OTHER_NAMES = {
    "mfu": "mfu_bf16_peak",
    "throughput_per_sec": "tokens_per_second",
    "grad_norm": "gradient_norm",
}
# Variables that make MLflow write to a folder. Its default is a database, which `mlflow-skinny`
# cannot open.
MLFLOW_IN_A_FOLDER = {"MLFLOW_TRACKING_URI": "mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
# Errors of trackers that do not stop the run. A canceled task is not an Exception.
FAILURES = (Exception, asyncio.CancelledError)


class JsonlTracker:
    """Writer of the JSON lines file at `path`.

    The file is flushed after each line. A killed run loses at most the line that it was writing,
    and `start` removes that line. Only the main process writes. On other processes all methods do
    nothing.
    """

    def __init__(self, path: Path, resumed_step: int = 0, *, main_process: bool = True) -> None:
        self.path = path
        self.resumed_step = resumed_step
        self.main_process = main_process
        self._file: TextIO | None = None

    def start(self) -> None:
        """Open the file to append, after removing steps later than the resumed checkpoint.

        An incomplete last line is removed too.
        """
        if not self.main_process:
            return
        with refusing(
            (OSError, ValueError), f"{self.path}: cannot be read or written", "move it away"
        ):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
            kept = [
                line
                for line in lines
                if line.endswith(b"\n") and json.loads(line)["step"] <= self.resumed_step
            ]
            if len(kept) < len(lines):
                replace_file(self.path, b"".join(kept))
            self._file = self.path.open("a", encoding="utf-8")

    def log(self, values: Mapping[str, Any]) -> None:
        """Append `values`, which contain the step. Infinity and NaN become null, as in JSON."""
        if self._file is None:
            return
        finite = json.loads(json.dumps(values), parse_constant=lambda _: None)
        try:
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        except OSError as error:
            # Closing fails too, because it flushes. The next start removes a partial line.
            with contextlib.suppress(OSError):
                self._file.close()
            raise InputError(
                f"{self.path}: cannot be written: {error.strerror}; checkpoints are not affected. "
                "Free disk space, then start again"
            ) from None

    def finish(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


class Trackers:
    """The `metrics.jsonl` of a run and the trackers in `log.trackers`.

    Only the main process writes to them.
    """

    def __init__(
        self, log: LogSettings, run_dir: Path, resumed_step: int = 0, *, main_process: bool = True
    ) -> None:
        self.file = JsonlTracker(run_dir / METRICS_FILE, resumed_step, main_process=main_process)
        # Trackers that have started and have not failed, by name.
        self.services: dict[str, GeneralTracker] = {}
        self._log = log
        self._run_dir = run_dir

    def start(self, config: Mapping[str, Any]) -> None:
        """Start all trackers, and pass `config` to them as flat `section.key` pairs.

        An Accelerator must exist, because accelerate's trackers read its state. Raises InputError
        if a tracker does not start.
        """
        self.file.start()
        names = [name for name in self._log.trackers if name != "jsonl" and self.file.main_process]
        run_id = self._run_id() if names else ""
        scalars = {
            key: value if isinstance(value, int | float | str) else json.dumps(value, default=str)
            for key, value in flatten(config).items()
        }
        for name in names:
            try:
                self.services[name] = self._make(name, run_id)
                self.services[name].start()
                self.services[name].store_init_configuration(scalars)
            except FAILURES as error:  # each tracker raises its own classes
                raise InputError(
                    f"`log.trackers`: {name} does not start: {_describe(error)}; fix that, or "
                    "remove it from the list"
                ) from None

    def _run_id(self) -> str:
        """Return the identifier of this run for trackers. A resumed run keeps its identifier."""
        path = self._run_dir / TRACKERS_FILE
        if not (self.file.resumed_step and path.exists()):
            write_json(path, {"run": secrets.token_hex(4)})
        return json.loads(path.read_bytes())["run"]

    def _make(self, name: str, run_id: str) -> GeneralTracker:
        """Create the tracker `name`. It continues the run of an earlier start if it can."""
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        title = self._run_dir.name
        resumed_step = self.file.resumed_step
        by_name: dict[str, dict[str, Any]] = {
            # Purge what was logged after the resumed checkpoint.
            "tensorboard": {"purge_step": resumed_step + 1 if resumed_step else None},
            "wandb": {"dir": str(self._run_dir), "name": title},
            # trackio finds a run to resume by its name.
            "trackio": {"name": f"{title}-{run_id}", "resume": "allow"},
            "mlflow": {"run_name": title},
        }
        options = by_name.get(name, {})
        # The agent of a sweep sets the identifier itself.
        is_in_sweep = os.environ.get("WANDB_SWEEP_ID") or os.environ.get("WANDB_RUN_ID")
        if name == "wandb" and not is_in_sweep:
            options |= {"id": run_id, "resume": "allow"}
        if name == "mlflow" and "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.update(MLFLOW_IN_A_FOLDER)
        # TensorBoard's files are in a folder of this name.
        project = name if name == "tensorboard" else self._log.project
        folder = [self._run_dir] if tracker_class.requires_logging_directory else []
        return tracker_class(project, *folder, **options)

    def log(self, record: Mapping[str, Any]) -> None:
        """Log `record` to `metrics.jsonl`, and the parts that trackers can show to the trackers.

        All trackers get the numbers of a step or an evaluation. W&B and TensorBoard also get
        samples as text, each with its prompt.
        """
        self.file.log(record)
        texts = {
            f"samples/{index}": f"{sample['prompt']}{sample['text']}"
            for index, sample in enumerate(record.get("samples", ()))
        }
        numbers = {
            key: value
            for key, value in record.items()
            if type(value) in (int, float) and key != "step"
        }
        numbers |= {other: numbers[key] for other, key in OTHER_NAMES.items() if key in numbers}
        for name in list(self.services):
            if record.get("event", "evaluation") == "evaluation":
                self._call(name, "log", numbers, step=record["step"])
            elif texts and name in ("wandb", "tensorboard"):
                self._call(name, "log", texts, step=record["step"])

    def _call(self, name: str, method: str, *arguments: Any, **options: Any) -> None:
        """Call a method of a tracker. If it fails, warn and do not use the tracker again."""
        try:
            getattr(self.services[name], method)(*arguments, **options)
        except FAILURES as error:  # each tracker raises its own classes
            del self.services[name]
            logging.getLogger(__name__).warning(
                "`log.trackers`: %s has failed and gets nothing more until the next start: %s",
                name,
                _describe(error),
            )

    def finish(self) -> None:
        """Close `metrics.jsonl` and finish all trackers."""
        self.file.finish()
        for name in list(self.services):
            self._call(name, "finish")


def check_trackers(log: LogSettings) -> None:
    """Raise InputError for a tracker that accelerate does not know or that is not installed."""
    for name in sorted({*log.trackers} - {"jsonl"}):
        if name not in LOGGER_TYPE_TO_CLASS:
            raise InputError(
                f"`log.trackers`: there is no tracker {name!r}; use one of "
                f"{', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
            )
        if name not in map(str, get_available_trackers()):
            raise InputError(
                f"`log.trackers`: {name!r} is not installed; `pip install "
                f"{name.replace('_', '-')}`, or remove it from the list"
            )


def _describe(error: BaseException) -> str:
    """Return the class and the message of an error, without passwords and queries in URLs."""
    # `str(error)` of a tracker's own class may raise an error.
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    secret = r"(?<=//)[^/\s]*@|\?[^\s\"')]*=[^\s\"')]*"
    return re.sub(secret, "", text)[:300]
