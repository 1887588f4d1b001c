"""The result file of the evidence: of each run what it was, its curves and what its model is worth. Works without torch.

A run that stands in the file is not trained again, also where its folder is gone. The file is written whenever a run has been
measured, as the machine may go at any time. `python -m pretrain report` reads it as it reads run folders.

Figures of two recipes, or of other held-out text, never come into one file: what stands there is held against the matrix first.
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
from foundation.integrity import hash_file
from foundation.locks import FileLock
from foundation.reading import load_object, reason_of
from pretrain.checkpoint.folders import step_folders
from pretrain.checkpoint.manifest import MANIFEST
from pretrain.compare.fairness import in_words, recipe_of
from pretrain.compare.kept_runs import read_kept
from pretrain.compare.matrix_file import CELL, Matrix, MatrixRun
from pretrain.metrics.run_record import RunRecord, gpus_of, is_evaluation, read_run
from pretrain.precision.schedule import is_quantized
from pretrain.settings.config import flatten, resolved
from pretrain.settings.recipe import Recipe

_NAMES = ("name", "run_dir")  # different in each run, and no part of what is compared
# No part of a training's identity, but of what is kept of it: the cells that differ in these alone.
_MEASURED = ("model.fused",)
_MEASURED_IF_QUANTIZED = ("fp8_config.backend",)
BETWEEN = "between_baseline_seeds"
_REMEDY = "name another file, or move it away"


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


def trained_otherwise(run: MatrixRun, found: Recipe) -> str:
    """Say in which settings a run of `found` is another than `run`, ours before its; empty where it is none."""
    ours, theirs = flatten(resolved(run.recipe)), flatten(resolved(found))
    keys = _MEASURED + (_MEASURED_IF_QUANTIZED if is_quantized(run.recipe.precision) else ())
    differ = run.unlike(found) | {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)}
    return in_words(differ)


class Results:
    """The file at `path`, as far as it goes; InputError for one that is something else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {}
        if not path.exists():
            return
        self.content = load_object(path, _REMEDY)
        runs = self.content.get("runs")
        if not isinstance(runs, dict) or not isinstance(self.content.get("settings"), dict) or "scale" not in self.content:
            raise InputError(f"{path}: holds no runs of `benchmarks.evidence`; {_REMEDY}")
        for key, run in runs.items():
            try:
                _ = run["endpoints"]["final"]["kl_to_baseline"], run["cell"], run["seed"]
            except (KeyError, TypeError):
                raise InputError(f"{path}: `runs`, {key}: not as `benchmarks.evidence` makes it; {_REMEDY}") from None

    def locked(self) -> FileLock:
        """Lock the file for writing; InputError where another process writes it, or it cannot be written."""

        def refuse(holder: str) -> None:
            raise InputError(f"{self.path}: is being written by {holder}; wait for it, or name another file")

        try:
            return FileLock(self.path.with_name(f".{self.path.name}.lock"), refuse)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {reason_of(error)}; name another file") from None

    def check(self, matrix: Matrix, scale: str) -> None:
        """InputError where the file is of another scale, or holds a run that was trained otherwise than the matrix says."""
        if not self.content:
            return
        if self.content["scale"] != scale:
            raise InputError(f"{self.path}: is of the scale {self.content['scale']}, not of {scale}; name another file")
        ours = {key_of(run): run for run in matrix.runs}
        for record in read_kept(self.path) if self.runs else ():
            run = ours.get(record.name)
            if run and (keys := trained_otherwise(run, recipe_of(record))):
                raise InputError(
                    f"{self.path}: {record.name} was trained otherwise than {matrix.path} says now (now, and then): {keys}; "
                    "name another file for what is trained now, or set it back"
                )

    @property
    def runs(self) -> dict[str, Any]:
        return self.content.setdefault("runs", {})

    @property
    def pairs(self) -> list[dict[str, Any]]:
        return self.content.setdefault(BETWEEN, [])

    def lacking(self, runs: Iterable[MatrixRun]) -> list[MatrixRun]:
        return [run for run in runs if key_of(run) not in self.runs]

    def has_halted(self, run: MatrixRun) -> bool:
        """Whether the file has `run` as one that came to no end."""
        return "halted" in self.runs.get(key_of(run), {}).get("summary", {})

    def check_fits(self, run: MatrixRun, held_out: str) -> None:
        """InputError where the folder of `run` is of another training, or its text is other text than what the file is of.
        `held_out`: the fingerprint of the text to be measured on."""
        record = read_run(run.run_dir)
        if keys := trained_otherwise(run, recipe_of(record)):
            remedy = f"set them back, or remove {run.run_dir} to train it again"
            raise InputError(f"{run.run_dir}: was trained with other settings (now, and then): {keys}; {remedy}")
        known = {each["summary"].get("data_fingerprint") for each in self.runs.values()} - {None, record.data_fingerprint}
        if known or self.content.get("held_out", held_out) != held_out:
            which = "trained on other text" if known else "measured on other held-out text"
            raise InputError(f"{self.path}: its runs were {which}; name another file, or prepare that text again")

    def add(self, run: MatrixRun, endpoints: Mapping[str, Any]) -> None:
        record = read_run(run.run_dir)
        shared = self.content["settings"]
        settings = flatten(record.config).items()
        own = {key: value for key, value in settings if key not in _NAMES and (key not in shared or shared[key] != value)}
        self.content["side_by_side"] = bool(self.content.get("side_by_side")) or record.side_by_side
        self.runs[key_of(run)] = kept_of(run, record, own, endpoints)

    def add_halted(self, run: MatrixRun) -> None:
        """A run that came to no end, of which there is no model to measure. It stands in the file, so that nobody takes the mean
        of its cell's other seeds for that of all."""
        self.add(
            run, {"before_decay": None, "final": {"held_out_loss": None, "last_word_accuracy": None, "kl_to_baseline": None}}
        )

    def begin(self, matrix: Matrix, run: MatrixRun, *, scale: str, command: str, parameters: int, held_out: str) -> None:
        """What is said once, by the first run that is measured."""
        if "settings" in self.content:
            return
        flat = [flatten(resolved(each.recipe)) for each in matrix.runs]
        differ = {key for each in flat for key in each if any(key not in other or other[key] != each[key] for other in flat)}
        record = read_run(run.run_dir)
        self.content = {
            "scale": scale,
            "parameters": parameters,
            "tokens": record.summary["steps"] * run.recipe.batch.tokens,
            "command": command,
            "side_by_side": record.side_by_side,
            "environment": record.environment,
            "held_out": held_out,
            "settings": {key: value for key, value in flatten(record.config).items() if key not in differ and key not in _NAMES},
            "runs": {},
            BETWEEN: [],
        }

    def write(self, order: Sequence[str]) -> None:
        """Each run in a line of its own, in `order`."""
        place = {key: number for number, key in enumerate(order)}
        runs = sorted(self.runs.items(), key=lambda item: place.get(item[0], len(place)))
        head = [f'"{key}": {json.dumps(value)}' for key, value in self.content.items() if key not in ("runs", BETWEEN)]
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(run)}" for key, run in runs)
        parts = [*head, f'"runs": {{\n{lines}\n }}', f'"{BETWEEN}": {json.dumps(self.pairs)}']
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, ("{\n " + ",\n ".join(parts) + "\n}\n").encode())


def hash_of(checkpoint: Path) -> str:
    """The SHA-256 of its manifest, which has those of its files. InputError where there is none."""
    return hash_file(checkpoint / MANIFEST, ["sha256"])["sha256"]


def kept_of(run: MatrixRun, record: RunRecord, settings: dict[str, Any], endpoints: Mapping[str, Any]) -> dict[str, Any]:
    """`settings`: those in which it differs from what all share."""
    kept, environment = figures(run.run_dir, settings), record.environment
    ended = datetime.fromtimestamp((run.run_dir / "metrics.jsonl").stat().st_mtime, UTC)
    return {
        "cell": run.values[CELL],
        "seed": run.recipe.seed,
        "commit": (environment.get("git") or {}).get("commit"),
        "machine": device_and_torch(environment),
        "date": ended.strftime("%Y-%m-%d %H:%M"),
        "began_with": run.begin and hash_of(run.begin),
        "checkpoints": {folder.name: hash_of(folder) for folder in step_folders(run.run_dir / "checkpoints")},
        "settings": kept["settings"],
        "audit": kept["audit"],
        "summary": kept["summary"],
        "losses": rounded(kept["losses"]),
        "gradient_norms": rounded(kept["gradient_norms"]),
        "evaluations": [
            {"step": each["step"], "tokens": each["step"] * run.recipe.batch.tokens}
            | {key: value for key, value in each.items() if key.split("/")[0] == "held_out_loss"}
            for each in filter(is_evaluation, record.metrics)
        ],
        "endpoints": dict(endpoints),
    }


def device_and_torch(environment: Mapping[str, Any]) -> str:
    """What a run was computed by: "NVIDIA H200, torch 2.11.0"."""
    gpus, torch = gpus_of(environment), (environment.get("packages") or {}).get("torch")
    return ", ".join(filter(None, [gpus[0] if gpus else "a CPU", f"torch {torch}" if torch else ""]))


def rounded(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 5) for value in values]
