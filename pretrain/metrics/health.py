"""Watches the loss and the gradient norm, and says when a step must not reach the weights.

Not-a-number ends a run by default: a skipped step hides what broke, and the run that needed many of them has usually broken for
good. `on_nan: skip` is for the rare overflow of a long run, and gives up after ten skips in a row.

A spike is a loss far above what the last hundred steps were, by a median and a median absolute deviation. A mean and a standard
deviation would be dragged along by the spike they are to find; the median is not, and a steep but healthy descent, which widens
the deviation, raises the bar by itself.

Every rank must see the same figures (the loss summed over all ranks, the norm of the whole gradient), so that all of them skip
or stop together. The state belongs to the checkpoint: a resumed run warns, skips and stops where the unbroken one would have.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

from pretrain.settings.recipe import HealthSettings

WINDOW = 100  # steps whose losses say what is usual
QUIET_START = 20  # finite losses before any is called a spike: fewer say nothing of the noise
SPIKE_DEVIATIONS = 6.0  # robust standard deviations above the median
SPIKE_NATS = 0.3  # and at least this far above it: late, smooth curves wander by six of their tiny deviations
CONSECUTIVE_SKIPS = 10
MAD_TO_SD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation, 1 / Phi^-1(3/4)


class TrainingHalted(Exception):
    """The run stopped itself because its figures were no longer those of a healthy run; the message says what to change."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(f"step {step}: {message}")
        self.step = step


@dataclass(frozen=True)
class Verdict:
    """What to do with a step whose gradient is ready: `proceed` to the optimizer or not, and what to tell the user about it."""

    proceed: bool
    warning: str | None = None


class Health:
    """The running judgement of one run; call `check` once a step, before the optimizer."""

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self.skipped_steps = 0
        self._consecutive_skips = 0
        self._in_spike = False
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def check(self, step: int, loss: float, gradient_norm: float) -> Verdict:
        """Judge the step whose mean `loss` (nats per token) and total `gradient_norm` these are.

        Raises TrainingHalted where the settings say `stop`, and after CONSECUTIVE_SKIPS skipped steps in a row.
        """
        figures = {"loss": loss, "gradient norm": gradient_norm}
        broken = [f"the {name} is {value}" for name, value in figures.items() if not math.isfinite(value)]
        if broken:
            return self._on_nan(step, " and ".join(broken))
        self._consecutive_skips = 0
        warning = None if self.settings.on_spike == "ignore" else self._on_spike(step, loss)
        self._losses.append(loss)
        return Verdict(proceed=True, warning=warning)

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

    def _on_nan(self, step: int, what: str) -> Verdict:
        if self.settings.on_nan == "stop":
            raise TrainingHalted(
                step,
                f"{what}. This step has not touched the weights. Lower `optimizer.learning_rate` or lengthen "
                "`schedule.warmup`, and resume from an earlier checkpoint; `health.on_nan: skip` leaves such steps out instead.",
            )
        self.skipped_steps += 1
        self._consecutive_skips += 1
        if self._consecutive_skips > CONSECUTIVE_SKIPS:
            raise TrainingHalted(
                step,
                f"{what}, and {self._consecutive_skips} steps in a row were skipped for this, to no avail. The weights "
                f"are those of step {step - self._consecutive_skips}. Lower `optimizer.learning_rate` or lengthen "
                "`schedule.warmup`, and resume from an earlier checkpoint.",
            )
        return Verdict(proceed=False, warning=f"step {step} skipped: {what} ({self.skipped_steps} skipped so far)")

    def _on_spike(self, step: int, loss: float) -> str | None:
        """Tell of a spike when it begins, not at each of its steps; a level that stays is usual once it fills half the window."""
        usual, limit = self._usual_and_limit()
        began = loss > limit and not self._in_spike
        self._in_spike = loss > limit
        if not began:
            return None
        what = f"the loss jumped to {loss:.4f}; the last {len(self._losses)} steps had a median of {usual:.4f}"
        if self.settings.on_spike == "stop":
            raise TrainingHalted(
                step,
                f"{what}. This step has not touched the weights. If the text at this step is as it should be, lower "
                "`optimizer.learning_rate` or `optimizer.clip`; `health.on_spike: warn` goes on past it.",
            )
        return f"step {step}: {what}"

    def _usual_and_limit(self) -> tuple[float, float]:
        """Median of the recent losses, and the loss above which one is a spike."""
        if len(self._losses) < QUIET_START:
            return math.nan, math.inf
        usual = statistics.median(self._losses)
        deviation = MAD_TO_SD * statistics.median(abs(loss - usual) for loss in self._losses)
        return usual, usual + max(SPIKE_DEVIATIONS * deviation, SPIKE_NATS)
