"""The learning rate as a pure function of the step, so that resuming needs no scheduler state.

Steps count from 0 here and from 1 wherever a user sees them. No step has a rate of zero, which would waste its work: warm-up
begins at 1 / warmup of the peak, and decay would reach its end at step `total_steps`, which is never run. From the end of warm-up
on, this is what `transformers.get_wsd_schedule` and torch's CosineAnnealingLR and LinearLR compute.
"""

from __future__ import annotations

import math

from foundation.errors import InputError
from pretrain.settings.recipe import OptimizerSettings, ScheduleSettings

# The share of the decay still to come, by its progress from 0 to 1.
_REMAINING = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


def learning_rate(
    step: int, settings: ScheduleSettings, optimizer: OptimizerSettings, total_steps: int
) -> float:
    """Learning rate of `step` (0 is the first). Beyond `total_steps` it stays at the schedule's end."""
    peak, warmup = optimizer.learning_rate, settings.warmup
    if step < warmup:
        return peak * ((step + 1) / warmup)
    decay = decay_steps(settings, total_steps) if settings.kind == "wsd" else total_steps - warmup
    start = total_steps - decay
    if settings.kind == "constant" or step < start:
        return peak
    progress = min(1.0, (step - start) / decay) if decay else 0.0
    shape = settings.decay_shape if settings.kind == "wsd" else settings.kind
    return peak * (
        settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * _REMAINING[shape](progress)
    )


def decay_steps(settings: ScheduleSettings, total_steps: int) -> int:
    """Steps of wsd's decay, the nearest whole number: 20 % of 2,776 are 555, which start at step 2,221. Other kinds: 0."""
    return round(settings.decay * total_steps) if settings.kind == "wsd" else 0


def decay_begins(settings: ScheduleSettings, total_steps: int) -> int | None:
    """The number of steps after which wsd's rate begins to fall; None where it never does, and of other kinds."""
    decay = decay_steps(settings, total_steps)
    return total_steps - decay if decay else None


def check(settings: ScheduleSettings, total_steps: int) -> None:
    """Raise InputError where warm-up and decay do not fit into the horizon."""
    warmup, decay = settings.warmup, decay_steps(settings, total_steps)
    if warmup + decay > total_steps:
        falls = f" and `schedule.decay: {settings.decay:g}` ({decay:,} steps)" if decay else ""
        room = f"there is no room in {total_steps:,} steps; shorten one, or train longer (`train`)"
        raise InputError(f"for `schedule.warmup: {warmup}`{falls} {room}")


def describe(settings: ScheduleSettings, optimizer: OptimizerSettings, total_steps: int) -> str:
    """The schedule in a line: its kind, its phases in steps, its peak and its end."""
    warmup, peak = settings.warmup, optimizer.learning_rate
    phases = [f"warmup {warmup:,}"] if warmup else []
    if settings.kind == "wsd":
        decay = decay_steps(settings, total_steps)
        phases += [
            f"stable {total_steps - warmup - decay:,}",
            f"{settings.decay_shape} decay {decay:,}",
        ]
    else:
        phases += [f"{settings.kind} {total_steps - warmup:,}"]
    end = "" if settings.kind == "constant" else f" to {peak * settings.min_lr_ratio:g}"
    return f"{settings.kind}: {' + '.join(phases)} = {total_steps:,} steps, peak {peak:g}{end}"
