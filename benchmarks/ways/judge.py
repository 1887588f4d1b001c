"""Is it the same training? A way that is fast at something else is marked, and not ranked.

All ways begin with the same weights and see the same text, so the first step's loss must agree with plain Hugging Face's to what
its rounding explains, and so must the gradient norms of the first steps. Norms are judged by their median ratio: delayed scaling
that starts with an empty history loses most of its very first gradient, and is itself again a step later. How the loss then falls
tells whether updates arrive. One way to lose them is known and chosen by many, BF16 weights that drop small updates, and has a
mark of its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.ways.entries import Entry

COMPARED = 4  # steps whose gradient norms are compared
# nats that the last step's loss may be off, which plain BF16 weights exceed at the second step
FALL = 0.1

RIGHT, WRONG, LOSES, UNKNOWN = "right", "wrong", "loses updates", "not judged"

# Nats of the first loss, and share of the gradient norm, by precision. FP8's products have noise that a model of random weights
# turns into 0.02 nats; delayed scaling, besides, cuts what exceeds the largest value that it has seen.
TOLERANCES = {
    "fp32": {"loss": 0.005, "gradient_norm": 0.02},
    "bf16": {"loss": 0.02, "gradient_norm": 0.1},
    "delayed": {"loss": 0.05, "gradient_norm": 0.3},
    "current": {"loss": 0.05, "gradient_norm": 0.1},
    "block": {"loss": 0.05, "gradient_norm": 0.1},
}


def judge(
    entry: Entry, measured: Mapping[str, Any], baseline: Mapping[str, Any] | None
) -> tuple[str, list[str]]:
    """One of RIGHT, WRONG, LOSES and UNKNOWN, and why.

    `measured` and `baseline`, of ways that have run, hold the losses and gradient norms of every step and, except of ours, the
    number of their parameters and of those in the optimizer. `baseline` is None where it has not run.
    """
    reasons = untrained(measured, baseline)
    if not all(map(math.isfinite, [*measured["losses"], *measured["gradient_norms"]])):
        reasons.append("loss or gradient norm is not a finite number")
    if reasons:
        return WRONG, reasons
    if baseline is None:
        return UNKNOWN, ["no plain Hugging Face run of this model to compare with"]

    tolerance = TOLERANCES[entry.precision]
    first = measured["losses"][0] - baseline["losses"][0]
    if abs(first) > tolerance["loss"]:
        reasons.append(
            f"first loss {first:+.4f} off eager's {baseline['losses'][0]:.4f}, {tolerance['loss']:g} allowed"
        )
    # Weights that lose updates are elsewhere after the first, and their gradients are those of that place.
    ratio = norm_ratio(
        measured, baseline, 1 if entry.loses_updates and entry.precision != "delayed" else COMPARED
    )
    if abs(ratio - 1) > tolerance["gradient_norm"]:
        reasons.append(
            f"gradient norm {ratio:.2f} times eager's, {100 * tolerance['gradient_norm']:.0f} % off allowed"
        )
    if reasons:
        return WRONG, reasons
    step = min(len(measured["losses"]), len(baseline["losses"])) - 1
    fall = measured["losses"][step] - baseline["losses"][step]
    if abs(fall) <= FALL:
        return RIGHT, []
    off = f"loss {fall:+.3f} off eager's {baseline['losses'][step]:.3f} at step {step + 1}, {FALL:g} allowed"
    return (LOSES if entry.loses_updates else WRONG), [off]


def untrained(measured: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> list[str]:
    """Parameters that no optimizer updates, and parameters that the model has not: a head untied from the embedding is both."""
    parameters, reasons = measured.get("parameters"), []
    # ours proves before its first step that all are trained, and counts none
    if parameters is None:
        return reasons
    if left := parameters - measured["updated_parameters"]:
        reasons.append(f"{left:,} parameters are in no optimizer")
    if baseline and parameters != baseline["parameters"]:
        reasons.append(
            f"{parameters:,} parameters where the model has {baseline['parameters']:,}: another model"
        )
    return reasons


def norm_ratio(measured: Mapping[str, Any], baseline: Mapping[str, Any], steps: int) -> float:
    """Median over the first steps of this way's gradient norm over the baseline's."""
    pairs = zip(
        measured["gradient_norms"][:steps], baseline["gradient_norms"][:steps], strict=False
    )
    return statistics.median(ours / theirs for ours, theirs in pairs)
