"""Check the loss and the gradient norm of each step, and decide whether it may update the weights.

A spike is a loss far above the losses of the last hundred steps. Median and median absolute
deviation measure it, because a single spike does not shift them.

All ranks must pass the same numbers, so that they skip, roll back or stop together. The state is
saved in checkpoints. So a resumed run warns, skips, rolls back and stops at the same steps as an
uninterrupted run. docs/troubleshooting.md lists what to do after a stop.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from foundation.errors import InputError
from foundation.units import percent
from pretrain.settings.recipe import HealthSettings

# Number of recent steps that a loss is compared with.
WINDOW = 100
# Number of losses before the first spike can be detected. Fewer do not show the noise.
QUIET_START = 20
# A spike exceeds the median by this number of robust standard deviations.
SPIKE_DEVIATIONS = 6.0
# A spike also exceeds the median by this difference. Late in a run the curve is so smooth that it
# often moves by six of its deviations.
SPIKE_NATS = 0.3
# Skipped steps in a row after which the run stops.
CONSECUTIVE_SKIPS = 10
# Rollbacks after which the run stops, counted over resumes.
MOST_ROLLBACKS = 3
# Standard deviation of a normal distribution over its median absolute deviation, 1 / Phi^-1(3/4).
MAD_TO_SD = 1.4826
# Weight of a new measurement in the moving average of the gap to BF16.
USUAL_FOLLOWS = 0.25
# Share of all updates lost to rounding above which the run warns.
FROZEN_SHARE = 0.05
# Share of starved experts above which the run warns.
STARVED_SHARE = 0.05


class TrainingHalted(InputError):
    """The run stopped itself because of a bad step. The message says what to change."""

    kind = "halted"
    status = 3

    def __init__(self, step: int, message: str) -> None:
        super().__init__(f"step {step}: {message}")


def some_of(names: Sequence[str]) -> str:
    """Return the first three names and the number of further names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def further_off(place: Sequence[float], usual: Sequence[float]) -> float:
    """Return how far a gradient has moved away from the BF16 gradient, or 0 if it came nearer.

    `place` is (part along the BF16 gradient, norm of the part across it), as shares of the norm of
    the BF16 gradient, which itself is at (1, 0). `usual` is the moving average of the places.
    """
    came_nearer = math.dist(place, (1, 0)) <= math.dist(usual, (1, 0))
    return 0.0 if came_nearer else math.dist(place, usual)


@dataclass(frozen=True)
class StepDecision:
    """Decision about a step, made after its backward and before its update."""

    action: Literal["update", "skip", "rollback", "stop"] = "update"
    # Reason for the user. With "update" it is a warning.
    reason: str | None = None
    # With "stop": what to change.
    remedy: str = ""

    @property
    def proceed(self) -> bool:
        """Return True if the step may update the weights."""
        return self.action == "update"


@dataclass
class HealthState:
    """State of the health checks, which is saved in checkpoints."""

    # Losses of the last WINDOW steps that were not skipped.
    losses: list[float] = field(default_factory=list)
    in_spike: bool = False
    skipped_steps: int = 0
    consecutive_skips: int = 0
    # Incremented by the caller that rolls back.
    rollbacks: int = 0
    # Moving average of the gradients' places relative to BF16, by precision and matrix. See
    # `GapMeter.places`.
    usual_gap: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    # Last step in low precision, if `health.on_gap: switch` has switched to BF16.
    switched_after: int | None = None


class Health:
    """Health checks of one run. Call `check` once per step, before the optimizer."""

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self.state = HealthState()
        # Warnings that this process has already given.
        self._warned: set[str] = set()

    @property
    def may_skip(self) -> bool:
        """Return True if a step may be skipped.

        Then state that changes before the decision, such as amax histories, must be kept.
        """
        return "skip" in (self.settings.on_nan, self.settings.on_spike)

    def check(
        self,
        step: int,
        loss: float,
        gradient_norm: float,
        *,
        can_go_back: bool = False,
        labelled: bool = True,
    ) -> StepDecision:
        """Decide whether a step may update the weights.

        The decision is to stop if the settings say so, after CONSECUTIVE_SKIPS skipped steps in a
        row, and if a rollback is not possible.

        Args:
            step: Number of the step.
            loss: Mean loss in nats per token.
            gradient_norm: Norm of the gradient of all parameters.
            can_go_back: There is a checkpoint to roll back to.
            labelled: Some token of the step has a label. Without labels the loss is 0 and is not
                recorded.
        """
        numbers = {"loss": loss, "gradient norm": gradient_norm}
        broken = [
            f"the {name} is {value}" for name, value in numbers.items() if not math.isfinite(value)
        ]
        if broken:
            return self._decide(step, "on_nan", " and ".join(broken), can_go_back)
        may_spike = labelled and self.settings.on_spike != "ignore"
        spike = self._find_spike(loss) if may_spike else None
        if spike and self.settings.on_spike != "warn":
            return self._decide(step, "on_spike", spike, can_go_back)
        self.state.consecutive_skips = 0
        if labelled:
            self.state.losses = [*self.state.losses[1 - WINDOW :], loss]
        return StepDecision(reason=f"step {step}: {spike}" if spike else None)

    def judge_gap(
        self, step: int, precision: str, places: Mapping[str, Sequence[float]]
    ) -> tuple[StepDecision, dict[str, Any]]:
        """Decide about a step in `precision` from the gap of its gradients to BF16.

        `places` has the place of each matrix's gradient, see `GapMeter.places`. Returns the
        decision, and for the metrics the matrix that has moved furthest from its usual place and
        its distance. With `health.on_gap: switch` the run computes in BF16 after this step.
        """
        usual = self.state.usual_gap.setdefault(precision, {})
        moved = {
            name: further_off(place, usual[name]) for name, place in places.items() if name in usual
        }
        worst = max(
            moved, key=lambda name: math.inf if math.isnan(moved[name]) else moved[name], default=""
        )
        figures = {"gap/moved": moved[worst], "gap/worst": worst} if moved else {}
        if not moved or moved[worst] <= self.settings.gap_threshold:
            for name, place in places.items():
                usual[name] = [
                    old + USUAL_FOLLOWS * (new - old)
                    for old, new in zip(usual.get(name, place), place, strict=True)
                ]
            return StepDecision(), figures
        along, across = places[worst]
        usual_along, usual_across = usual[worst]
        reason = (
            f"low precision changes the gradient of {worst} more than before: relative to the norm "
            f"of the BF16 gradient, its part along that gradient is {percent(along)} (usually "
            f"{percent(usual_along)}) and its part across it {percent(across)} (usually "
            f"{percent(usual_across)})"
        )
        if self.settings.on_gap == "stop":
            remedy = (
                "Keep this matrix in BF16 (`fp8_config.keep_bf16`), in another `run_dir` or from a "
                "checkpoint with --accept-changes"
            )
            return StepDecision("stop", f"{reason}. {_unchanged(step - 1)}", remedy), figures
        if self.settings.on_gap == "switch":
            self.state.switched_after = step
            reason += "; the run computes in BF16 from the next step on"
        return StepDecision(reason=f"step {step}: {reason}"), figures

    def judge_overflow(self, names: Sequence[str], *, can_go_back: bool) -> StepDecision:
        """Decide what to do after an update that left infinity or NaN in the weights `names`.

        Loss and gradient of such a step were finite. The decision is to roll back if `on_nan` says
        so, and to stop otherwise, because a step cannot be skipped after its update.
        """
        reason = f"the update has overflowed, in {some_of(names)}"
        rolls_back = self.settings.on_nan == "rollback"
        obstacle = self._obstacle("rollback", can_go_back) if rolls_back else ""
        if rolls_back and not obstacle:
            return StepDecision("rollback", reason)
        return StepDecision(
            "stop",
            f"{reason}{obstacle}, and this step is not saved: its weights hold infinity or NaN",
            "Lower `optimizer.learning_rate`, and resume from an earlier checkpoint or start a new "
            "run",
        )

    def warnings_of(
        self, step: int, frozen: float, valid_tokens: int, losses: Mapping[str, float]
    ) -> Iterator[str]:
        """Yield warnings about a step. Each warning is given once per process.

        Args:
            step: Number of the step.
            frozen: Share of all updates that rounding has lost.
            valid_tokens: Number of tokens with a label.
            losses: Further losses of the step. "starved_experts" is the share of starved experts.
        """
        warnings = {}
        if frozen > FROZEN_SHARE:
            warnings["frozen"] = (
                f"{percent(frozen)} of all updates were too small to change the stored weights; "
                "`weights: bf16_exact` keeps all"
            )
        if not valid_tokens:
            warnings["unlabelled"] = (
                "no token of the step has a label, so it has no loss; use more packs per step "
                "(`batch.tokens`)"
            )
        starved = losses.get("starved_experts", 0.0)
        if starved > STARVED_SHARE:
            remedy = "`model.config.output_router_logits: true` adds it"
            if "router_loss" in losses:
                remedy = "a larger `router_aux_loss_coef` gives it more weight"
            warnings["starved"] = (
                f"{percent(starved)} of the experts get less than a tenth of their layer's average "
                f"number of tokens; if the architecture has a load balancing loss, {remedy}"
            )
        for name, text in warnings.items():
            if name not in self._warned:
                self._warned.add(name)
                yield f"step {step}: {text}"

    def _decide(
        self, step: int, key: Literal["on_nan", "on_spike"], reason: str, can_go_back: bool
    ) -> StepDecision:
        """Decide about a bad step by the setting `key`, and count skipped steps."""
        state = self.state
        action = getattr(self.settings, key)
        obstacle = self._obstacle(action, can_go_back)
        if action == "rollback" and not obstacle:
            return StepDecision("rollback", reason)
        if action == "skip" and not obstacle:
            state.skipped_steps += 1
            state.consecutive_skips += 1
            return StepDecision(
                "skip", f"step {step} skipped: {reason} ({state.skipped_steps} skipped so far)"
            )
        if key == "on_nan":
            restart = "start again in another `run_dir`"
            if can_go_back:
                restart = "resume from an earlier checkpoint"
            remedy = f"Lower `optimizer.learning_rate` or lengthen `schedule.warmup`, and {restart}"
        else:
            remedy = (
                "If the data of this step is correct, lower `optimizer.learning_rate` or "
                "`optimizer.clip`"
            )
        unchanged = _unchanged(step - 1 - state.consecutive_skips)
        return StepDecision(
            "stop",
            f"{reason}{obstacle}. {unchanged}",
            f"{remedy}. `health.{key}: skip` skips such steps, `rollback` goes back to the last "
            "checkpoint",
        )

    def _obstacle(self, action: str, can_go_back: bool) -> str:
        """Return the end of a sentence that says why `action` is impossible, or ""."""
        if action == "skip" and self.state.consecutive_skips >= CONSECUTIVE_SKIPS:
            return f", and skipping the {CONSECUTIVE_SKIPS} steps before it did not help"
        if action == "rollback" and self.state.rollbacks >= MOST_ROLLBACKS:
            return f", and the run has gone back {MOST_ROLLBACKS} times already"
        if action == "rollback" and not can_go_back:
            return ", and there is no checkpoint yet to go back to (`checkpoint.every`)"
        return ""

    def _find_spike(self, loss: float) -> str | None:
        """Return a description of a spike if `loss` starts one, else None.

        With `on_spike: warn` only the first step of a spike is reported, and a level that stays is
        no spike after half a window. With `skip` or `rollback` the losses of spikes are never
        recorded, so each of their steps is a spike.
        """
        losses = self.state.losses
        if len(losses) < QUIET_START:
            return None
        median = statistics.median(losses)
        deviation = MAD_TO_SD * statistics.median(abs(recent - median) for recent in losses)
        is_high = loss > median + max(SPIKE_DEVIATIONS * deviation, SPIKE_NATS)
        is_new = is_high and not self.state.in_spike
        self.state.in_spike = is_high and self.settings.on_spike == "warn"
        if not is_new:
            return None
        return (
            f"the loss jumped to {loss:.4f}; the last {len(losses)} steps had a median of "
            f"{median:.4f}"
        )


def _unchanged(step: int) -> str:
    """Return the sentence of a stop before an update, for the last `step` that updated weights."""
    return f"The weights are those of step {step}, and nothing is saved after it"
