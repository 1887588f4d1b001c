"""What a recipe would take elsewhere, and `--plan`: what a launch on this machine would do."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections import defaultdict
from collections.abc import Sequence

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
from pretrain.run.resume import where_to_resume
from pretrain.settings.commands import USUAL
from pretrain.settings.config import load_recipe
from pretrain.settings.launch import with_precision

SMALL = 50_000_000  # parameters, below which a step waits for launches more than for products
# where neither recipe nor command line names one, as there is no accelerate configuration here
DEFAULT_PRECISION = "bf16"


def main(options: argparse.Namespace) -> int:
    """Print the plan; returns 0. InputError for a mistake in what was given."""
    if any(share > 1 for share in options.mfu):
        raise InputError("--mfu: a share of the peak is wanted, such as 0.4 for 40 %")
    targets = [Target.parse(text) for text in options.on or USUAL]
    recipe, named = load_recipe(options.recipe, options.overrides), ""
    if recipe.precision is None:
        recipe, named = (
            recipe.model_copy(update={"precision": DEFAULT_PRECISION}),
            ", as the recipe names no precision",
        )
    # What this machine lacks, another one may have.
    recipe = recipe.model_copy(
        update={"fp8_config": recipe.fp8_config.model_copy(update={"on_unsupported": "emulate"})}
    )
    recipe = with_precision(recipe, os.environ)
    accelerator, notices = as_launched(recipe)
    job = prepare_job(recipe, accelerator, purpose="elsewhere")
    plan = job.plan

    print(
        f"{plan.recipe.name}: {plan.schedule.label} compute{named}, {plan.recipe.weights} weights\n{'─' * WIDTH}"
    )
    print(
        in_subjects(
            {
                "model": model_lines(plan),
                "horizon": horizon_lines(plan),
                "FLOPs": [flops_line(plan)],
            }
        ),
        end="\n\n",
    )
    shares = sorted(options.mfu or ASSUMED_SHARES)
    there, reasons = (
        [(target, target.plan(plan, job.shapes)) for target in targets],
        defaultdict(list),
    )
    rows = [_row(target, each, shares) for target, each in there]
    print(markdown(["on", "microbatch", "takes", "of each", "tokens/s", "time"], rows))
    for target, each in there:
        obstacle = target.obstacle(each)
        for reason in [obstacle] if obstacle else each.experts_in_bf16:
            reasons[reason].append(str(target))
    small = not options.mfu and plan.flops.parameters < SMALL
    where_from = "stated" if options.mfu else "assumed; --mfu states another"
    listed = " to ".join(f"{100 * each:.3g}" for each in shares)
    notes = [
        f"time is that of training steps at {listed} % of the peak ({where_from}); several devices count as many times one",
        f"the microbatch is the recipe's, or the largest that leaves {units.percent(KEPT_FREE)} of a device's memory free",
        *(
            [
                "a step of so small a model waits for launches of kernels: it takes longer than these times"
            ]
            if small
            else []
        ),
        *(
            ()
            if plan.packs
            else [
                "FLOPs count each pack as one document, the most that they can be: no packs are prepared here"
            ]
        ),
        *(f"{', '.join(names)}: {reason}" for reason, names in reasons.items()),
        *([plan.flops.left_out] if plan.flops.uncounted else []),
        *notices,
    ]
    print("\n".join(textwrap.fill(f"* {text}", WIDTH, subsequent_indent="  ") for text in notes))
    return 0


def say_plan(job: Job, console: Console, wanted: str, accept_changes: bool) -> int:
    """Say what a launch here would do, from which checkpoint; returns 0. InputError where it would be refused."""
    job, _, source = where_to_resume(job, wanted, accept_changes)
    ended = source and source.step >= job.plan.steps
    resumes = (
        [
            f"{'the run has ended, with' if ended else 'would resume from'} {source.path}",
            *source.notes,
        ]
        if source
        else []
    )
    console.notice("\n".join([render(job.plan), *resumes]))
    return 0


def _row(target: Target, plan: Plan, shares: Sequence[float]) -> list[str]:
    if target.obstacle(plan):
        return [str(target), *[UNKNOWN] * 5]
    size = min(plan.expected_microbatch, plan.packs_per_rank)
    takes, whole = plan.takes(size), target.memory
    fits = (
        ""
        if takes <= plan.devices.memory
        else ": barely fits"
        if takes <= whole
        else ": does not fit"
    )
    split = f"{-(-plan.packs_per_rank // size)} x {plural(size, 'pack')}{' in shards' * plan.devices.sharded}{fits}"
    possible = shares if takes <= whole else []
    speeds = [share * plan.peak_tflops * TERA / plan.flops_per_token for share in possible]
    return [
        str(target),
        split,
        units.memory(takes / GIB),
        units.memory(whole / GIB),
        " to ".join(f"{speed:,.0f}" for speed in speeds) or UNKNOWN,
        " to ".join(units.duration(plan.total_tokens / speed) for speed in speeds) or UNKNOWN,
    ]
