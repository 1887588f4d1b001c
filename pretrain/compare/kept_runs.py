"""Runs of which a result file is all that is left: what `python -m benchmarks.collect_runs` kept of each, read as a run's record.

Such a file holds each run's settings, audit and summary, and of every step the loss, the gradient norm and the frozen updates.
Times of single steps and learning rates are not in it, nor evaluations before the last where it does not list them; nothing here
makes them up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.reading import load_object
from pretrain.metrics.run_record import RunRecord

STEPS = {"losses": "loss", "gradient_norms": "gradient_norm", "frozen_updates": "frozen_updates"}


def read_kept(path: Path) -> list[RunRecord]:
    """The runs of a result file, each as if its folder were still called by its name. InputError for another file."""
    remedy = f"name run folders ({path.parent}/*/ are folders alone), or a file that `python -m benchmarks.collect_runs` has made"
    content = load_object(path, remedy)
    runs = content.get("runs")
    if not isinstance(runs, dict) or not runs or not all(isinstance(run, dict) and "losses" in run for run in runs.values()):
        raise InputError(f"{path}: holds no runs with losses; name run folders, or a file made by `benchmarks.collect_runs`")
    try:
        return [_record(path, name, run, content) for name, run in runs.items()]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{path}: not as `benchmarks.collect_runs` makes it, at {error}; make it again") from None


def _record(path: Path, name: str, run: Mapping[str, Any], content: Mapping[str, Any]) -> RunRecord:
    # A run's own name was not kept. Its folder's may be a matrix's, which has signs that no name has.
    named = {"name": re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-") or "run"}
    settings, summary = {**named, **content["settings"], **run["settings"]}, run["summary"]
    tokens = summary["tokens_per_step"]
    for kept in filter(run.__contains__, STEPS):
        if not all(value is None or type(value) in (int, float) for value in run[kept]):
            raise TypeError(f"`{kept}` of {name}")
    first = summary.get("first_step", 1)  # later where it began with another run's checkpoint
    steps = [
        {"step": step, "tokens": step * tokens} | {ours: run[kept][step - first] for kept, ours in STEPS.items() if kept in run}
        for step in range(first, first + len(run["losses"]))
    ]
    last = {"step": summary["steps"], "held_out_loss": summary.get("held_out_loss")}
    evaluated = run.get("evaluations", [last] if "held_out_loss" in summary else [])
    evaluations = [{"step": each["step"], "event": "evaluation", "held_out_loss": each["held_out_loss"]} for each in evaluated]
    for each in evaluations:
        if type(each["step"]) is not int or type(each["held_out_loss"]) not in (int, float, type(None)):
            raise TypeError(f"`evaluations` of {name}")
    return RunRecord(
        path=path.with_suffix("") / name,
        config=_nested(settings),
        environment={**content["environment"], "past": run.get("past", {}), "data_fingerprint": summary.get("data_fingerprint")},
        metrics=steps + evaluations,
        summary=summary,
        audit=run["audit"],
        matrix={"side_by_side": bool(content.get("side_by_side", False))},
    )


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"data.length": 1} -> {"data": {"length": 1}}."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return nested
