"""Check the loss and gradient norm of each step, and decide if the step may update the weights.

A spike is a loss far above the losses of the last hundred steps. The checks estimate the usual loss
by the median of these losses, and the noise by the median absolute deviation. A single spike hardly
changes these two numbers.

All ranks must call the checks with the same numbers. Then all ranks skip a step, roll back or stop
together. The state of the checks is saved in checkpoints. A resumed run therefore warns, skips,
rolls back and stops at the same steps as a run that was not interrupted. docs/training.md
lists the remedies after a stop.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from foundation.errors import InputError
from foundation.units import percent
from pretrain.settings.recipe import HealthSettings

# Number of recent losses with which the loss of a step is compared.
COMPARED_LOSSES = 100
# Number of losses that must be recorded before the first spike can be detected. Fewer losses do not
# suffice to measure the noise.
FEWEST_LOSSES = 20
# A spike exceeds the median loss by more than this number of robust standard deviations.
SPIKE_DEVIATIONS = 6.0
# A spike also exceeds the median loss by more than this number of nats. Late in a run the standard
# deviation is small, so harmless changes of the loss often exceed six standard deviations.
SPIKE_NATS = 0.3
# Maximum number of skipped steps in a row. If the next step is bad too, the run stops.
CONSECUTIVE_SKIPS = 10
# Maximum number of rollbacks of a run, including the rollbacks before a resume. If another rollback
# is needed, the run stops.
MOST_ROLLBACKS = 3
# Ratio of the standard deviation to the median absolute deviation of a normal distribution,
# 1 / Phi^-1(3/4).
MAD_TO_SD = 1.4826
# The run warns if rounding loses more than this share of all updates.
LOST_SHARE = 0.05
# The run warns if more than this share of the experts is starved. A starved expert gets less than a
# tenth of its layer's average number of tokens.
STARVED_SHARE = 0.05


class TrainingHalted(InputError):
    """Exception of a run that stops itself because of a bad step. The message has the remedy."""

    kind = "halted"
    status = 3

    def __init__(self, step: int, message: str) -> None:
        super().__init__(f"step {step}: {message}")


def some_of(names: Sequence[str]) -> str:
    """Return a text with the first three names and the number of the remaining names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@dataclass(frozen=True)
class StepDecision:
    """Decision about a step after its backward, or after its update (`judge_overflow`)."""

    action: Literal["update", "skip", "rollback", "stop"] = "update"
    # Reason for the decision, which is shown to the user. With the action "update" it is a warning,
    # or None if there is nothing to report.
    reason: str | None = None
    # Advice for the user. Set for the action "stop" only.
    remedy: str = ""

    @property
    def proceed(self) -> bool:
        """Return True if the step may update the weights."""
        return self.action == "update"


@dataclass
class HealthState:
    """State of the health checks. It is saved in checkpoints."""

    # Losses of the last COMPARED_LOSSES steps that had labels and were not skipped.
    losses: list[float] = field(default_factory=list)
    # True if the last step belonged to a spike. Used with `health.on_spike: warn` only.
    in_spike: bool = False
    # Number of skipped steps of the run.
    skipped_steps: int = 0
    # Number of steps that were skipped since the last update.
    consecutive_skips: int = 0
    # Number of rollbacks of the run. The function that rolls back increments it.
    rollbacks: int = 0


@dataclass
class Health:
    """Health checks of one run. Call `check` once per step, before the optimizer's update."""

    settings: HealthSettings
    state: HealthState = field(default_factory=HealthState)
    # Names of the warnings that this process has already given.
    _warned: set[str] = field(default_factory=set, init=False)

    @property
    def may_skip(self) -> bool:
        """Return True if the settings allow that a step is skipped.

        If True, the caller must copy the state that forward and backward change, such as amax
        histories. When a step is skipped, the caller restores this copy.
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

        A step is bad if its loss or gradient norm is not finite, or if its loss is a spike. For a
        bad step, the settings determine the action. The action is "stop" instead of "skip" after
        CONSECUTIVE_SKIPS skipped steps in a row, and "stop" instead of "rollback" if a rollback is
        not possible.

        Args:
            step: Number of the step.
            loss: Mean loss in nats per token.
            gradient_norm: Norm of the gradient of all parameters.
            can_go_back: True if there is a checkpoint to roll back to.
            labelled: True if at least one token of the step has a label. Without labels the loss
                is 0 and is not recorded.
        """
        broken = [
            f"the {name} is {value}"
            for name, value in (("loss", loss), ("gradient norm", gradient_norm))
            if not math.isfinite(value)
        ]
        if broken:
            return self._decide(step, "on_nan", " and ".join(broken), can_go_back)
        may_spike = labelled and self.settings.on_spike != "ignore"
        spike = self._find_spike(loss) if may_spike else None
        if spike and self.settings.on_spike != "warn":
            return self._decide(step, "on_spike", spike, can_go_back)
        self.state.consecutive_skips = 0
        if labelled:
            self.state.losses = [*self.state.losses, loss][-COMPARED_LOSSES:]
        return StepDecision(reason=f"step {step}: {spike}" if spike else None)

    def judge_overflow(self, names: Sequence[str], *, can_go_back: bool) -> StepDecision:
        """Decide how to continue after an update that wrote infinity or NaN into weights.

        The decision is to roll back if `health.on_nan` is "rollback" and a rollback is possible.
        Otherwise the decision is to stop, because a step cannot be skipped after its update.

        Args:
            names: Names of the weights with infinity or NaN.
            can_go_back: True if there is a checkpoint to roll back to.
        """
        reason = f"the update has written infinity or NaN into {some_of(names)}"
        obstacle = self._obstacle("rollback", can_go_back)
        if self.settings.on_nan == "rollback" and not obstacle:
            return StepDecision("rollback", reason)
        return StepDecision(
            "stop",
            f"{reason}. The weights of this step are not saved",
            "Lower `optimizer.learning_rate`. Then either resume from an earlier checkpoint, or "
            "start a new run",
        )

    def warnings_of(
        self, step: int, lost_share: float, valid_tokens: int, losses: Mapping[str, float]
    ) -> Iterator[str]:
        """Yield the warnings about a step. Each kind of warning is given once per process.

        Args:
            step: Number of the step.
            lost_share: Share of all updates that were lost to rounding.
            valid_tokens: Number of tokens with a label.
            losses: Losses and statistics of the step by name. `starved_experts` is the share of
                starved experts.
        """
        warnings = {}
        if lost_share > LOST_SHARE:
            warnings["lost"] = (
                f"{percent(lost_share)} of all updates were too small to change the stored "
                "weights; set `weights: bf16_exact` to keep all updates"
            )
        if not valid_tokens:
            warnings["unlabelled"] = (
                "no token of the step has a label, so the step has no loss; raise `batch.tokens` "
                "to train on more packs per step"
            )
        starved = losses.get("starved_experts", 0.0)
        if starved > STARVED_SHARE:
            warnings["starved"] = (
                f"{percent(starved)} of the experts get less than a tenth of their layer's average "
                "number of tokens; either add the load balancing loss of the architecture with "
                "`model.config.output_router_logits: true`, or raise its weight, "
                "`model.config.router_aux_loss_coef`"
            )
        for name, text in warnings.items():
            if name not in self._warned:
                self._warned.add(name)
                yield f"step {step}: {text}"

    def _decide(
        self, step: int, key: Literal["on_nan", "on_spike"], reason: str, can_go_back: bool
    ) -> StepDecision:
        """Return the decision about a bad step, and count the step if it is skipped.

        Args:
            step: Number of the step.
            key: Key of the setting that determines the action.
            reason: Description of the problem.
            can_go_back: True if there is a checkpoint to roll back to.
        """
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
            remedy = (
                "Lower `optimizer.learning_rate` or raise `schedule.warmup`. Then either resume "
                "from an earlier checkpoint, or start again in another `run_dir`"
            )
        else:
            remedy = (
                "If the data of this step is correct, lower `optimizer.learning_rate` or "
                "`optimizer.clip`"
            )
        other = "rollback" if action == "skip" else "skip"
        updated = step - 1 - state.consecutive_skips
        return StepDecision(
            "stop",
            f"{reason}{obstacle}. The weights are those of step {updated}, and no later step is "
            "saved",
            f"{remedy}. Alternatively, set `health.{key}: {other}`",
        )

    def _obstacle(self, action: str, can_go_back: bool) -> str:
        """Return the reason why `action` is impossible, or "" if `action` is possible.

        The reason is a clause that the caller appends to a sentence.
        """
        if action == "skip" and self.state.consecutive_skips >= CONSECUTIVE_SKIPS:
            return f", and the {CONSECUTIVE_SKIPS} steps before this step were skipped already"
        if action == "rollback" and self.state.rollbacks >= MOST_ROLLBACKS:
            return f", and the run has gone back {MOST_ROLLBACKS} times already"
        if action == "rollback" and not can_go_back:
            return ", and there is no checkpoint yet to go back to (see `checkpoint.every`)"
        return ""

    def _find_spike(self, loss: float) -> str | None:
        """Return a description of the spike if `loss` is a spike that must be reported, else None.

        With `on_spike: warn` only the first step of a spike is reported, and all losses are
        recorded. If the loss stays high, the median rises after COMPARED_LOSSES / 2 steps, and the
        spike ends. With `skip` or `rollback`, every step of a spike is reported, and the losses of
        a spike are not recorded.
        """
        losses = self.state.losses
        if len(losses) < FEWEST_LOSSES:
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
