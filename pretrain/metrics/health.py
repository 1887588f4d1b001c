"""Watches the loss and the gradient norm, and decides when a step must not reach the weights.

Not-a-number ends a run by default: skipping the step hides what broke. `on_nan: skip` is for the rare overflow of a long run.

A spike is a loss far above those of the last hundred steps, by their median and median absolute deviation, which a spike does not
shift. A steep but healthy descent widens the deviation, and with it what is allowed.

Every rank must see the same figures, so that all of them skip or stop together. The state belongs to the checkpoint: a resumed
run warns, skips and stops where an uninterrupted one would.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

from pretrain.settings.recipe import HealthSettings

WINDOW = 100  # recent steps that a loss is compared with
QUIET_START = 20  # finite losses before any is called a spike: fewer do not show the noise
SPIKE_DEVIATIONS = 6.0  # robust standard deviations above the median
SPIKE_NATS = 0.3  # and at least this far above it: late, smooth curves move by six of their tiny deviations
CONSECUTIVE_SKIPS = 10
MAD_TO_SD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation, 1 / Phi^-1(3/4)


class TrainingHalted(Exception):
    """The run stopped itself over its loss or gradient norm; the message says what to change."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(f"step {step}: {message}")
        self.step = step


@dataclass(frozen=True)
class StepDecision:
    """What to do with a step whose gradient is ready: `proceed` to the optimizer or not, and a warning for the user."""

    proceed: bool
    warning: str | None = None


class Health:
    """Checks the steps of one run; call `check` once a step, before the optimizer."""

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self.skipped_steps = 0
        self._consecutive_skips = 0
        self._in_spike = False
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def check(self, step: int, loss: float, gradient_norm: float) -> StepDecision:
        """Check a step's mean `loss` (nats per token) and the norm of its whole gradient.

        Raises TrainingHalted where the settings say `stop`, and after CONSECUTIVE_SKIPS skipped steps in a row.
        """
        figures = {"loss": loss, "gradient norm": gradient_norm}
        broken = [f"the {name} is {value}" for name, value in figures.items() if not math.isfinite(value)]
        if broken:
            return self._on_nan(step, " and ".join(broken))
        self._consecutive_skips = 0
        warning = None if self.settings.on_spike == "ignore" else self._on_spike(step, loss)
        self._losses.append(loss)
        return StepDecision(proceed=True, warning=warning)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, which JSON keeps exactly."""
        return {
            "losses": list(self._losses),
            "in_spike": self._in_spike,
            "skipped_steps": self.skipped_steps,
            "consecutive_skips": self._consecutive_skips,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=WINDOW)
        self._in_spike = state["in_spike"]
        self.skipped_steps = state["skipped_steps"]
        self._consecutive_skips = state["consecutive_skips"]

    def _on_nan(self, step: int, what: str) -> StepDecision:
        remedy = "Lower `optimizer.learning_rate` or lengthen `schedule.warmup`, and resume from an earlier checkpoint"
        if self.settings.on_nan == "stop":
            skip = "`health.on_nan: skip` leaves such steps out instead"
            raise TrainingHalted(step, f"{what}. This step has not touched the weights. {remedy}; {skip}.")
        self.skipped_steps += 1
        self._consecutive_skips += 1
        if self._consecutive_skips > CONSECUTIVE_SKIPS:
            skipped = f"{self._consecutive_skips} steps in a row were skipped for this without effect"
            weights = f"The weights are those of step {step - self._consecutive_skips}"
            raise TrainingHalted(step, f"{what}, and {skipped}. {weights}. {remedy}.")
        return StepDecision(proceed=False, warning=f"step {step} skipped: {what} ({self.skipped_steps} skipped so far)")

    def _on_spike(self, step: int, loss: float) -> str | None:
        """The warning when a spike begins, not at each of its steps. A level that stays is no spike after half a window."""
        usual, limit = self._usual_and_limit()
        began = loss > limit and not self._in_spike
        self._in_spike = loss > limit
        if not began:
            return None
        what = f"the loss jumped to {loss:.4f}; the last {len(self._losses)} steps had a median of {usual:.4f}"
        if self.settings.on_spike == "stop":
            remedy = "If the text at this step is as it should be, lower `optimizer.learning_rate` or `optimizer.clip`"
            warn = "`health.on_spike: warn` goes on past it"
            raise TrainingHalted(step, f"{what}. This step has not touched the weights. {remedy}; {warn}.")
        return f"step {step}: {what}"

    def _usual_and_limit(self) -> tuple[float, float]:
        """Median of the recent losses, and the loss above which one is a spike."""
        if len(self._losses) < QUIET_START:
            return math.nan, math.inf
        usual = statistics.median(self._losses)
        deviation = MAD_TO_SD * statistics.median(abs(loss - usual) for loss in self._losses)
        return usual, usual + max(SPIKE_DEVIATIONS * deviation, SPIKE_NATS)
