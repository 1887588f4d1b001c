"""Run folders as the launcher writes them, without training: for tests that read runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.experiments.matrix_file import Cell
from lab.experiments.matrix_run import mark
from pretrain.metrics.run_record import RunRecord, read_run
from pretrain.settings.config import load_recipe, resolved
from pretrain.settings.recipe import Recipe
from tests.conftest import yaml_of

RECIPE = {
    "name": "trained",
    "precision": "bf16",
    "weights": "fp32",
    "model": {"config": {"model_type": "qwen3", "hidden_size": 32}},
    "data": {"packs": "packs"},
    "batch": {"tokens": 4096},
    "train": {"steps": 4},
}


def make_run(
    path: Path,
    losses: Sequence[float | None] = (4.0, 3.0, 2.5, 2.25),
    *settings: str,
    fingerprint: str | None = "ab12",
    audit: dict[str, Any] | None = None,
    held_out: bool = True,
    side_by_side: bool = False,
    first_step: int = 1,
) -> Path:
    """Write the folder of a finished run.

    Its recipe is RECIPE with `settings` (key=value) as overrides. A branch has a `first_step` above
    1.
    """
    steady = {"learning_rate": 1e-3, "gradient_norm": 1.0, "step_ms": 100.0, "data_wait_ms": 1.0}
    steady |= {"tokens_per_second": 10_240.0, "memory_gib": 0.5, "recompiles": 0}
    steady |= {"frozen_updates": 0.0125, "mfu_bf16_peak": 0.5}
    lines = [
        {"step": step, "tokens": 4096 * step, "epoch": step / 4, "loss": loss} | steady
        for step, loss in enumerate(losses, start=first_step)
    ]
    # Runs of earlier versions have this event.
    lines.append({"step": len(losses), "event": "speed", "predicted": 1e4, "parts": {}})
    if held_out:
        packs = {"held_out_fingerprint": fingerprint, "held_out_packs": 4}
        figures = {"held_out_loss": 2.4, "held_out_perplexity": 11.02}
        lines.append({"step": len(losses), "event": "evaluation"} | figures | packs)
    path.mkdir(parents=True)
    file = path.parent / "recipe.yaml"
    file.write_text(yaml_of(RECIPE))
    recipe = load_recipe(file, settings)
    write_run(path, lines, recipe, horizon=recipe.train.steps, data_fingerprint=fingerprint)
    (path / "audit.json").write_text(json.dumps(audit or {"backend": "torch"}))
    if side_by_side:
        (path / "matrix.json").write_text(json.dumps({"side_by_side": True}))
    return path


def write_run(path: Path, lines: list[dict[str, Any]], recipe: Recipe, **environment: Any) -> None:
    """Write the metrics, the settings and the environment of a run."""
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.yaml").write_text(yaml_of(resolved(recipe)))
    (path / "environment.json").write_text(json.dumps(environment))


def trained(*arguments: Any, **keywords: Any) -> RunRecord:
    """Write the folder of a run with `make_run`, and read it."""
    return read_run(make_run(*arguments, **keywords))


def noisy(level: float, seed: int, steps: int = 400) -> list[float]:
    """Return losses around `level`. Most of their noise is the same for all seeds."""
    shared = np.random.default_rng(0).normal(0, 0.1, steps)
    individual = np.random.default_rng(seed).normal(0, 0.004, steps)
    return (level + shared + individual).tolist()


def note(path: Path, **keys: object) -> None:
    """Set keys of the last step in a run's metrics."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    next(line for line in reversed(lines) if "event" not in line).update(keys)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line to the metrics of a run."""
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def leave_behind(
    cell: Cell, steps: int = 12, *, held_out: float | None = None, done: bool = True, **figures: Any
) -> None:
    """Write the files of a run of `cell` after `steps`. It is finished if `done`.

    `figures` are values of each step.
    """
    mark("m", cell, side_by_side=False)
    figures = {"epoch": 0.1, "loss": 2.0, "step_ms": 10.0, "memory_gib": 1.0} | figures
    lines = [{"step": step, "tokens": 256 * step} | figures for step in range(1, steps + 1)]
    if held_out is not None:
        evaluated = {"held_out_loss": held_out, "held_out_perplexity": 2.7}
        evaluated["held_out_packs"] = cell.recipe.evaluate.packs or 8
        lines.append({"step": steps, "event": "evaluation"} | evaluated)
    horizon = cell.recipe.train.steps or steps
    write_run(cell.run_dir, lines, cell.recipe, horizon=horizon, data_fingerprint="ab12")
    if done:
        (cell.run_dir / "summary.json").write_text(json.dumps({"steps": steps}))


def rows_of(text: str) -> dict[str, list[list[str]]]:
    """Return the rows of all Markdown tables in `text` by their first cell."""
    rows: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        if line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            rows.setdefault(cells[0], []).append(cells[1:])
    return rows
