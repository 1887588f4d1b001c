"""Print plans: `python -m pretrain plan` for other devices, `train --plan` for this machine."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from typing import cast

from foundation import units
from foundation.errors import InputError
from foundation.units import GIB, TERA, UNKNOWN, markdown, plural
from pretrain.launch.environment import with_precision
from pretrain.metrics.console import Console
from pretrain.metrics.peaks import Peak, entry_of
from pretrain.model.distributed import as_launched
from pretrain.plan.plan import KEPT_FREE, Plan
from pretrain.plan.rendering import (
    ASSUMED_SHARES,
    flops_line,
    horizon_lines,
    in_subjects,
    model_lines,
    render,
    width,
)
from pretrain.plan.targets import devices_called, obstacle, plan_on
from pretrain.run.job import Job, plan_elsewhere
from pretrain.run.resume_point import where_to_resume
from pretrain.settings.commands import USUAL
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

# A model with fewer parameters spends more time on kernel launches than on matrix products.
SMALL = 50_000_000
# The precision of `python -m pretrain plan` if neither the recipe nor the command line sets a
# precision. It is the precision of a launch on GPUs, where bf16.yaml or ddp.yaml sets it.
DEFAULT_PRECISION = "bf16"
WHY_DEFAULT = (
    f"{DEFAULT_PRECISION} is the precision of a launch of this recipe on GPUs, because the recipe "
    "sets no precision and accelerate_configs/bf16.yaml sets bf16; on a CPU, cpu.yaml sets fp32"
)


def main(options: argparse.Namespace) -> int:
    """Print the plan of a recipe for the devices in --on, and return 0.

    Raises InputError for invalid options, and if the recipe cannot be planned.
    """
    if any(share > 1 for share in options.mfu):
        raise InputError(
            "--mfu: the MFU must not be above 1; for 40 % of the peak, write --mfu 0.4"
        )
    targets = [devices_called(text) for text in options.on or USUAL]
    loaded = load_recipe(options.recipe, options.overrides)
    # Emulate precisions that this machine does not support, because the plan is for other machines.
    planned = emulating(loaded).model_copy(
        update={"precision": loaded.precision or DEFAULT_PRECISION}
    )
    recipe = with_precision(planned, os.environ)
    accelerator, notices = as_launched(recipe)
    plan, shapes = plan_elsewhere(recipe, accelerator, options.overrides)
    plans = [plan_on(devices, plan, shapes) for devices in targets]

    print(
        f"{plan.recipe.name}: {plan.schedule.label} compute, {plan.recipe.weights} weights\n"
        f"{'─' * width()}"
    )
    subjects: dict[str, Sequence[str]] = {
        "model": model_lines(plan),
        "horizon": horizon_lines(plan),
        "FLOPs": [flops_line(plan)],
    }
    print(in_subjects(subjects), end="\n\n")
    shares = sorted(options.mfu or ASSUMED_SHARES)
    print(
        markdown(
            ["on", "microbatch", "needs", "available", "tokens/s", "time"],
            [_row(planned, shares) for planned in plans],
        )
    )
    notes = [
        *([] if loaded.precision else [WHY_DEFAULT]),
        *_notes(plan, shares, is_mfu_stated=bool(options.mfu)),
        *_reasons(plans),
        *([plan.flops.left_out] if plan.flops.uncounted else []),
        *plan.notices,
        *notices,
    ]
    print("\n".join(textwrap.fill(f"* {text}", width(), subsequent_indent="  ") for text in notes))
    return 0


def emulating(recipe: Recipe) -> Recipe:
    """Return a copy of the recipe that emulates each precision that this machine does not support.

    So a launch on GPUs can be planned on a machine without a GPU.
    """
    return recipe.model_copy(
        update={"fp8_config": recipe.fp8_config.model_copy(update={"on_unsupported": "emulate"})}
    )


def _notes(plan: Plan, shares: Sequence[float], *, is_mfu_stated: bool) -> list[str]:
    """Return the lines that explain, below the table of times, how the times were estimated.

    shares: the MFUs of the table's columns, as fractions. MFU is the speed of a training
        divided by the peak speed of its device.
    is_mfu_stated: True if the user has set the MFUs by --mfu, False if they are defaults.
    """
    source = "from --mfu" if is_mfu_stated else "assumed; --mfu sets another share"
    listed = " to ".join(f"{100 * share:.3g}" for share in shares)
    notes = [
        f"the time is the time of all training steps at {listed} % of the peak ({source}); n "
        "devices are assumed to be n times as fast as one device",
        "the microbatch is set by the recipe, or is the largest one that leaves "
        f"{units.percent(KEPT_FREE)} of a device's memory free",
    ]
    if not is_mfu_stated and plan.flops.parameters < SMALL:
        notes.append(
            "training will take longer than these times, because the steps of such a small model "
            "mostly wait for kernel launches"
        )
    if not plan.packs:
        notes.append(
            "the FLOPs are an upper limit, which counts each pack as one document, because no "
            "packs are prepared here"
        )
    return notes


def _reasons(plans: Sequence[Plan]) -> list[str]:
    """Return lines "DEVICES: reason" about devices with restrictions.

    A reason explains why the devices cannot run the plan, or why experts compute in BF16 on them.

    plans: the plans of the recipe on all devices.
    """
    devices = defaultdict(list)
    for plan in plans:
        missing = obstacle(plan)
        for reason in [missing] if missing else plan.experts_in_bf16:
            devices[reason].append(str(plan.devices))
    return [f"{', '.join(names)}: {reason}" for reason, names in devices.items()]


def print_plan(job: Job, console: Console, resume_from: str, accept_changes: bool) -> int:
    """Print the plan of a launch on this machine, and the checkpoint that it resumes. Return 0.

    resume_from: the value of --resume.
    accept_changes: True if --accept-changes is given.

    Raises InputError if the launch would be refused.
    """
    job, _, source = where_to_resume(job, resume_from, accept_changes)
    lines = [
        render(job.plan),
        *(
            f"to plan {active.requested} on other devices, use `python -m pretrain plan RECIPE "
            f"precision={active.requested}`; to train in emulation here, set "
            "`fp8_config.on_unsupported: emulate`"
            for active in job.plan.precisions
            if active.reason
        ),
    ]
    if source is not None:
        verb = "the run is finished at" if source.step >= job.plan.steps else "would resume from"
        lines += [f"{verb} {source.path}", *source.notes]
    console.notice("\n".join(lines))
    return 0


def _row(plan: Plan, shares: Sequence[float]) -> list[str]:
    """Return the row of the devices of `plan` in the table.

    shares: the MFUs of the table's columns, ascending.
    """
    devices = plan.devices
    if obstacle(plan):
        return [str(devices), *[UNKNOWN] * 5]
    size = min(plan.expected_microbatch, plan.packs_per_rank)
    takes = plan.takes(size)
    # Neither the device nor its peak is None, because `obstacle` has found no obstacle.
    available = cast(Peak, entry_of(devices.name)).memory
    peak = cast(float, plan.peak_tflops) * TERA
    fits = takes <= available * GIB
    # `devices.memory` is the part of the available memory that a plan should use.
    remark = ""
    if takes > devices.memory:
        remark = ": barely fits" if fits else ": does not fit"
    microbatches = -(-plan.packs_per_rank // size)
    shards = " in shards" if devices.sharded else ""
    host = f" + {units.memory(plan.host_memory / GIB)} host" if plan.host_memory else ""
    speeds = [share * peak / plan.flops_per_token for share in (shares if fits else ())]
    return [
        str(devices),
        f"{microbatches} x {plural(size, 'pack')}{shards}{remark}",
        units.memory(takes / GIB) + host,
        units.memory(available),
        " to ".join(f"{speed:,.0f}" for speed in speeds) or UNKNOWN,
        " to ".join(units.duration(plan.total_tokens / speed) for speed in speeds) or UNKNOWN,
    ]
