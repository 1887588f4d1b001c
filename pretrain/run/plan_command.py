"""`python -m pretrain plan`: a recipe on devices elsewhere. `--plan`: a launch on this machine."""

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
from pretrain.metrics.console import Console
from pretrain.model.distributed import as_launched
from pretrain.plan.plan import KEPT_FREE, Plan
from pretrain.plan.rendering import (
    ASSUMED_SHARES,
    WIDTH,
    flops_line,
    horizon_lines,
    in_subjects,
    model_lines,
    render,
)
from pretrain.plan.targets import Target
from pretrain.run.job import Job, prepare_job
from pretrain.run.resume_point import where_to_resume
from pretrain.settings.commands import USUAL
from pretrain.settings.config import load_recipe
from pretrain.settings.launch import with_precision
from pretrain.settings.recipe import Recipe

SMALL = 50_000_000  # parameters below which a step waits for kernel launches more than for products
# The precision if neither recipe nor command line has one: there is no accelerate configuration.
DEFAULT_PRECISION = "bf16"


def main(options: argparse.Namespace) -> int:
    """Print the plan and return 0. Raises InputError."""
    if any(share > 1 for share in options.mfu):
        raise InputError("--mfu: a share of the peak is wanted, such as 0.4 for 40 %")
    targets = [Target.parse(text) for text in options.on or USUAL]
    recipe = load_recipe(options.recipe, options.overrides)
    has_precision = recipe.precision is not None
    recipe = _for_other_machines(recipe)
    accelerator, notices = as_launched(recipe)
    job = prepare_job(recipe, accelerator, purpose="elsewhere")
    plan = job.plan
    plans = [(target, target.plan(plan, job.shapes)) for target in targets]

    why_default = "" if has_precision else ", as the recipe names no precision"
    print(
        f"{plan.recipe.name}: {plan.schedule.label} compute{why_default}, "
        f"{plan.recipe.weights} weights\n{'─' * WIDTH}"
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
            ["on", "microbatch", "takes", "of each", "tokens/s", "time"],
            [_row(target, planned, shares) for target, planned in plans],
        )
    )
    notes = [
        *_notes(plan, shares, is_mfu_stated=bool(options.mfu)),
        *_reasons(plans),
        *([plan.flops.left_out] if plan.flops.uncounted else []),
        *notices,
    ]
    print("\n".join(textwrap.fill(f"* {text}", WIDTH, subsequent_indent="  ") for text in notes))
    return 0


def _for_other_machines(recipe: Recipe) -> Recipe:
    """Return the recipe with a precision. What this machine lacks, another one may have."""
    if recipe.precision is None:
        recipe = recipe.model_copy(update={"precision": DEFAULT_PRECISION})
    fp8_config = recipe.fp8_config.model_copy(update={"on_unsupported": "emulate"})
    return with_precision(recipe.model_copy(update={"fp8_config": fp8_config}), os.environ)


def _notes(plan: Plan, shares: Sequence[float], *, is_mfu_stated: bool) -> list[str]:
    """Return the assumptions of the table."""
    source = "stated" if is_mfu_stated else "assumed; --mfu states another"
    listed = " to ".join(f"{100 * share:.3g}" for share in shares)
    notes = [
        f"time is that of training steps at {listed} % of the peak ({source}); several devices "
        "count as many times one",
        "the microbatch is the recipe's, or the largest that leaves "
        f"{units.percent(KEPT_FREE)} of a device's memory free",
    ]
    if not is_mfu_stated and plan.flops.parameters < SMALL:
        notes.append(
            "a step of so small a model waits for launches of kernels: it takes longer than these "
            "times"
        )
    if not plan.packs:
        notes.append(
            "FLOPs count each pack as one document, the most that they can be: no packs are "
            "prepared here"
        )
    return notes


def _reasons(plans: Sequence[tuple[Target, Plan]]) -> list[str]:
    """Return why targets cannot run the plan, or leave experts in BF16, with the targets."""
    targets = defaultdict(list)
    for target, planned in plans:
        obstacle = target.obstacle(planned)
        for reason in [obstacle] if obstacle else planned.experts_in_bf16:
            targets[reason].append(str(target))
    return [f"{', '.join(names)}: {reason}" for reason, names in targets.items()]


def print_plan(job: Job, console: Console, resume_from: str, accept_changes: bool) -> int:
    """Print the plan of a launch on this machine, and the checkpoint that it resumes. Return 0.

    Raises InputError if the launch would be refused.
    """
    job, _, source = where_to_resume(job, resume_from, accept_changes)
    lines = [render(job.plan)]
    if source is not None:
        verb = "the run has ended, with" if source.step >= job.plan.steps else "would resume from"
        lines += [f"{verb} {source.path}", *source.notes]
    console.notice("\n".join(lines))
    return 0


def _row(target: Target, plan: Plan, shares: Sequence[float]) -> list[str]:
    """Return the table's row of a target. `shares` are shares of the peak."""
    if target.obstacle(plan):
        return [str(target), *[UNKNOWN] * 5]
    size = min(plan.expected_microbatch, plan.packs_per_rank)
    takes = plan.takes(size)
    fits = takes <= target.memory
    remark = ""
    if takes > cast(int, plan.devices.memory):
        remark = ": barely fits" if fits else ": does not fit"
    microbatches = -(-plan.packs_per_rank // size)
    shards = " in shards" if plan.devices.sharded else ""
    peak = cast(float, plan.peak_tflops) * TERA  # known, because the target has no obstacle
    speeds = [share * peak / plan.flops_per_token for share in (shares if fits else ())]
    return [
        str(target),
        f"{microbatches} x {plural(size, 'pack')}{shards}{remark}",
        units.memory(takes / GIB),
        units.memory(target.memory / GIB),
        " to ".join(f"{speed:,.0f}" for speed in speeds) or UNKNOWN,
        " to ".join(units.duration(plan.total_tokens / speed) for speed in speeds) or UNKNOWN,
    ]
