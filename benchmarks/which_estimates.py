"""Simulate the extra tokens that `which` estimates.

    python -m benchmarks.which_estimates --out benchmarks/results/loss/which_estimates.json

`tokens`: The training loss of a baseline is E + A t^-a + floor * rate(t) with noise. rate is the
learning rate as a share of its peak. The last term is the loss that the decay removes. The extra
tokens for equal loss that `which` estimates for a candidate are divided by the true extra tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import measured_on
from foundation.files import write_json
from lab.experiments.protocol import Protocol
from lab.experiments.verdicts import loss_slope, tokens_for
from pretrain.metrics.run_record import RunRecord
from pretrain.optimizer.schedule import learning_rate
from pretrain.settings.config import load_recipe

# The baseline's loss at the last step without noise, its slope in nats per unit of ln(tokens), the
# standard deviation of a step's loss, the candidate's cost in nats, and the number of seeds.
LOSS = 2.5
SLOPE = 0.18
NOISE = 0.03
COST = 0.0075
SEEDS = 5
EXPONENTS = (0.1, 0.28, 0.4)
FLOORS = (0.0, 0.1, 0.3)
SCHEDULES = {
    "constant": ["schedule.kind=constant"],
    "wsd, decay 0.2": ["schedule.kind=wsd", "schedule.decay=0.2"],
    "wsd, decay 0.8": ["schedule.kind=wsd", "schedule.decay=0.8"],
    "cosine": ["schedule.kind=cosine"],
    "linear": ["schedule.kind=linear"],
}
RECIPE = "benchmarks/tiny.yaml"


def share_of_extra_tokens(
    overrides: list[str], exponent: float, floor: float, steps: int, answers: int
) -> float:
    """Return the mean estimate of the extra tokens of `answers` answers, divided by the truth.

    Args:
        overrides: Settings of the schedule, as key=value.
        exponent: a in the formula of the loss.
        floor: Loss in nats that a complete decay of the learning rate removes.
        steps: Number of steps.
        answers: Number of answers, each over SEEDS seeds.
    """
    draw = np.random.default_rng(0)
    recipe = load_recipe(RECIPE, [*overrides, "schedule.warmup=0", f"train.steps={steps}"])
    numbers = np.arange(1, steps + 1)
    peak = recipe.optimizer.learning_rate
    rates = [learning_rate(step, recipe.schedule, peak, steps) for step in range(steps)]
    power_law = SLOPE / exponent * ((numbers / steps) ** -exponent - 1)
    losses = LOSS + power_law + floor * np.array(rates) / peak
    protocol = Protocol(None, 0.003, ["bf16"], {"bf16": 1.0}, 0.0, 5, steps, steps // 5)

    def slope() -> float:
        noisy = losses + draw.normal(0, NOISE, steps)
        pairs = zip(numbers.tolist(), noisy.tolist(), strict=True)
        metrics = [{"step": step, "loss": loss} for step, loss in pairs]
        return loss_slope(RunRecord(Path(), recipe.model_dump(), {}, metrics, {}))

    extra_tokens = [
        tokens_for(protocol, COST, np.mean([slope() for _ in range(SEEDS)])) - 1
        for _ in range(answers)
    ]
    true_extra_tokens = (1 - exponent * COST / SLOPE) ** (-1 / exponent) - 1
    return float(np.mean(extra_tokens) / true_extra_tokens)


def token_shares(answers: int) -> dict[str, Any]:
    """Return the figures of `tokens` for all schedules, lengths and floors, by exponent."""
    share = partial(share_of_extra_tokens, answers=answers)

    def by_exponent(schedule: str, floor: float, steps: int) -> Mapping[str, float]:
        return {
            f"{exponent:g}": round(share(SCHEDULES[schedule], exponent, floor, steps), 2)
            for exponent in EXPONENTS
        }

    return {
        "by_floor": {
            schedule: {f"{floor:g}": by_exponent(schedule, floor, 2000) for floor in FLOORS}
            for schedule in SCHEDULES
        },
        "by_steps": {
            str(steps): by_exponent("wsd, decay 0.2", 0.1, steps) for steps in (150, 400, 2000)
        },
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=10, help="number of answers of each mean")
    parser.add_argument("--out", type=Path, required=True, help="result file to write")
    options = parser.parse_args()
    figures = {"tokens": token_shares(options.answers)}
    what = "Extra tokens that `which` estimates, divided by the true extra tokens."
    write_json(options.out, {"what": what, **measured_on(), **figures})
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
