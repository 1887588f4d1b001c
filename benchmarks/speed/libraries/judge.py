"""Check that a way trains the same model as plain Hugging Face. A wrong way is not ranked.

All ways start with the same weights and see the same data. So the first loss and the first gradient
norms must agree with plain Hugging Face, up to rounding. Norms are compared by their median ratio,
because delayed scaling with an empty history loses most of the first gradient and recovers one step
later. The last loss shows whether the weights are updated. BF16 weights lose small updates. This is
a common choice, so it has its own verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.speed.libraries.entries import Entry

# Number of first steps whose gradient norms are compared.
COMPARED = 4
# Tolerance of the last loss, in nats. Plain BF16 weights exceed it at the second step.
LAST_LOSS = 0.1

RIGHT = "right"
WRONG = "wrong"
LOSES = "loses updates"
UNKNOWN = "not judged"

# Tolerances of the first loss, in nats, and of the gradient norm, as a share. In a model with
# random weights, the rounding of FP8 GEMMs changes the loss by 0.02 nats. Delayed scaling also cuts
# values above the largest recorded one.
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
    """Return RIGHT, WRONG, LOSES or UNKNOWN, and the reasons.

    Args:
        entry: The way.
        measured: Its losses and gradient norms of every step. Ways of other trainers also have the
            number of parameters, and of parameters in the optimizer.
        baseline: The same figures of plain Hugging Face, or None if it has not run.
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
            f"first loss {first:+.4f} off eager's {baseline['losses'][0]:.4f}, "
            f"{tolerance['loss']:g} allowed"
        )
    # Weights that lose updates differ after the first step, and so do their gradients.
    steps = 1 if entry.loses_updates and entry.precision != "delayed" else COMPARED
    ratio = norm_ratio(measured, baseline, steps)
    if abs(ratio - 1) > tolerance["gradient_norm"]:
        reasons.append(
            f"gradient norm {ratio:.2f} times eager's, "
            f"{100 * tolerance['gradient_norm']:.0f} % off allowed"
        )
    if reasons:
        return WRONG, reasons
    step = min(len(measured["losses"]), len(baseline["losses"])) - 1
    base_loss = baseline["losses"][step]
    last = measured["losses"][step] - base_loss
    if abs(last) <= LAST_LOSS:
        return RIGHT, []
    reason = f"loss {last:+.3f} off eager's {base_loss:.3f} at step {step + 1}"
    verdict = LOSES if entry.loses_updates else WRONG
    return verdict, [f"{reason}, {LAST_LOSS:g} allowed"]


def untrained(measured: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> list[str]:
    """Return errors about parameters without an optimizer, and about a wrong number of parameters.

    A head that is untied from the embedding causes both.
    """
    parameters = measured.get("parameters")
    reasons: list[str] = []
    # The launcher has no such figures: it checks before its first step that all are trained.
    if parameters is None:
        return reasons
    if left := parameters - measured["updated_parameters"]:
        reasons.append(f"{left:,} parameters are in no optimizer")
    if baseline and parameters != baseline["parameters"]:
        reasons.append(f"{parameters:,} parameters, but the model has {baseline['parameters']:,}")
    return reasons


def norm_ratio(measured: Mapping[str, Any], baseline: Mapping[str, Any], steps: int) -> float:
    """Return the median ratio of the gradient norms of the first steps to the baseline's."""
    pairs = zip(
        measured["gradient_norms"][:steps], baseline["gradient_norms"][:steps], strict=False
    )
    return statistics.median(norm / base_norm for norm, base_norm in pairs)
