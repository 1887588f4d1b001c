"""The result file of the evidence: of each run what it was, its curves and what its model is worth. Works without torch.

A run that stands in the file is not trained again, also where its folder is gone. The file is written whenever a run has been
measured, as the machine may go at any time. `python -m pretrain report` reads it as it reads run folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.collect_runs import figures
from foundation.errors import InputError
from foundation.files import replace_file
from foundation.reading import load_object
from pretrain.compare.matrix_file import CELL, Matrix, MatrixRun
from pretrain.metrics.run_record import is_evaluation, read_metrics, read_run
from pretrain.settings.config import flatten, resolved

_NAMES = ("name", "run_dir")  # different in each run, and no part of what is compared
_HEAD = ("scale", "parameters", "tokens", "command", "environment", "settings")
BETWEEN = "between_baseline_seeds"


def key_of(run: MatrixRun) -> str:
    """What a run is called in the file: `delayed-seed1`."""
    return f"{run.values[CELL]}-seed{run.recipe.seed}"


def check_named(matrix: Matrix) -> None:
    """InputError where cells have no names, or two of them share one under one seed."""
    if unnamed := [run.name for run in matrix.runs if CELL not in run.values]:
        raise InputError(f"{matrix.path}: {unnamed[0]} has no name; list the cells in `groups`, each with a name")
    keys = [key_of(run) for run in matrix.runs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise InputError(f"{matrix.path}: there are two {twice[0]}; cells of one name differ in `seed` alone")


def baseline_of(matrix: Matrix, run: MatrixRun) -> MatrixRun | None:
    """The run of the baseline's cell with the seed of `run`; None where there is none."""
    cell = matrix.baseline.values[CELL]
    return next((one for one in matrix.runs if one.values[CELL] == cell and one.recipe.seed == run.recipe.seed), None)


class Results:
    """The file at `path`, as far as it goes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {}
        if path.exists():
            self.content = load_object(path, "name another file, or move it away")
            if not isinstance(self.content.get("runs"), dict):
                raise InputError(f"{path}: holds no runs of `benchmarks.evidence`; name another file, or move it away")

    @property
    def runs(self) -> dict[str, Any]:
        return self.content.setdefault("runs", {})

    @property
    def pairs(self) -> list[dict[str, Any]]:
        return self.content.setdefault(BETWEEN, [])

    def lacking(self, runs: Iterable[MatrixRun]) -> list[MatrixRun]:
        return [run for run in runs if key_of(run) not in self.runs]

    def add(self, run: MatrixRun, endpoints: Mapping[str, Any]) -> None:
        settings = flatten(read_run(run.run_dir).config)
        shared = self.content["settings"]
        own = {key: value for key, value in settings.items() if key not in _NAMES and (key, value) not in shared.items()}
        self.runs[key_of(run)] = record_of(run, own, endpoints)

    def begin(self, matrix: Matrix, run: MatrixRun, *, scale: str, command: str, parameters: int) -> None:
        """What is said once, by the first run that is measured."""
        if "settings" in self.content:
            return
        flat = [flatten(resolved(each.recipe)) for each in matrix.runs]
        differ = {key for each in flat for key in each if any(key not in other or other[key] != each[key] for other in flat)}
        config = flatten(read_run(run.run_dir).config)
        environment = json.loads((run.run_dir / "environment.json").read_text(encoding="utf-8"))
        summary = read_run(run.run_dir).summary
        values = (scale, parameters, summary["steps"] * run.recipe.batch.tokens, command, environment)
        settings = {key: value for key, value in config.items() if key not in differ and key not in _NAMES}
        self.content = {**dict(zip(_HEAD, (*values, settings), strict=True)), "runs": {}, BETWEEN: []}

    def write(self, order: Sequence[str]) -> None:
        """Each run in a line of its own, in `order`."""
        place = {key: number for number, key in enumerate(order)}
        runs = sorted(self.runs.items(), key=lambda item: place.get(item[0], len(place)))
        head = [f'"{key}": {json.dumps(value)}' for key, value in self.content.items() if key not in ("runs", BETWEEN)]
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(run)}" for key, run in runs)
        parts = [*head, f'"runs": {{\n{lines}\n }}', f'"{BETWEEN}": {json.dumps(self.pairs)}']
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, ("{\n " + ",\n ".join(parts) + "\n}\n").encode())


def record_of(run: MatrixRun, settings: dict[str, Any], endpoints: Mapping[str, Any]) -> dict[str, Any]:
    """`settings`: those in which it differs from what all share."""
    kept = figures(run.run_dir, settings)
    environment = json.loads((run.run_dir / "environment.json").read_text(encoding="utf-8"))
    ended = datetime.fromtimestamp((run.run_dir / "summary.json").stat().st_mtime, UTC)
    return {
        "cell": run.values[CELL],
        "seed": run.recipe.seed,
        "commit": (environment.get("git") or {}).get("commit"),
        "date": ended.strftime("%Y-%m-%d %H:%M"),
        "settings": kept["settings"],
        "audit": kept["audit"],
        "summary": kept["summary"],
        "losses": rounded(kept["losses"]),
        "gradient_norms": rounded(kept["gradient_norms"]),
        "evaluations": [
            {"step": record["step"], "tokens": record["step"] * run.recipe.batch.tokens}
            | {key: value for key, value in record.items() if key.split("/")[0] == "held_out_loss"}
            for record in filter(is_evaluation, read_metrics(run.run_dir))
        ],
        "endpoints": dict(endpoints),
    }


def rounded(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 5) for value in values]
