"""What a launch would do, without doing it: `train_accelerate.py RECIPE --plan`, and the learning rate of every step.

python -m pretrain schedule my.yaml rate.png train.tokens=2e9
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from foundation.errors import InputError
from pretrain.metrics.console import Console
from pretrain.metrics.run_folder import check_writable
from pretrain.model.distributed import refused_together
from pretrain.optimizer import schedule
from pretrain.plan.checks import steps_of
from pretrain.plan.preflight import prepare_job
from pretrain.plan.rendering import render
from pretrain.run.command_line import LaunchParser, as_launched
from pretrain.run.recording import warn_of_precisions
from pretrain.run.resume import where_to_resume
from pretrain.settings.config import load_recipe, run_dir_of
from pretrain.settings.launch_environment import with_precision


def plan_launch(arguments: argparse.Namespace) -> int:
    """Say what a launch with these arguments would do; InputError where it would be refused. Writes nothing."""
    recipe = with_precision(load_recipe(arguments.recipe, arguments.overrides), os.environ)
    recipe, accelerator, notices = as_launched(recipe)
    refused_together(lambda: accelerator.is_main_process and check_writable(run_dir_of(recipe)))
    job = prepare_job(recipe, accelerator, arguments.tokens_per_second, purpose="plan")
    console = Console(job.plan.steps, enabled=accelerator.is_main_process)
    for text in notices:
        console.notice(text)
    job, _, source = where_to_resume(job, arguments.resume, arguments.accept_changes, look_only=True)
    resumes = [f"would resume from {source.path}", *source.notes] if source else []
    warn_of_precisions(job, console)
    console.notice("\n".join([render(job.plan), *resumes]))
    return 0


def main(arguments: Sequence[str]) -> int:
    """Draw the schedule. Packs are needed only where `train.epochs` counts them."""
    parsed = LaunchParser(__doc__, "python -m pretrain schedule").read(arguments)
    if not parsed.overrides or "=" in parsed.overrides[0]:
        raise InputError("python -m pretrain schedule RECIPE PNG [key=value ...]: name the PNG to draw after the recipe")
    picture, *overrides = parsed.overrides
    recipe, accelerator, _ = as_launched(load_recipe(parsed.recipe, [*overrides, "precision=bf16"]))  # the rate is alike in each
    if recipe.train.epochs is None:
        steps = steps_of(recipe.train, recipe.batch.tokens, 0, recipe.data.length)
    else:
        steps = prepare_job(recipe, accelerator, purpose="plan").plan.steps
    if accelerator.is_main_process:
        print(schedule.draw(recipe.schedule, recipe.optimizer, steps, Path(picture)))
    return 0
