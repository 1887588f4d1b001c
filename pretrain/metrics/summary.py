"""A run in one object: `summary.json`, made from the lines of `metrics.jsonl` and nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

WARM_UP_STEPS = 2  # compile, allocate, autotune: kept out of every median
LAST_STEPS = 50  # one step's loss is mostly noise (sd 0.13 in the reference's runs); their mean is what runs differ in

MEDIANS = ("tokens_per_second", "step_ms", "tflops", "mfu_bf16_peak", "mfu_recipe_peak", "frozen_updates")

Record = Mapping[str, Any]


def is_evaluation(record: Record) -> bool:
    return record.get("event") == "evaluation"


def summary(records: Iterable[Record]) -> dict[str, Any]:
    """Final losses, medians, peaks and totals over every step of the run, resumed or not.

    Losses are nats per token. Medians leave out the run's first two steps. `data_wait_share` is the time spent waiting for data
    over the time of all those steps. `hours` is the time inside steps: evaluation, saving and starting are not in it. A key whose
    figure is not known (no evaluation, no known peak) is absent.
    """
    records = list(records)
    steps = [record for record in records if not is_evaluation(record)]
    evaluations = [record for record in records if is_evaluation(record)]
    if not steps:
        return {"steps": 0}
    last, steady = steps[-1], steps[WARM_UP_STEPS:] or steps
    step_ms = sum(_known(steady, "step_ms"))
    result = {
        "steps": last["step"],
        "tokens": last["tokens"],
        "epoch": last["epoch"],
        "hours": sum(_known(steps, "step_ms")) / 3.6e6,
        "loss": last["loss"],
        f"loss_last_{LAST_STEPS}": _mean(_known(steps[-LAST_STEPS:], "loss")),
        **({key: evaluations[-1][key] for key in ("held_out_loss", "held_out_perplexity")} if evaluations else {}),
        **{key: statistics.median(values) for key in MEDIANS if (values := _known(steady, key))},
        "data_wait_share": sum(_known(steady, "data_wait_ms")) / step_ms if step_ms else 0.0,
        "memory_gib": max(_known(steps, "memory_gib"), default=None),
        "first_step_seconds": steps[0]["step_ms"] / 1e3,
        "recompiles": sum(_known(steps, "recompiles")),
        "skipped_steps": sum(record.get("skipped", False) for record in steps),
    }
    return {key: value for key, value in result.items() if value is not None}


def _known(records: Iterable[Record], key: str) -> list[float]:
    """The finite values of `key`: not-a-number is null in metrics.jsonl, and a figure that is not known has no key."""
    return [value for record in records if (value := record.get(key)) is not None and math.isfinite(value)]


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None
