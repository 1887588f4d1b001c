"""Log the records of a run to `metrics.jsonl` and to Accelerate's trackers.

`metrics.jsonl` has one JSON object per line. It contains every step exactly once, even if the run
was stopped and resumed several times. After a resume, W&B and trackio continue the run whose
identifier is in `trackers.json` in the run folder. If the run was killed, the resumed run repeats
the steps after its last checkpoint, and a tracker may still show the first values of these steps.
A tracker that fails during the run receives no more records, and the training continues.
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

from foundation.errors import InputError, as_input_error
from foundation.files import replace_file, without_links, write_json
from foundation.settings import flatten
from pretrain.metrics.run_folder import METRICS_FILE, STATISTICS_FILE, TRACKERS_FILE
from pretrain.settings.recipe import LogSettings

# Map names that are common in other projects to keys of `metrics.jsonl`. Trackers receive the value
# under both names.
OTHER_NAMES = {
    "mfu": "mfu_bf16_peak",
    "throughput_per_sec": "tokens_per_second",
    "grad_norm": "gradient_norm",
}


class JsonlTracker:
    """Writer of a JSON lines file.

    The file is flushed after each line. If the run is killed while it writes a line, only this line
    is incomplete. `start` removes an incomplete last line. Only the main process calls `start`. On
    other processes the other methods do nothing.

    Args:
        path: The file.
        resumed_step: Step of the checkpoint that the run continues from, or 0 for a new run.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        self.path = path
        self.resumed_step = resumed_step
        self._file: TextIO | None = None

    def start(self) -> None:
        """Open the file for appending.

        First remove all lines of steps after the resumed checkpoint, and an incomplete last line.
        """
        with as_input_error(
            (OSError, ValueError, LookupError, TypeError),
            f"{self.path}: cannot be read or written",
            "move the file away",
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
            self._file = open(  # noqa: SIM115
                self.path, "a", opener=without_links, encoding="utf-8"
            )

    def log(self, values: Mapping[str, Any]) -> None:
        """Append `values` as one line. They must contain the key `step`.

        Infinity and NaN are written as null, because JSON has no numbers for them.
        """
        if self._file is None:
            return
        finite = json.loads(json.dumps(values), parse_constant=lambda _: None)
        try:
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        except OSError as error:
            # `close` raises the error again, because it flushes the buffer. The next start removes
            # the incomplete line.
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
    """The files of a run with a line per step, and the trackers that `log.trackers` lists.

    Only the main process calls `start`. On other processes the other methods do nothing.
    """

    def __init__(self, log: LogSettings, run_dir: Path, resumed_step: int = 0) -> None:
        self.file = JsonlTracker(run_dir / METRICS_FILE, resumed_step)
        # The statistics of operands. `OperandWatch` needs this file, so its maker starts it.
        self.statistics = JsonlTracker(run_dir / STATISTICS_FILE, resumed_step)
        # Map names to trackers that have started and have not failed.
        self.services: dict[str, GeneralTracker] = {}
        self._log = log
        self._run_dir = run_dir

    def start(self, config: Mapping[str, Any]) -> None:
        """Start all trackers, and log `config` to them as flat `section.key` pairs.

        An Accelerator must have been created before, because Accelerate's trackers read its state.
        Raises InputError if a tracker does not start.
        """
        self.file.start()
        names = [name for name in dict.fromkeys(self._log.trackers) if name != "jsonl"]
        if not names:
            return
        run_id = self._run_id()
        scalars = {
            key: value if isinstance(value, int | float | str) else json.dumps(value, default=str)
            for key, value in flatten(config).items()
        }
        for name in names:
            try:
                self.services[name] = self._make(name, run_id)
                self.services[name].start()
                self.services[name].store_init_configuration(scalars)
            except Exception as error:  # every tracker has its own exception classes
                raise InputError(
                    f"`log.trackers`: {name} does not start: {_describe(error)}; either fix this "
                    f"problem, or remove {name} from the list"
                ) from None

    def _run_id(self) -> str:
        """Return the identifier of this run in trackers. A resumed run keeps its identifier.

        The identifier is stored in `trackers.json`.
        """
        path = self._run_dir / TRACKERS_FILE
        if not (self.file.resumed_step and path.exists()):
            write_json(path, {"run": secrets.token_hex(4)})
        return json.loads(path.read_bytes())["run"]

    def _make(self, name: str, run_id: str) -> GeneralTracker:
        """Create and return the tracker `name`.

        If the run is resumed, the trackers of W&B and trackio add to the curves that the run has
        logged before. They find these curves by `run_id`.
        """
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        title = self._run_dir.name
        resumed_step = self.file.resumed_step
        # In a W&B sweep, the sweep's agent has set the identifier of the run.
        is_in_sweep = os.environ.get("WANDB_SWEEP_ID") or os.environ.get("WANDB_RUN_ID")
        resumes = {} if is_in_sweep else {"id": run_id, "resume": "allow"}
        options: dict[str, dict[str, Any]] = {
            # For a resumed run, TensorBoard hides steps that were logged after the checkpoint.
            "tensorboard": {"purge_step": resumed_step + 1 if resumed_step else None},
            "wandb": {"dir": str(self._run_dir), "name": title, **resumes},
            # trackio resumes the run that has this name.
            "trackio": {"name": f"{title}-{run_id}", "resume": "allow"},
            "mlflow": {"run_name": title},
        }
        # TensorBoard writes its files to a folder with the name of the project.
        project = name if name == "tensorboard" else self._log.project
        folder = [self._run_dir] if tracker_class.requires_logging_directory else []
        return tracker_class(project, *folder, **options.get(name, {}))

    def log(self, record: Mapping[str, Any]) -> None:
        """Log a step or an event to `metrics.jsonl` and to the trackers.

        `metrics.jsonl` receives the complete record. The trackers receive the numbers in the record
        of a step or an evaluation. W&B and TensorBoard also receive generated samples as text. The
        text of a sample begins with its prompt. Trackers do not receive other events.
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
        # The names are copied into a list, because `_call` removes a tracker that fails.
        for name in list(self.services):
            # The record of a step has no key "event".
            if record.get("event", "step") in ("step", "evaluation"):
                self._call(name, "log", numbers, step=record["step"])
            elif texts and name in ("wandb", "tensorboard"):
                self._call(name, "log", texts, step=record["step"])

    def _call(self, name: str, method: str, *arguments: Any, **options: Any) -> None:
        """Call `method` of the tracker `name` with the given arguments.

        If the call fails, log a warning and remove the tracker from `services`.
        """
        try:
            getattr(self.services[name], method)(*arguments, **options)
        except Exception as error:  # every tracker has its own exception classes
            del self.services[name]
            logging.getLogger(__name__).warning(
                "`log.trackers`: %s has failed and receives no more records until the run is "
                "started again: %s",
                name,
                _describe(error),
            )

    def finish(self) -> None:
        """Close the files and finish all trackers."""
        self.file.finish()
        self.statistics.finish()
        for name in list(self.services):
            self._call(name, "finish")


def check_trackers(log: LogSettings) -> None:
    """Raise InputError if a tracker is not installed, or if Accelerate does not support it."""
    for name in sorted({*log.trackers} - {"jsonl"}):
        if name not in LOGGER_TYPE_TO_CLASS:
            raise InputError(
                f"`log.trackers`: there is no tracker {name!r}; choose one of "
                f"{', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
            )
        if name not in map(str, get_available_trackers()):
            raise InputError(
                f"`log.trackers`: {name!r} is not installed; either run `pip install "
                f"{name.replace('_', '-')}`, or remove {name!r} from the list"
            )


def _describe(error: Exception) -> str:
    """Return the class and the message of an error on one line.

    Passwords and query strings are removed from URLs in the message.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    secret = r"(?<=//)[^/\s]*@|\?[^\s\"')]*=[^\s\"')]*"
    return re.sub(secret, "", text)[:300]
