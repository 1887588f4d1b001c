"""Going over from one precision to the next between two steps, where `precision` is a schedule.

When that is follows from the settings alone. A run that is resumed at that step does again what the unbroken run did there, and
at any later one it finds the histories in its checkpoint. So both have the same bits.
"""

from __future__ import annotations

from pretrain.precision.settings import ActivePrecision
from pretrain.run.resume import ResumePoint, complete_histories, precisions_around
from pretrain.run.running import Run
from pretrain.verify.audit import in_short


def follow_the_schedule(run: Run) -> None:
    """Goes over to the precision of the next step, if that is another. Call it between two steps, before random numbers are drawn
    for the next. Collective."""
    coming, present = run.job.plan.active_after(run.state.step), run.assembly.active
    if coming.precision.name != present.precision.name:
        begin(run, coming, present.precision.name)


def go_on_as_scheduled(run: Run, source: ResumePoint) -> None:
    """Goes over to the precision that the run's last step before the checkpoint `source` computed in, once it was read; the next
    step changes it where it is in another. A run that begins with another's checkpoint has no such step, and is in the precision
    of its next one. Histories that the checkpoint lacks begin here. Collective."""
    (before, _), plan = precisions_around(source.record), run.job.plan
    if plan.phases:
        ran = None if source.begins else before or source.record["identity"].get("precision")
        last = next((each for each in plan.actives if each.requested == ran), plan.active_after(run.state.step))
        run.assembly.use(last)
        look_after(run, last, first_step=1)
    note = complete_histories(source, run.assembly, run.job, run.accelerator)
    if note:
        run.console.notice(note)


def begin(run: Run, active: ActivePrecision, before: str) -> None:
    """Go over to `active` here, and say so; `before`: the precision's name so far."""
    with run.waited.on("checks", "looking at what runs"):
        run.assembly.begin(active, run.job, run.accelerator)
    look_after(run, active, first_step=run.state.step + 1)
    products, step = in_short(run.assembly.audit)["products"], run.state.step
    run.console.notice(f"precision after step {step}: {before}, then {active.precision.name}, audited anew: {products}")


def look_after(run: Run, active: ActivePrecision, first_step: int) -> None:
    """Let all that knows the precision of a step know that it is `active` now; `first_step`: the one whose operands are measured
    in any case."""
    run.job = run.job.in_precision(active)
    run.health.precision_remedy = run.job.precision_remedy
    run.recorder.low_precision = run.assembly.low_precision_products(run.job.plan.devices.name)
    if run.precision_watch:
        run.precision_watch.go_over_to(active, first_step)
