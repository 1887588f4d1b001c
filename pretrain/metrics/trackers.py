"""Log the records of a run to `metrics.jsonl` and to Accelerate's trackers.

`metrics.jsonl` has one JSON object per line. It contains every step exactly once, even if the run
was stopped and resumed several times. After a resume, W&B continues the run whose identifier is in
`trackers.json` in the run folder, and trackio continues the run with the folder's name. If the run
was killed, the resumed run repeats the steps after its last checkpoint, and a tracker may still
show the first values of these steps. A tracker that fails during the run receives no more records,
and the training continues.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    TensorBoardTracker,
    WandBTracker,
    get_available_trackers,
)

from foundation.errors import InputError, as_input_error, one_line
from foundation.files import replace_file, without_links, write_json
from foundation.settings import flatten
from pretrain.metrics.run_folder import METRICS_FILE, STATISTICS_FILE, TRACKERS_FILE
from pretrain.settings.recipe import LogSettings


class JsonlTracker:
    """Writer of a JSON lines file.

    The file is flushed after each line. If the run is killed while it writes a line, only this line
    is incomplete. `start` removes an incomplete last line. Only the main process calls `start`. On
    other processes the other methods do nothing.

    Args:
        path: The file.
        resumed_step: Step of the checkpoint that the run continues from, or 0 for a new run.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
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
            content = self.path.read_bytes() if self.path.exists() else b""
            lines = content.splitlines(keepends=True)
            complete = [line for line in lines if line.endswith(b"\n")]
            kept = [line for line in complete if json.loads(line)["step"] <= self.resumed_step]
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
            with suppress(OSError):
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

    def __init__(self, log: LogSettings, run_dir: Path, resumed_step: int) -> None:
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
        scalars = flatten(config)
        for key, value in scalars.items():
            if not isinstance(value, int | float | str):
                scalars[key] = json.dumps(value, default=str)
        for name in dict.fromkeys(self._log.trackers):
            if name == "jsonl":
                continue
            try:
                tracker = self._make(name)
                tracker.start()
                self.services[name] = tracker
                tracker.store_init_configuration(scalars)
            except Exception as error:  # every tracker has its own exception classes
                raise InputError(
                    f"`log.trackers`: {name} does not start: {_describe(error)}; either fix this "
                    f"problem, or remove {name} from the list"
                ) from None

    def _make(self, name: str) -> GeneralTracker:
        """Create and return the tracker `name`."""
        if name == "tensorboard":
            # TensorBoard hides steps that were logged after the checkpoint of a resumed run.
            resumed_step = self.file.resumed_step
            purge_step = resumed_step + 1 if resumed_step else None
            return TensorBoardTracker(name, self._run_dir, purge_step=purge_step)
        if name == "wandb":
            options = {"dir": str(self._run_dir), "name": self._run_dir.name}
            # In a W&B sweep, the sweep's agent has set the identifier of the run. Remove an empty
            # identifier, which a script may have set, because W&B refuses it.
            if not os.environ.get("WANDB_RUN_ID"):
                os.environ.pop("WANDB_RUN_ID", None)
                options |= {"id": self._run_id(), "resume": "allow"}
            return WandBTracker(self._log.project, **options)
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        if name == "trackio":
            resume = "allow" if self.file.resumed_step else "never"
            return tracker_class(self._log.project, name=self._run_dir.name, resume=resume)
        if tracker_class.requires_logging_directory:
            return tracker_class(self._log.project, self._run_dir)
        return tracker_class(self._log.project)

    def _run_id(self) -> str:
        """Return the identifier of this run in W&B. A resumed run keeps its identifier.

        The identifier is stored in `trackers.json`.
        """
        path = self._run_dir / TRACKERS_FILE
        if not (self.file.resumed_step and path.exists()):
            write_json(path, {"run": secrets.token_hex(4)})
        return json.loads(path.read_bytes())["run"]

    def log(self, record: Mapping[str, Any]) -> None:
        """Log a step or an event to `metrics.jsonl` and to the trackers.

        `metrics.jsonl` receives the complete record. The trackers receive the numbers in the record
        of a step or an evaluation. W&B and TensorBoard also receive generated samples as text. The
        text of a sample begins with its prompt. Trackers do not receive other events.
        """
        self.file.log(record)
        event = record.get("event")
        if event in (None, "evaluation"):  # the record of a step has no key "event"
            numbers = {
                key: value
                for key, value in record.items()
                if type(value) in (int, float) and key != "step"
            }
            self._send(self.services, numbers, record["step"])
        elif event == "samples":
            texts = {
                f"samples/{index}": f"{sample['prompt']}{sample['text']}"
                for index, sample in enumerate(record["samples"])
            }
            self._send({"wandb", "tensorboard"} & self.services.keys(), texts, record["step"])

    def _send(self, names: Iterable[str], values: Mapping[str, Any], step: int) -> None:
        """Log values to the trackers `names`."""
        for name in list(names):
            with self._removing_failed(name):
                self.services[name].log(values, step=step)

    @contextmanager
    def _removing_failed(self, name: str) -> Iterator[None]:
        """Context manager that logs an exception as a warning, and then removes the tracker."""
        try:
            yield
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
            with self._removing_failed(name):
                self.services[name].finish()


def check_trackers(log: LogSettings) -> None:
    """Raise InputError if a tracker is not installed, or if Accelerate does not support it."""
    available = {"jsonl", *map(str, get_available_trackers())}
    for name in log.trackers:
        if name in available:
            continue
        remedy = f"choose from {', '.join(sorted(available))}"
        if name not in LOGGER_TYPE_TO_CLASS:
            raise InputError(f"`log.trackers`: {name!r} is no tracker of Accelerate; {remedy}")
        raise InputError(
            f"`log.trackers`: the tracker {name!r} is not installed; run `pip install "
            f"{name.replace('_', '-')}`, or {remedy}"
        )


def _describe(error: Exception) -> str:
    """Return the class and the message of an error on one line.

    Passwords and query strings are removed from URLs in the message.
    """
    secret = r"(?<=//)[^/\s]*@|\?[^\s\"')]*=[^\s\"')]*"
    return re.sub(secret, "", one_line(error, named=True))
