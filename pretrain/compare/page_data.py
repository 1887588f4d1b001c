"""What the page's script draws of each run: curves, quantization statistics, where a step's time went; as plain values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from foundation.progress import Progress, advance
from foundation.reading import parse_json
from foundation.units import GIB
from pretrain.compare.appearance import colour_of
from pretrain.compare.comparison import RunComparison, Standing
from pretrain.compare.fairness import loss_differences
from pretrain.compare.smoothing import window_of
from pretrain.metrics.run_folder import PROFILE_FILE, STATISTICS_FILE
from pretrain.metrics.run_record import RunRecord

# The page's panels of single curves: their ids there, and the keys of the metrics that they show.
CURVES = {"loss": "loss", "norm": "gradient_norm", "rate": "learning_rate", "frozen": "frozen_updates"}
MEASURES = {"underflow": "underflow", "saturation": "saturation", "scale": "scale", "amax": "largest value"}  # and their titles
_PROFILE_ROW = re.compile(r"^\| +([a-z][^|*]*?) +\| +([0-9.]+) +\|", re.MULTILINE)
_OF_A_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.*)")


def page_data(comparison: RunComparison) -> dict[str, Any]:
    """Everything that is drawn, with null for what is not a number."""
    runs = []
    with Progress("gathering what is drawn", "runs", total=len(comparison.standings), lines_every=None):
        for index, each in enumerate(comparison.standings):
            runs.append({"index": index, **_run(each, comparison.baseline.run)})
            advance(of="runs")
    axes = {"steps": True, "tokens": all(run["tokens"] is not None for run in runs)}
    axes["hours"] = all(run["hours"] is not None for run in runs)
    return {
        "runs": runs,
        "axes": axes,
        "baseline": comparison.baseline.look.label,
        "tolerance": comparison.tolerance,
        "memoryOrder": memory_order(runs),
    }


def _run(standing: Standing, baseline: RunRecord) -> dict[str, Any]:
    run, look = standing.run, standing.look
    steps = run.steps
    evaluations = run.evaluations
    numbers = [record["step"] for record in steps]
    places = {step: place for place, step in enumerate(numbers)}
    differing_steps, minus = loss_differences(baseline, run) if standing.gap else (np.array([]), np.array([]))
    timed = bool(steps) and all(record.get("step_ms") is not None for record in steps) and not run.side_by_side
    gap = standing.gap
    axes = {
        "steps": numbers,
        "tokens": [record["tokens"] for record in steps] if steps and "tokens" in steps[0] else None,
        "hours": numbers_of(np.cumsum([record["step_ms"] for record in steps]) / 3.6e6) if timed else None,
    }
    return {
        "name": look.label,
        "kind": look.kind,
        "precision": run.precision,
        "colour": look.colour,
        "hue": colour_of(run.precision),
        "dash": look.dash,
        "symbol": look.symbol,
        "place": look.place,
        "baseline": standing.is_baseline,
        "emulated": run.emulated,
        "broken": run.broken_off,
        "shared": run.side_by_side,
        "front": standing.on_front,
        "speed": standing.shown_speed,
        "loss": number(standing.loss),
        "gap": gap and number(gap.mean),
        "half": gap and number(gap.half_width),
        "gapSteps": gap and gap.steps,
        "memory": run.summary.get("memory_gib"),
        "reserved": number(reserved(run)),
        "memoryParts": memory_parts(run),
        **axes,
        "window": window_of(len(steps)),
        "curves": {panel: numbers_of(values) for panel, key in CURVES.items() if np.isfinite(values := run.curve(key)[1]).any()},
        "heldOut": {
            **evaluated_at([record["step"] for record in evaluations], axes, run.tokens_per_step or 0),
            "loss": [number(record["held_out_loss"]) for record in evaluations],
        },
        "minus": {"at": [places[int(step)] for step in differing_steps], "loss": numbers_of(minus)},
        "heat": heat_maps(run.path / STATISTICS_FILE),
        "time": step_time(run),
    }


def evaluated_at(
    after: Sequence[int], axes: Mapping[str, Sequence[float] | None], tokens_per_step: int
) -> dict[str, list[float | None]]:
    """Returns, for each axis that is known, the places of evaluations `after` these steps. An evaluation from before the run's
    first step stands where that step begins."""
    known = {axis: np.array(values, dtype=float) for axis, values in axes.items() if values}  # what no number is becomes NaN
    began = {"steps": 1, "tokens": tokens_per_step, "hours": known.get("hours", [0])[0]}  # what the first step has added
    return {
        axis: numbers_of(np.interp(after, [known["steps"][0] - 1, *known["steps"]], [along[0] - began[axis], *along]))
        for axis, along in known.items()
    }


def heat_maps(path: Path) -> dict[str, Any] | None:
    """Returns what a run's quantization statistics show: the layers, the steps, and for each measure and operand a row of values
    a layer.

    Scales and largest values are given as their binary logarithm. None where the run quantizes nothing, or wrote none.
    """
    lines = _statistics(path) if path.is_file() else []
    if not lines:
        return None
    steps = [line["step"] for line in lines]
    layers = list(dict.fromkeys(record["layer"] for line in lines for record in line["operands"]))
    operands = list(dict.fromkeys(record["operand"] for line in lines for record in line["operands"]))
    values = {measure: {operand: np.full((len(layers), len(steps)), math.nan) for operand in operands} for measure in MEASURES}
    rows = {layer: row for row, layer in enumerate(layers)}
    for column, line in enumerate(lines):
        for record in line["operands"]:
            for measure in MEASURES:
                values[measure][record["operand"]][rows[record["layer"]], column] = record[measure]
    return {
        "steps": steps,
        "layers": [short_name(layer) for layer in layers],
        "operands": operands,
        "values": {m: {o: [numbers_of(row) for row in table] for o, table in of.items()} for m, of in values.items()},
    }


def _statistics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's statistics that can be read; a run that was killed mends its files when it is resumed."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            line = parse_json(text)
            lines.append({"step": int(line["step"]), "operands": [_operand(record) for record in line["operands"]]})
    return lines


def _operand(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of the statistics with its measures as they are drawn, NaN for what is not known; ValueError, TypeError,
    KeyError or AttributeError for what is none."""
    drawn = {measure: math.nan if (value := record.get(measure)) is None else float(value) for measure in MEASURES}
    drawn |= {measure: math.log2(drawn[measure]) if drawn[measure] else math.nan for measure in ("scale", "amax")}
    return {"layer": str(record["layer"]), "operand": str(record["operand"]), **drawn}


def short_name(layer: str) -> str:
    """`model.layers.3.self_attn.q_proj` as `3 q_proj`: the number of its layer and its last name."""
    found = _OF_A_LAYER.search(layer)
    return f"{found[1]} {found[2].rpartition('.')[-1]}" if found else layer.rpartition(".")[-1]


def reserved(run: RunRecord) -> float | None:
    """GiB: the most that torch had reserved from the driver; None where the metrics do not say."""
    values = run.curve("memory_reserved_gib")[1]
    return float(np.nanmax(values)) if np.isfinite(values).any() else None


# The plan's names of what a run holds from step to step, as the audit calls what it has found.
_HELD = {"parameters": "weights", "remainder bits": "remainders", "optimizer moments": "moments", "gradients": "gradients"}
REST, PROCESS, UNUSED = "the rest of the peak", "the process, whole", "reserved, not used"


def memory_order(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """All parts of all runs, as they are stacked: what stays from step to step first, what is not used last."""
    found = [part for run in runs for parts in (run["memoryParts"] or {}).values() for part in parts]
    return sorted(dict.fromkeys([*_HELD.values(), *found]), key=[REST, PROCESS, UNUSED].__contains__)


def memory_parts(run: RunRecord) -> dict[str, dict[str, float]] | None:
    """GiB by part, `measured` and `planned`; None where the run recorded no parts.

    Measured are what its tensors hold, the rest of the peak that torch counted (activations, the loss, copies), and what was
    reserved beyond the peak. On a CPU nothing but the size of the whole process is measured, of which libraries are a part.
    """
    recorded, peak, most = run.audit.get("memory"), run.summary.get("memory_gib"), reserved(run)
    if not recorded or peak is None:
        return None
    held = {part: size / GIB for part, size in recorded["held"].items()}
    measured = {PROCESS: peak}
    if most is not None:
        measured = held | {REST: max(peak - sum(held.values()), 0.0), UNUSED: max(most - peak, 0.0)}
    planned = {_HELD.get(part, part): size / GIB for part, size in recorded["planned"].items()}
    kinds = {"measured": measured, "planned": planned}
    return {kind: {part: number(gib) for part, gib in parts.items()} for kind, parts in kinds.items()}


def step_time(run: RunRecord) -> dict[str, Any] | None:
    """Milliseconds of a step by part: of the profiled one where `--profile` was on, else of a median one, waiting apart."""
    profile = run.path / PROFILE_FILE
    if profile.is_file():
        parts = {name: float(ms) for name, ms in _PROFILE_ROW.findall(profile.read_text(encoding="utf-8", errors="replace"))}
        if parts:
            return {"source": "profile", "parts": parts}
    step_ms, share = run.summary.get("step_ms"), run.summary.get("data_wait_share")
    if step_ms is None or share is None or run.side_by_side:
        return None
    parts = {"computing": step_ms * (1 - share), "waiting for data": step_ms * share}
    return {"source": "median", "parts": {name: number(ms) for name, ms in parts.items()}}


def number(value: float | None) -> float | None:
    """Seven significant digits, which a picture cannot show; None for what is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")


def numbers_of(values: Iterable[float]) -> list[float | None]:
    return [number(float(value)) for value in values]


def as_json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
