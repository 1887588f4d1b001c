"""Print plans: `python -m pretrain plan` for other devices, `train --plan` for this machine."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from typing import cast

from foundation import units
from foundation.units import GIB, UNKNOWN, markdown, plural
from pretrain.launch.environment import with_precision
from pretrain.metrics.cards import Card, card_of
from pretrain.metrics.console import Console
from pretrain.model.distributed import as_launched
from pretrain.plan.plan import KEPT_FREE, Plan
from pretrain.plan.rendering import (
    flops_line,
    horizon_lines,
    in_subjects,
    model_lines,
    render,
    width,
)
from pretrain.plan.speed import predict
from pretrain.plan.targets import devices_called, obstacle, plan_on
from pretrain.run.job import Job, plan_elsewhere
from pretrain.run.resume_point import where_to_resume
from pretrain.settings.commands import USUAL
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

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
    print(
        markdown(
            ["on", "microbatch", "needs", "available", "tokens/s", "time", "basis"],
            [_row(planned) for planned in plans],
        )
    )
    notes = [
        *([] if loaded.precision else [WHY_DEFAULT]),
        *_notes(plan),
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


def _notes(plan: Plan) -> list[str]:
    """Return the lines that explain the table."""
    notes = [
        "the time is the time of all training steps, without evaluations and starts",
        "the microbatch is set by the recipe, or is the largest one that leaves "
        f"{units.percent(KEPT_FREE)} of a device's memory free",
    ]
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


def _row(plan: Plan) -> list[str]:
    """Return the row of the devices of `plan` in the table."""
    devices = plan.devices
    if obstacle(plan):
        return [str(devices), *[UNKNOWN] * 6]
    size = min(plan.expected_microbatch, plan.packs_per_rank)
    takes = plan.takes(size)
    # The device is in the table, because `devices_called` has found it there.
    available = cast(Card, card_of(devices.name)).memory
    fits = takes <= available * GIB
    # `devices.memory` is the part of the available memory that a plan should use.
    remark = ""
    if takes > devices.memory:
        remark = ": barely fits" if fits else ": does not fit"
    microbatches = -(-plan.packs_per_rank // size)
    shards = " in shards" if devices.sharded else ""
    host = f" + {units.memory(plan.host_memory / GIB)} host" if plan.host_memory else ""
    prediction = predict(plan)
    speed = prediction.tokens_per_second if fits else None
    return [
        str(devices),
        f"{microbatches} x {plural(size, 'pack')}{shards}{remark}",
        units.memory(takes / GIB) + host,
        units.memory(available),
        f"{speed:,.0f}" if speed else UNKNOWN,
        units.duration(plan.total_tokens / speed) if speed else UNKNOWN,
        prediction.basis if fits else UNKNOWN,
    ]
