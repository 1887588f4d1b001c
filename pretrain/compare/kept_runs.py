"""Runs of which a result file is all that is left: what `python -m benchmarks.collect_runs` kept of each, read as a run's record.

Such a file holds each run's settings, audit and summary, and of every step the loss, the gradient norm and the frozen updates.
Times of single steps, learning rates and evaluations before the last are not in it; nothing here makes them up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.reading import load_json
from foundation.settings import place_of
from pretrain.metrics.run_record import RunRecord
from pretrain.settings.config import resolved
from pretrain.settings.recipe import Recipe

STEPS = {"losses": "loss", "gradient_norms": "gradient_norm", "frozen_updates": "frozen_updates"}


def read_kept(path: Path) -> list[RunRecord]:
    """The runs of a result file, each as if its folder were still called by its name. InputError for another file."""
    try:
        content = load_json(path)
        return [_record(path, name, run, content) for name, run in content["runs"].items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: holds no runs as `python -m benchmarks.collect_runs` keeps them ({error}); name run folders, or such a file"
        ) from None


def _record(path: Path, name: str, run: Mapping[str, Any], content: Mapping[str, Any]) -> RunRecord:
    # A run's own name was not kept. Its folder's may be a matrix's, which has signs that no name has.
    config: dict[str, Any] = {"name": re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-") or "run"}
    for key, value in {**content["settings"], **run["settings"]}.items():
        section, last = place_of(config, key)
        section[last] = value
    # A recipe of today may have fewer keys than that of a run which is kept for long.
    config = resolved(Recipe.model_validate(config, extra="ignore"))
    summary = run["summary"]
    first, tokens = summary.get("first_step", 1), summary["tokens_per_step"]  # later where it began with another's checkpoint
    steps = [
        {"step": step, "tokens": step * tokens} | {ours: run[kept][step - first] for kept, ours in STEPS.items() if kept in run}
        for step in range(first, first + len(run["losses"]))
    ]
    last_evaluation = {"step": summary["steps"], "event": "evaluation", "held_out_loss": summary.get("held_out_loss")}
    return RunRecord(
        path=path.with_suffix("") / name,
        config=config,
        environment={**content["environment"], "past": run.get("past", {}), "data_fingerprint": summary.get("data_fingerprint")},
        metrics=[*steps, *([last_evaluation] if "held_out_loss" in summary else [])],
        summary=summary,
        audit=run["audit"],
        matrix={"side_by_side": bool(content.get("side_by_side", False))},
    )
