"""What a run folder says of its run, read from its files alone: no torch, so it is quick, and works while the run is going."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foundation.errors import InputError
from foundation.settings import load_yaml
from pretrain.metrics.summary import is_evaluation, summary

MATRIX_FILE = "matrix.json"  # in the run folder of a cell, left there by `pretrain.compare.matrix`


@dataclass(frozen=True)
class RunRecord:
    """What the files of a run folder hold, of a run finished or still going. `summary` is as of the last step written."""

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    audit: dict[str, Any] = field(default_factory=dict)
    matrix: dict[str, Any] = field(default_factory=dict)  # empty for a run that is no cell of one

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps int64, values float64) of a key of the steps; NaN, a gap in a line, where the value is not known."""
        return _curve([record for record in self.metrics if not is_evaluation(record)], key)

    def held_out_curve(self) -> tuple[np.ndarray, np.ndarray]:
        """(steps int64, held-out losses float64) of the evaluations."""
        return _curve([record for record in self.metrics if is_evaluation(record)], "held_out_loss")

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def data_fingerprint(self) -> str | None:
        """Identity of the packs trained on: in the summary of a finished run, and in the environment from its start."""
        return self.summary.get("data_fingerprint", self.environment.get("data_fingerprint"))

    @property
    def tokens_per_step(self) -> int | None:
        return self.summary.get("tokens_per_step", self.config.get("batch", {}).get("tokens"))

    @property
    def precision(self) -> str | None:
        """The precision recipe; where the device made it fall back to another, both."""
        requested = self.config.get("precision")
        effective = self.audit.get("effective", requested)
        return requested if effective == requested else f"{requested} (ran {effective})"

    @property
    def backend(self) -> str | None:
        """What computed the products: "torch", "transformer_engine" or "emulation"."""
        return self.audit.get("backend")

    @property
    def emulated(self) -> bool:
        """Whether the precision was computed in software: its losses are the format's, its speed is not the hardware's."""
        return self.backend == "emulation"

    @property
    def side_by_side(self) -> bool:
        """Whether any part of it shared the machine with other cells of a matrix, so that its speed is not its own."""
        return bool(self.matrix.get("side_by_side", False))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The objects of `run_dir`/metrics.jsonl, steps and evaluations as written; a last line still being written is left out.

    Raises InputError where there is no such file, or a line of it is not an object with a step.
    """
    path = run_dir / "metrics.jsonl"
    *lines, _unfinished = _read(path).split("\n")
    records = [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    for number, record in enumerate(records, start=1):
        if "step" not in record:
            raise InputError(f"{path}, line {number}: has no `step`; this is not a file of metrics")
    return records


def read_run(run_dir: Path) -> RunRecord:
    """Read a whole run folder. All figures come from the metrics; `summary.json`, written at the end, adds the run's identity.

    Raises InputError naming the file that is missing, empty or damaged.
    """
    if not run_dir.is_dir():
        raise InputError(f"{run_dir}: there is no such run folder")
    metrics = read_metrics(run_dir)
    if not metrics:
        raise InputError(f"{run_dir / 'metrics.jsonl'}: holds no step yet; wait for the run's first")
    return RunRecord(
        path=run_dir,
        config=load_yaml(run_dir / "config.yaml"),
        environment=_read_object(run_dir / "environment.json"),
        metrics=metrics,
        summary=_read_object(run_dir / "summary.json") | summary(metrics),  # the metrics are newer, if the run was prolonged
        audit=_read_object(run_dir / "audit.json"),
        matrix=_read_object(run_dir / MATRIX_FILE),
    )


def _curve(records: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    values = [math.nan if record.get(key) is None else record[key] for record in records]
    return np.array([record["step"] for record in records], dtype=np.int64), np.array(values, dtype=np.float64)


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where the run has not written it yet."""
    return _parse(_read(path), str(path)) if path.exists() else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file; {path.parent} is not a run folder, or its run has not begun") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError(f"{origin}: not valid JSON: {error}; resuming the run mends its metrics") from None
    if not isinstance(value, dict):
        raise InputError(f"{origin}: a JSON object is wanted, here is {type(value).__name__}")
    return value
