"""Watches the loss and the gradient norm, and decides when a step must not reach the weights.

docs/troubleshooting.md has the ways to go on after a stop. A spike is a loss far above those of the last hundred steps, by their
median and median absolute deviation, which a single spike does not shift.

Every rank must see the same figures, so that all of them skip, go back or stop together. The state belongs to the checkpoint: a
resumed run warns, skips, goes back and stops where an uninterrupted one would.
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

WINDOW = 100  # recent steps that a loss is compared with
QUIET_START = 20  # finite losses before any is called a spike: fewer do not show the noise
SPIKE_DEVIATIONS = 6.0  # robust standard deviations above the median
# and at least this far above it: late, smooth curves move by six of their tiny deviations
SPIKE_NATS = 0.3
CONSECUTIVE_SKIPS = 10
MOST_ROLLBACKS = 3  # over the whole run, resumed or not; then it stops
# standard deviation of a normal distribution over its median absolute deviation, 1 / Phi^-1(3/4)
MAD_TO_SD = 1.4826
USUAL_FOLLOWS = 0.25  # of the way from what was usual at a look to what is seen at the next
FROZEN_SHARE = 0.05  # of all updates lost: from here on there is a warning
STARVED_SHARE = 0.05  # of all experts: the same


class TrainingHalted(InputError):
    """The run stopped itself over its loss or gradient norm; the message says what to change."""

    kind, status = "halted", 3

    def __init__(self, step: int, message: str) -> None:
        super().__init__(f"step {step}: {message}")


def some_of(names: Sequence[str]) -> str:
    """The first three, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def further_off(place: Sequence[float], usual: Sequence[float]) -> float:
    """How far a gradient has moved away from the one in BF16, which lies at (1, 0); 0 where it has come nearer."""
    return 0.0 if math.dist(place, (1, 0)) <= math.dist(usual, (1, 0)) else math.dist(place, usual)


@dataclass(frozen=True)
class StepDecision:
    """What to do with a step whose gradient is ready, and why, for the user; with `update` the reason is a warning, if any."""

    action: Literal["update", "skip", "rollback", "stop"] = "update"
    reason: str | None = None
    remedy: str = ""  # of a stop: what to change

    @property
    def proceed(self) -> bool:
        return self.action == "update"


@dataclass
class HealthState:
    """What the health of a run's steps is judged by; each checkpoint holds it."""

    losses: list[float] = field(default_factory=list)  # of the last WINDOW steps that count
    in_spike: bool = False
    skipped_steps: int = 0
    consecutive_skips: int = 0
    rollbacks: int = 0  # whoever goes back counts them
    # By precision and matrix, where its gradient usually lies beside the one in BF16, see `GapMeter.places`.
    usual_gap: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    switched_after: int | None = None  # the step after which low precision was given up


class Health:
    """Checks the steps of one run; call `check` once a step, before the optimizer."""

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self.state = HealthState()
        self._warned: set[str] = set()  # by this process

    @property
    def may_skip(self) -> bool:
        """Whether a step may be left out, so that what it changes before it is judged must be kept."""
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
        """Check a step's mean `loss` (nats per token) and the norm of its whole gradient. Of a step that is not `labelled`, the
        loss of 0 tells nothing of what is usual.

        It stops where the settings say so, after CONSECUTIVE_SKIPS skipped steps in a row, and where it should go back but has
        done so MOST_ROLLBACKS times or there is no checkpoint to go to (`can_go_back`).
        """
        figures = {"loss": loss, "gradient norm": gradient_norm}
        broken = [
            f"the {name} is {value}" for name, value in figures.items() if not math.isfinite(value)
        ]
        if broken:
            return self._decide(step, "on_nan", " and ".join(broken), can_go_back)
        reason = self._spike(loss) if labelled and self.settings.on_spike != "ignore" else None
        if reason and self.settings.on_spike != "warn":
            return self._decide(step, "on_spike", reason, can_go_back)
        self.state.consecutive_skips = 0
        if labelled:
            self.state.losses = [*self.state.losses[1 - WINDOW :], loss]
        return StepDecision(reason=f"step {step}: {reason}" if reason else None)

    def judge_gap(
        self, step: int, precision: str, places: Mapping[str, Sequence[float]]
    ) -> tuple[StepDecision, dict[str, Any]]:
        """Decides about a step in `precision` by where its gradients lie beside those in BF16 (`GapMeter.places`). Returns the
        decision, and for the metrics how far the matrix has moved that is furthest from its usual place, and its name. A switch
        takes effect after this step."""
        usual = self.state.usual_gap.setdefault(precision, {})
        moved = {
            name: further_off(place, usual[name]) for name, place in places.items() if name in usual
        }
        worst = max(
            moved, key=lambda name: math.inf if math.isnan(moved[name]) else moved[name], default=""
        )
        figures = {"gap/moved": moved[worst], "gap/worst": worst} if moved else {}
        limit, wanted = self.settings.gap_threshold, self.settings.on_gap
        if not moved or moved[worst] <= limit:
            for name, place in places.items():
                before = usual.get(name, place)
                usual[name] = [
                    old + USUAL_FOLLOWS * (new - old)
                    for old, new in zip(before, place, strict=True)
                ]
            return StepDecision(), figures
        (along, across), (usually_along, usually_across) = places[worst], usual[worst]
        reason = (
            f"low precision changes the gradient of {worst} more than before: along BF16's gradient it has {percent(along)} of "
            f"that one's norm (usually {percent(usually_along)}), across it {percent(across)} (usually {percent(usually_across)})"
        )
        if wanted == "stop":
            untouched = f"The weights are those of step {step - 1}, and nothing is saved after it"
            remedy = "Keep it in BF16 (`fp8_config.keep_bf16`), in another `run_dir` or from a checkpoint with --accept-changes"
            return StepDecision("stop", f"{reason}. {untouched}", remedy), figures
        if wanted == "switch":
            self.state.switched_after = step
            reason += "; from here on the run computes in BF16"
        return StepDecision(reason=f"step {step}: {reason}"), figures

    def judge_overflow(self, names: Sequence[str], *, can_go_back: bool) -> StepDecision:
        """What to do where the last update has left infinity or NaN in weights, called `names`, though its loss and gradient were
        finite: go back where `on_nan` wants that, and else stop, since there is no step to skip any more."""
        reason = f"the update has overflowed, in {some_of(names)}"
        obstacle = self._no_way_back(can_go_back) if self.settings.on_nan == "rollback" else ""
        if self.settings.on_nan == "rollback" and not obstacle:
            return StepDecision("rollback", reason)
        remedy = "Lower `optimizer.learning_rate`, and go on from an earlier checkpoint, or start a new run"
        return StepDecision(
            "stop",
            f"{reason}{obstacle}, and this step is not saved: its weights hold infinity or NaN",
            remedy,
        )

    def warnings_of(
        self, step: int, frozen: float, valid_tokens: int, losses: Mapping[str, float]
    ) -> Iterator[str]:
        """Yields, the first time in this process, that many updates are lost (a share of all), that no token of a step has a
        label, so that it has no loss, and that many of a mixture's experts starve (a share of all, in the step's `losses`)."""
        starved = losses.get("starved_experts", 0.0)
        larger, trains = (
            "a larger `router_aux_loss_coef` weighs it more",
            "`model.config.output_router_logits: true` trains it",
        )
        found = {
            "frozen": frozen > FROZEN_SHARE
            and f"{percent(frozen)} of all updates were too small to change the stored weights; `weights: bf16_exact` keeps all",
            "unlabelled": not valid_tokens
            and "no token of its packs has a label, so it has no loss; take more packs a step (`batch.tokens`)",
            "starved": starved > STARVED_SHARE
            and f"{percent(starved)} of the experts get less than a tenth of what their layer's get on average; "
            f"where the architecture has a loss for their balance, {larger if 'router_loss' in losses else trains}",
        }
        for name, text in found.items():
            if text and name not in self._warned:
                self._warned.add(name)
                yield f"step {step}: {text}"

    def _decide(
        self, step: int, key: Literal["on_nan", "on_spike"], reason: str, can_go_back: bool
    ) -> StepDecision:
        wanted, state, obstacle = getattr(self.settings, key), self.state, ""
        if wanted == "skip":
            if state.consecutive_skips < CONSECUTIVE_SKIPS:
                state.skipped_steps += 1
                state.consecutive_skips += 1
                return StepDecision(
                    "skip", f"step {step} skipped: {reason} ({state.skipped_steps} skipped so far)"
                )
            obstacle = f", and the {CONSECUTIVE_SKIPS} steps before it were skipped for the like without effect"
        elif wanted == "rollback":
            obstacle = self._no_way_back(can_go_back)
            if not obstacle:
                return StepDecision("rollback", reason)
        untouched = f"The weights are those of step {step - 1 - state.consecutive_skips}, and nothing is saved after it"
        remedy = "If the text at this step is as it should be, lower `optimizer.learning_rate` or `optimizer.clip`"
        if key == "on_nan":
            again = (
                "resume from an earlier checkpoint"
                if can_go_back
                else "start again in another `run_dir`"
            )
            remedy = f"Lower `optimizer.learning_rate` or lengthen `schedule.warmup`, and {again}"
        other = f"`health.{key}`: `skip` leaves such steps out, `rollback` goes back to the last checkpoint"
        return StepDecision("stop", f"{reason}{obstacle}. {untouched}", f"{remedy}. {other}")

    def _no_way_back(self, can_go_back: bool) -> str:
        """The end of a sentence that says why not; empty where there is one."""
        if self.state.rollbacks >= MOST_ROLLBACKS:
            return f", and the run has gone back {MOST_ROLLBACKS} times already"
        return (
            ""
            if can_go_back
            else ", and there is no checkpoint yet to go back to (`checkpoint.every`)"
        )

    def _spike(self, loss: float) -> str | None:
        """What a spike is, when it begins and not at each of its steps. A level that stays is no spike after half a window; but
        where spikes are left out or gone back from, their losses never become usual, and each of them is one."""
        if len(self.state.losses) < QUIET_START:
            return None
        usual = statistics.median(self.state.losses)
        deviation = MAD_TO_SD * statistics.median(abs(each - usual) for each in self.state.losses)
        is_high = loss > usual + max(SPIKE_DEVIATIONS * deviation, SPIKE_NATS)
        began, self.state.in_spike = (
            is_high and not self.state.in_spike,
            is_high and self.settings.on_spike == "warn",
        )
        if not began:
            return None
        return f"the loss jumped to {loss:.4f}; the last {len(self.state.losses)} steps had a median of {usual:.4f}"
