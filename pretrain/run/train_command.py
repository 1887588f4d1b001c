"""`python -m pretrain train`: choose an Accelerate configuration and train with accelerate launch.

This module does not import torch. accelerate's launcher imports torch only after the command line,
the recipe and the configuration have been checked.
"""

from __future__ import annotations

import argparse
import os
import shlex
from importlib.metadata import version
from pathlib import Path

from foundation.gpus import visible_gpus
from foundation.reading import load_yaml
from foundation.units import plural
from pretrain.launch import launcher
from pretrain.launch.configuration import CONFIGURATIONS, Launch, find_configuration
from pretrain.launch.environment import is_true
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe


def main(options: argparse.Namespace) -> int:
    """Train as the command line requests, and return the exit status of the training.

    Raises InputError for a mistake in the recipe or in the Accelerate configuration.
    """
    recipe = load_recipe(options.recipe, options.overrides)
    configuration, processes, reason = choose_configuration(
        recipe, options.config, options.processes
    )
    launch = Launch(configuration, tuple(training_arguments(options)), processes)
    # Flush, so that the command comes before the output of the processes in a log file.
    print(f"{reason}{shlex.join(['accelerate', 'launch', *launch.arguments])}", flush=True)
    content = load_yaml(configuration)
    if content.get("num_machines") not in (None, 0, 1):
        print(
            f"machine {content.get('machine_rank')} waits for all {content['num_machines']} "
            f"machines at {content.get('main_process_ip')}:{content.get('main_process_port')}",
            flush=True,
        )
    return launcher.run(launch)


def choose_configuration(
    recipe: Recipe, config: str | None, processes: int | None
) -> tuple[Path, int | None, str]:
    """Choose the configuration for this machine, and the number of processes.

    Each process needs at least one pack in every step. So if a step has fewer packs than there are
    GPUs, only some of the GPUs are used.

    config: configuration that the user has set, or None.
    processes: number that the user has set, or None.

    Returns three values: the path of the configuration, the number of processes, and a line with
    the reason for the choice. If the second value is None, the configuration sets the number of
    processes. The line is empty if the user has set the configuration.
    """
    if config:
        return find_configuration(config), processes, ""
    gpus = count_gpus()
    packs = recipe.batch.tokens // recipe.data.length
    number = processes or min(gpus, packs)
    name = "bf16" if gpus else "cpu"
    if number > 1:
        name = "ddp"
    devices = plural(gpus, "GPU") if gpus else "no GPU"
    reason = f"{devices}, {plural(packs, 'pack')} in a step: {name}.yaml (--config sets another)\n"
    return CONFIGURATIONS / f"{name}.yaml", number if number > 1 else None, reason


def count_gpus() -> int:
    """Return the number of GPUs that processes of this environment can use.

    The result is 0 if torch was built for CPUs, or if ACCELERATE_USE_CPU is set.
    """
    if is_true(os.environ, "ACCELERATE_USE_CPU") or "+cpu" in version("torch"):
        return 0
    return len(visible_gpus())


def training_arguments(options: argparse.Namespace) -> list[str]:
    """Return the arguments of train_accelerate.py for the options of `train`."""
    arguments = [
        f"--{name.replace('_', '-')}"
        for name in ("accept_changes", "plan", "profile")
        if getattr(options, name)
    ]
    if options.resume != "auto":
        arguments += ["--resume", options.resume]
    return [str(options.recipe), *options.overrides, *arguments]
