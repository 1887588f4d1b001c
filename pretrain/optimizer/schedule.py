"""The learning rate as a pure function of the step, so that resuming needs no scheduler state.

Steps count from 0 here and from 1 wherever a user sees them. No step has a rate of zero, which would waste its work: warm-up
begins at 1 / warmup of the peak, and decay would reach its end at step `total_steps`, which is never run. From the end of warm-up
on, this is what `transformers.get_wsd_schedule` with decay_type="linear" and torch's CosineAnnealingLR and LinearLR compute.
"""

from __future__ import annotations

import io
import math
from pathlib import Path

from foundation.errors import InputError
from foundation.files import WRITTEN_BY, check_replaceable, save_file
from pretrain.settings.recipe import OptimizerSettings, ScheduleSettings

_MOST_POINTS = 10_000  # that a drawing has; it is 1,200 pixels wide


def learning_rate(step: int, settings: ScheduleSettings, optimizer: OptimizerSettings, total_steps: int) -> float:
    """Learning rate of `step` (0 is the first). Beyond `total_steps` it stays at the schedule's end."""
    return optimizer.learning_rate * _factor(step, settings, total_steps)


def _factor(step: int, settings: ScheduleSettings, total_steps: int) -> float:
    warmup = settings.warmup
    if step < warmup:
        return (step + 1) / warmup
    if settings.kind == "constant":
        return 1.0
    decay = decay_steps(settings, total_steps) if settings.kind == "wsd" else total_steps - warmup
    start = total_steps - decay
    if step < start:
        return 1.0
    progress = min(1.0, (step - start) / decay) if decay else 0.0
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if settings.kind == "cosine" else 1.0 - progress
    return settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * remaining


def decay_steps(settings: ScheduleSettings, total_steps: int) -> int:
    """Steps of wsd's decay, the nearest whole number: 20 % of 2,776 are 555, which start at step 2,221. Other kinds: 0."""
    return round(settings.decay * total_steps) if settings.kind == "wsd" else 0


def decay_begins(settings: ScheduleSettings, total_steps: int) -> int | None:
    """The number of steps after which the rate begins to fall; None where it never does."""
    if settings.kind not in ("wsd", "constant"):
        return settings.warmup
    decay = decay_steps(settings, total_steps)
    return total_steps - decay if decay else None


def check(settings: ScheduleSettings, total_steps: int) -> None:
    """Raise InputError where warm-up and decay do not fit into the horizon."""
    warmup, key = settings.warmup, f"schedule.warmup: {settings.warmup}"
    if warmup > total_steps:
        raise InputError(
            f"`{key}` takes {warmup:,} steps, but the run has {total_steps:,} steps; shorten it or train longer (`train`)"
        )
    decay = decay_steps(settings, total_steps)
    if warmup + decay > total_steps:
        raise InputError(
            f"`{key}` ({warmup:,} steps) and `schedule.decay: {settings.decay:g}` ({decay:,} steps) do not fit into "
            f"{total_steps:,} steps; shorten one of them or train longer (`train`)"
        )


def preview(
    settings: ScheduleSettings, optimizer: OptimizerSettings, total_steps: int, tokens_per_step: int, path_png: Path
) -> str:
    """Draw the rate of every step (of 10,000 where there are more) to `path_png`; returns the schedule in a line.

    Raises InputError as `check` does, and where the PNG cannot be written or another file lies there.
    """
    from matplotlib.figure import Figure  # not pyplot, which would pick a display and keep state for the whole process

    if path_png.suffix.lower() != ".png":
        raise InputError(f"{path_png}: the schedule is drawn as a PNG; give the file a name that ends in .png")
    check_replaceable(path_png, "schedule PNG")
    check(settings, total_steps)
    title = describe(settings, optimizer, total_steps)
    steps = range(1, total_steps + 1, math.ceil(total_steps / _MOST_POINTS))
    rates = [learning_rate(step - 1, settings, optimizer, total_steps) for step in steps]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step", ylabel="learning rate", ylim=(0, max(rates) * 1.08))
    axes.plot(steps, rates, linewidth=1.8)
    axes.grid(alpha=0.3)
    tokens = axes.secondary_xaxis("top", functions=(lambda s: s * tokens_per_step, lambda t: t / tokens_per_step))
    tokens.set_xlabel("tokens")
    figure.savefig(picture := io.BytesIO(), format="png", dpi=150, metadata={"Software": WRITTEN_BY})
    save_file(path_png, picture.getvalue())
    return title


def describe(settings: ScheduleSettings, optimizer: OptimizerSettings, total_steps: int) -> str:
    """The schedule in a line: its kind, its phases in steps, its peak and its end."""
    warmup, peak = settings.warmup, optimizer.learning_rate
    phases = [f"warmup {warmup:,}"] if warmup else []
    if settings.kind == "wsd":
        decay = decay_steps(settings, total_steps)
        phases += [f"stable {total_steps - warmup - decay:,}", f"decay {decay:,}"]
    else:
        phases += [f"{settings.kind} {total_steps - warmup:,}"]
    end = "" if settings.kind == "constant" else f" to {peak * settings.min_lr_ratio:g}"
    return f"{settings.kind}: {' + '.join(phases)} = {total_steps:,} steps, peak {peak:g}{end}"
