"""The learning rate as a function of the step.

The learning rate depends on the step and the settings alone, so checkpoints contain no state of a
scheduler. In this file the first step has the number 0. In settings, logs and messages it has the
number 1.

No step has a learning rate of zero, because such a step would not change the weights. Warm-up
starts at 1 / warmup of the peak. Decay would reach its end at step `total_steps`, but the last step
of the run is `total_steps` - 1. After warm-up, `transformers.get_wsd_schedule`, and
CosineAnnealingLR and LinearLR of torch give the same learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foundation.errors import InputError
from foundation.units import plural
from pretrain.settings.config import HORIZON, parse_overrides
from pretrain.settings.recipe import Recipe, ScheduleSettings

# Map each shape of the decay to a function. The function maps the progress of the decay (0 to 1) to
# the fraction of the decay that remains (1 to 0).
_REMAINING = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
# Keys that set the number of steps.
_LENGTH = {"train", "batch.tokens", *HORIZON}


def learning_rate(step: int, settings: ScheduleSettings, peak: float, total_steps: int) -> float:
    """Return the learning rate of step `step`, where 0 is the first step.

    If `step` is `total_steps` or more, return the final learning rate of the schedule.

    peak: the largest learning rate.
    """
    if step < settings.warmup:
        return peak * ((step + 1) / settings.warmup)
    decay = total_steps - settings.warmup
    shape: str = settings.kind
    if settings.kind == "wsd":
        decay = decay_steps(settings, total_steps)
        shape = settings.decay_shape
    start = total_steps - decay
    if settings.kind == "constant" or step < start:
        return peak
    progress = min(1.0, (step - start) / decay) if decay else 0.0
    remaining = _REMAINING[shape](progress)
    return peak * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * remaining)


def decay_steps(settings: ScheduleSettings, total_steps: int) -> int:
    """Return the number of decay steps of a wsd schedule, or 0 for other kinds of schedules.

    The number is rounded. For example, 20 % of 2,776 steps are 555 steps, and the decay starts at
    step 2,221.
    """
    return round(settings.decay * total_steps) if settings.kind == "wsd" else 0


def decay_begins(settings: ScheduleSettings, total_steps: int) -> int | None:
    """Return the step at which the decay of a wsd schedule starts, where 0 is the first step.

    Return None for a wsd schedule without decay steps, and for other kinds of schedules.
    """
    decay = decay_steps(settings, total_steps)
    return total_steps - decay if decay else None


def check(settings: ScheduleSettings, total_steps: int) -> None:
    """Raise InputError if warm-up and decay together have more than `total_steps` steps."""
    decay = decay_steps(settings, total_steps)
    if settings.warmup + decay > total_steps:
        of_decay = (
            f" and `schedule.decay: {settings.decay:g}` ({plural(decay, 'step')})" if decay else ""
        )
        raise InputError(
            f"the schedule with `schedule.warmup: {settings.warmup}`{of_decay} is longer than the "
            f"run of {plural(total_steps, 'step')}; either shorten the schedule, or train more "
            "steps (`train`)"
        )


def fit_to_command_line(
    recipe: Recipe, overrides: Sequence[str], steps: int
) -> tuple[Recipe, list[str]]:
    """Shorten a schedule that is longer than the run, if `overrides` set the length of the run.

    Return the recipe, and a list with a notice if the schedule was shortened. Otherwise the recipe
    is unchanged and the list is empty. `check` then rejects a schedule that is too long.

    recipe: recipe that contains the values of `overrides` already.
    steps: number of steps of the run.
    """
    given = {key for key, _ in parse_overrides(overrides)}
    fitted = shorten(recipe.schedule, steps, keep_warmup="schedule.warmup" in given)
    if not given & _LENGTH or fitted == recipe.schedule:
        return recipe, []
    return recipe.model_copy(update={"schedule": fitted}), [
        f"the schedule is shortened to {describe(fitted, recipe.optimizer.learning_rate, steps)}"
    ]


def shorten(settings: ScheduleSettings, total_steps: int, *, keep_warmup: bool) -> ScheduleSettings:
    """Return a schedule that fits into `total_steps` steps, or `settings` if `settings` fit.

    Warm-up and decay are shortened in proportion. At least one step comes after the warm-up.

    keep_warmup: True to shorten only the decay. A warm-up of `total_steps` steps or more is
        shortened in any case.
    """
    decay = decay_steps(settings, total_steps)
    needed = settings.warmup + max(decay, 1)
    if not 0 < total_steps < needed:
        return settings
    fits = keep_warmup and settings.warmup < total_steps
    warmup = settings.warmup if fits else total_steps * settings.warmup // needed
    return settings.model_copy(
        update={
            "warmup": warmup,
            "decay": (total_steps - warmup) / total_steps if decay else settings.decay,
        }
    )


def describe(settings: ScheduleSettings, peak: float, total_steps: int) -> str:
    """Return one line that describes the schedule of the learning rate.

    The line has the kind of the schedule, the number of steps of each phase, the peak and the final
    learning rate.
    """
    decay = decay_steps(settings, total_steps)
    phases = {"warmup": settings.warmup}
    if settings.kind == "wsd":
        phases["stable"] = total_steps - settings.warmup - decay
        phases[f"{settings.decay_shape} decay"] = decay
    else:
        phases[settings.kind] = total_steps - settings.warmup
    text = " + ".join(f"{phase} {steps:,}" for phase, steps in phases.items() if steps)
    end = "" if settings.kind == "constant" else f" to {peak * settings.min_lr_ratio:g}"
    return f"{settings.kind}: {text} = {plural(total_steps, 'step')}, peak {peak:g}{end}"
