"""Find the fastest precision at equal loss: `python -m pretrain which RECIPE [key=value ...]`.

`WHICH` in `pretrain.settings.commands` describes the method and the result. This module has the
steps of the command. First it writes the plan, which fixes the settings and the length of the runs.
Then it trains the rounds. `which_trainings` trains, and `verdicts` computes the verdicts.

Exit status: 0 if all verdicts are final, 1 if a candidate's verdict is open, 2 for invalid input,
and 128 plus the number of the signal if a signal stopped the command.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

from foundation.errors import InputError
from foundation.files import write_json
from foundation.reading import load_object, load_yaml
from foundation.settings import last_steps, parse
from foundation.units import duration
from lab.compare.differences import error_of, fewest_seeds
from lab.compare.fairness import in_words
from lab.experiments.matrix_file import Cell, Matrix, MatrixSettings, Values, make_matrix
from lab.experiments.matrix_run import say, wait_for_earlier_start
from lab.experiments.verdicts import verdicts_after
from lab.experiments.which_answer import VERDICT_FILE, write_answer
from lab.experiments.which_plan import MOST_SEEDS, Rounds, WhichPlan
from lab.experiments.which_trainings import (
    DEFAULT_SETTINGS,
    HEAD,
    TRIAL_STEPS,
    WhichTrainings,
    candidate_of,
    has_ended,
    runs_of,
    seconds_of,
    train,
)
from packing.arrow import Packs
from packing.order import MixedPacks, Mixture
from packing.prepare import prepare
from packing.store import open_packs
from packing.stream import StreamedPacks
from pretrain.launch.launcher import count_gpus, find_configuration
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import FEWEST_STEPS
from pretrain.optimizer.schedule import learning_rate
from pretrain.plan.checks import steps_of
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.settings import PRECISIONS, phases_of
from pretrain.settings.config import branch_checkpoint, load_recipe, parse_overrides, resolved
from pretrain.settings.recipe import Recipe

# Share of the steps after which candidates branch from the baseline.
TRUNK = 0.2
# Seconds that a run of a small model usually takes for its start, and for each step. The command
# estimates the total time from these values before it runs the trials. Larger models take longer.
USUAL_ON_CPU = (2.0, 0.02)
USUAL_ON_GPU = (10.0, 0.1)
# File with the plan, in the folder of the runs.
PLAN_FILE = "which.json"
# Keys that the user cannot override, because this command sets them, with the options for them.
RESERVED = {
    "precision": "--precisions",
    "fp8_config.scope": "--precisions with +head",
    "seed": "--seeds",
    "run_dir": "--run_dir",
    "train.steps": "--steps",
    "train.tokens": "--steps",
    "train.epochs": "--steps",
    "train.begin_with": "--from",
    "evaluate.served": "--served",
    "evaluate.merge": "it in a file of --candidates",
}
# Beginnings of the keys that candidates may set. All candidates are trained on the same data, and
# continue with the weights, the moments and the learning rate of the baseline.
KEYS_OF_CANDIDATES = (
    "precision",
    "fp8_config.",
    "optimizer.learning_rate",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.clip",
    "schedule.kind",
    "schedule.decay",
    "schedule.min_lr_ratio",
    "evaluate.merge",
    "checkpoint.every",
    "checkpoint.keep",
)


def main(options: argparse.Namespace) -> int:
    """Run the command and return its exit status, which is 1 if a candidate's verdict is open.

    Raises InputError for a mistake in the arguments.
    """
    accelerate = find_configuration(options.config or ("bf16" if count_gpus() else "cpu"))
    recipe = checked_recipe(options)
    folder = Path(options.run_dir or f"runs/which/{recipe.name}")
    trainings = WhichTrainings(
        recipe,
        options.recipe,
        tuple(options.overrides),
        accelerate,
        folder,
        options.gpus,
        read_candidates(options, accelerate) if options.candidates else {},
    )
    deadline = time.monotonic() + options.hours * 3600
    with RunFolder(folder, remedy="set another --run_dir"):
        wait_for_earlier_start(sorted(folder.glob("*/*.log")))
        plan = load_plan(trainings, options)
        if plan is None:
            plan = new_plan(trainings, options, deadline)
        rounds = Rounds(plan, trainings.trial([plan.base]).slots or 1)
        announce(rounds, options.hours)
        read_ended_rounds(trainings, rounds)
        if rounds.runs:
            say(f"\n{write_answer(trainings, rounds)}")
        while matrix := next_rounds(trainings, rounds, deadline - time.monotonic()):
            train_rounds(rounds, matrix)
            say(f"\n{write_answer(trainings, rounds)}")
    say(f"\nWritten: {folder / VERDICT_FILE}")
    return 1 if any(verdict.is_open for verdict in verdicts_after(rounds)) else 0


def checked_recipe(options: argparse.Namespace) -> Recipe:
    """Return the recipe, and set `options.begin_with` to an absolute path or None.

    Raises InputError if the recipe or an option is invalid. No check needs the packs or a GPU.
    """
    recipe = load_recipe(
        options.recipe, [*options.overrides, f"evaluate.served={options.served or 'null'}"]
    )
    begin_with = options.begin_with or branch_checkpoint(recipe)
    options.begin_with = os.path.abspath(begin_with) if begin_with else None
    names = options.precisions or list(PRECISIONS)
    heads = [name + HEAD for name, precision in PRECISIONS.items() if precision.quantized]
    unknown = [name for name in names if name not in (*PRECISIONS, *heads)]
    if unknown or len(names) < 2 or len(set(names)) < len(names):
        raise InputError(
            f"--precisions {','.join(names)}: set at least two different precisions; choose them "
            f"from {', '.join(PRECISIONS)}"
            + (f"; unknown: {', '.join(unknown)}" if unknown else "")
        )
    if reserved := sorted(RESERVED.keys() & dict(parse_overrides(options.overrides)).keys()):
        raise InputError(
            f"command line: `{reserved[0]}` is set by this command; remove it, or set "
            f"{RESERVED[reserved[0]]}"
        )
    if options.seeds > MOST_SEEDS:
        raise InputError(
            f"--seeds {options.seeds}: a candidate is trained with at most {MOST_SEEDS} seeds; set "
            f"--seeds {MOST_SEEDS} or fewer"
        )
    minimum = least_steps(step_of_checkpoint(options.begin_with))
    steps = recipe.train.steps if options.steps is None else options.steps
    if steps is not None and steps < minimum:
        raise InputError(
            f"--steps, or else `train.steps` in the recipe, sets {steps} steps per run, but "
            f"{minimum} is the minimum; set --steps {minimum} or more"
        )
    return recipe


def read_candidates(options: argparse.Namespace, accelerate: Path) -> dict[str, Values]:
    """Read the file --candidates. Return the settings of the baseline and each candidate by name.

    Raises InputError if a setting is wrong, or not allowed for a candidate. `accelerate` is the
    path of the Accelerate configuration.
    """
    served = {"evaluate.served": options.served} if options.served else {}
    content = {
        "name": "which",
        "recipe": options.recipe,
        "accelerate": accelerate,
        "overrides": {"evaluate.served": options.served, "evaluate.merge": 1}
        | ({"train.steps": options.steps} if options.steps else {}),
        "cells": load_yaml(options.candidates),
    }
    file = str(options.candidates)
    matrix = make_matrix(file, parse(MatrixSettings, content, file), options.overrides)
    of_recipe = {
        key
        for cell in matrix.cells
        for key in cell.values
        if key in DEFAULT_SETTINGS
        or not key.startswith(KEYS_OF_CANDIDATES)
        # With --served, all models are quantized alike.
        or (options.served and key.startswith("fp8_config.keep_bf16"))
    }
    mistakes = {
        "the candidates are named twice; remove --precisions": options.precisions,
        "at least two candidates are needed, the baseline first": len(matrix.cells) < 2,
        f"candidates cannot set `{', '.join(sorted(of_recipe))}`; set it in the recipe": of_recipe,
        "`checkpoint.every` counts steps, so `evaluate.merge` needs --steps": (
            not options.steps and any(cell.recipe.evaluate.merge > 1 for cell in matrix.cells)
        ),
        f"`evaluate.merge`: {matrix.baseline.name} cannot have it, because it is the baseline": (
            matrix.baseline.recipe.evaluate.merge > 1
        ),
    }
    if mistake := next((text for text, is_made in mistakes.items() if is_made), None):
        raise InputError(f"{file}: {mistake}")
    return {
        cell.name: {"precision": resolved(cell.recipe)["precision"]} | cell.values | served
        for cell in matrix.cells
    }


# ── The plan ──────────────────────────────────────────────────────────────────────────────────────


def load_plan(trainings: WhichTrainings, options: argparse.Namespace) -> WhichPlan | None:
    """Read the plan from the folder of the runs. Return None if there is no plan yet.

    Raises InputError if the options differ from the plan, or if the settings of the recipe
    differ from the settings of the trials. Otherwise a user could change the margin after seeing
    the results, and the verdicts would be worthless.
    """
    file = trainings.folder / PLAN_FILE
    if not file.exists():
        if (trainings.folder / VERDICT_FILE).exists():
            raise InputError(
                f"{trainings.folder}: has {VERDICT_FILE}, but no {PLAN_FILE}; use another --run_dir"
            )
        return None
    plan = WhichPlan(**load_object(file, "use another --run_dir"))
    requested = {
        "begin_with": options.begin_with,
        "margin": options.margin / 100,
        "seeds": options.seeds,
        "precisions": options.precisions or list(trainings.candidates) or plan.precisions,
        "steps": options.steps or plan.steps,
        "served": options.served,
        "settings": trainings.candidates,
    }
    trial = trainings.trial([plan.base]).baseline
    differences: dict[str, tuple[Any, Any]] = {
        key: (value, getattr(plan, key))
        for key, value in requested.items()
        if value != getattr(plan, key)
    } | {
        # Another version of the command may set its own keys of trials to other values.
        key: values
        for key, values in trial.differences.items()
        if key not in trial.values
    }
    if differences:
        raise InputError(
            f"{file}: this command was started with other settings before (current value and "
            f"earlier value): {in_words(differences)}; either set the earlier values again, or use "
            "another --run_dir"
        )
    return plan


def new_plan(trainings: WhichTrainings, options: argparse.Namespace, deadline: float) -> WhichPlan:
    """Run the trials, compute the length of the runs, and write the plan.

    Raises InputError if `options.seeds` is too small, if the baseline or all candidates fail in the
    trials, or if the runs would be too short.

    Args:
        trainings: The recipe and the folder of the runs.
        options: The command line.
        deadline: Value of time.monotonic() at which --hours are over.
    """
    names = (
        options.precisions
        or list(trainings.candidates)
        or default_candidates(trainings.recipe.weights)
    )
    minimum = fewest_seeds(error_of(len(names) - 1))
    if options.seeds < minimum:
        raise InputError(
            f"--seeds {options.seeds}: a comparison of {len(names)} precisions needs at least "
            f"{minimum} seeds; set --seeds {minimum} or more"
        )
    matrix = trainings.trial(names)
    start, per_step = USUAL_ON_CPU if matrix.on_cpu else USUAL_ON_GPU
    plan = WhichPlan(
        begin_with=options.begin_with,
        margin=options.margin / 100,
        precisions=names,
        seconds=dict.fromkeys(map(candidate_of, matrix.cells), per_step),
        start=start,
        seeds=options.seeds,
        steps=0,
        trunk=0,
        served=options.served,
        settings=dict(trainings.candidates),
    )
    trials = math.ceil(len(matrix.cells) / matrix.at_once) * (start + TRIAL_STEPS * per_step)
    fit = partial(
        fit_steps,
        options=options,
        recipe=trainings.recipe,
        in_an_epoch=steps_in_an_epoch(trainings.recipe),
        at_once=matrix.slots or 1,
    )
    # Check before the trials that --hours is enough for runs whose steps take the usual time. If it
    # is not, `fit` raises InputError.
    usual = fit(plan, seconds_left=deadline - time.monotonic() - trials)
    check_branches(trainings, usual)
    say(
        f"trials of {TRIAL_STEPS} steps, usually {duration(trials)} or more: "
        f"{', '.join(plan.seconds)}"
    )
    for cell in matrix.cells:
        # Delete a trial that was run with other settings, so that it runs again. No result depends
        # on the deleted trial, because no plan has been written yet.
        if cell.differences:
            shutil.rmtree(cell.run_dir)
    train(matrix, may_fail=True)
    for cell in matrix.cells:
        shutil.rmtree(cell.run_dir / "checkpoints", ignore_errors=True)
    runs = {name: run for name, run in runs_of(matrix.cells).items() if run.is_finished}
    if len(runs) < 2:
        raise InputError(
            "there is nothing to compare: every other precision failed in its trial; read the logs "
            f"in {trainings.folder}/trial, or set other precisions"
        )
    seconds = {
        name: trainings.recipe.batch.tokens / run.summary["tokens_per_second"]
        for name, run in runs.items()
    }
    # Seconds that each trial took in addition to its steps. The lower median is used, because
    # trials that compile kernels for all later runs take longer.
    overheads = [seconds_of(run) - TRIAL_STEPS * seconds[name] for name, run in runs.items()]
    start = max(0.0, statistics.median_low(overheads))
    plan = fit(
        replace(plan, seconds=seconds, start=start),
        seconds_left=deadline - time.monotonic(),
    )
    # Check again, because the runs may be shorter than with the usual time of a step.
    check_branches(trainings, plan)
    write_json(trainings.folder / PLAN_FILE, asdict(plan))
    return plan


def check_branches(trainings: WhichTrainings, plan: WhichPlan) -> None:
    """Check that the settings of candidates differ from the baseline's only after the branch.

    Raises InputError if a candidate's schedule of the learning rate differs earlier, if its first
    phase of precision ends earlier, or if the runs of a round have other invalid settings.
    """
    rounds = trainings.rounds(plan, [trainings.recipe.seed], plan.candidates)
    # Compare with the baseline's peak, because a candidate may have another one.
    rate = partial(
        learning_rate,
        plan.trunk - 1,
        optimizer=rounds.baseline.recipe.optimizer,
        total_steps=plan.steps,
    )
    for cell in rounds.cells[1:]:
        untils = [until for until, _ in phases_of(cell.recipe.precision)]
        if last_steps("precision", untils, plan.steps)[0] <= plan.trunk or rate(
            cell.recipe.schedule
        ) != rate(rounds.baseline.recipe.schedule):
            raise InputError(
                f"cell {cell.name}: candidates continue from step {plan.trunk:,} of the baseline; "
                "let decays of the learning rate and phases of precision begin later"
            )


def default_candidates(weights: str) -> list[str]:
    """Return the names of the default baseline and the default candidates.

    On a GPU, the baseline is BF16. The candidates are all quantized precisions that the GPU
    supports, and the first of these precisions again with a quantized head (+head). If the GPU
    supports no quantized precision, the only candidate is an emulated precision.

    On a CPU, the only candidate is an emulated precision. The baseline is FP32 if `weights`, the
    recipe's setting, is "fp32", and BF16 otherwise.
    """
    emulated = next(name for name, precision in PRECISIONS.items() if precision.quantized)
    if not count_gpus():
        return ["fp32" if weights == "fp32" else "bf16", emulated]
    # Use a child process. It allocates GPU memory, which is released when the process ends.
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        supported = child.submit(supported_precisions).result()
    return ["bf16", *(supported or [emulated]), *(f"{name}{HEAD}" for name in supported[:1])]


def supported_precisions() -> list[str]:
    """Return the quantized precisions that the GPU supports. Runs in a child process."""
    # Import this module here, because it imports torch.
    from pretrain.precision.selection import missing_on

    missing = missing_on("cuda")
    return [
        name
        for name, precision in PRECISIONS.items()
        if isinstance(precision, QuantizedPrecision) and missing(precision) is None
    ]


def fit_steps(
    plan: WhichPlan,
    *,
    options: argparse.Namespace,
    recipe: Recipe,
    in_an_epoch: float,
    at_once: int,
    seconds_left: float,
) -> WhichPlan:
    """Return a copy of the plan with `steps` and `trunk` set.

    `steps` is the length of a run, and `trunk` is the number of steps before the candidates branch.
    If --steps is not set, a run is as long as --hours allow, but not longer than the recipe sets,
    and not longer than one epoch. Raises InputError if such a run has too few steps, or if
    --steps would repeat the training data.

    Args:
        plan: The plan. Its `steps` and `trunk` are ignored.
        options: The command line.
        recipe: The recipe.
        in_an_epoch: Number of steps after which the first data is repeated, or infinity.
        at_once: Number of runs that train at the same time.
        seconds_left: Seconds that are left for all rounds.
    """
    trunk = step_of_checkpoint(plan.begin_with)

    def with_steps(steps: int) -> WhichPlan:
        branch_step = math.ceil(TRUNK * steps) if trunk is None else trunk
        return replace(plan, steps=steps, trunk=branch_step)

    def seconds_of_rounds(steps: int) -> float:
        return Rounds(with_steps(steps), at_once).planned_seconds()

    if options.steps:
        if options.steps > in_an_epoch:
            raise InputError(
                f"--steps {options.steps}: the data is repeated after step {in_an_epoch}, and "
                "repeated data makes the losses of two precisions look more similar than they are; "
                f"set --steps {in_an_epoch} or fewer"
            )
        return with_steps(options.steps)
    in_recipe = math.inf
    if not recipe.train.epochs:
        in_recipe = steps_of(recipe.train, recipe.batch.tokens, 0, recipe.data.length)
    # A stream has no epoch, so it needs another upper limit.
    longest = int(min(in_an_epoch, in_recipe, 10**9))
    minimum = least_steps(trunk)
    if longest < minimum:
        raise InputError(
            f"the recipe or its data allows only {longest} steps per run, but {minimum} is "
            "the minimum; set a larger `train.steps` in the recipe, or use more data"
        )
    # Find the largest number of steps with which all rounds end within `seconds_left`.
    steps = bisect_right(range(longest + 1), seconds_left, lo=minimum, key=seconds_of_rounds) - 1
    if steps < minimum:
        hours = options.hours + (seconds_of_rounds(minimum) - seconds_left) / 3600
        # Add 5 %, because rounding to two digits may make the number of hours 5 % smaller.
        raise InputError(
            f"--hours {options.hours:g}: this time is too short for {plan.seeds} rounds of "
            f"runs with {minimum} steps, which is the minimum; set --hours to "
            f"{1.05 * hours:.2g} or more"
        )
    return with_steps(steps)


def steps_in_an_epoch(recipe: Recipe) -> float:
    """Return the number of steps that can be trained before any training data is repeated.

    Return infinity if the data is a stream that continues after its first parts. The packs are
    prepared if they are missing. Raises InputError if the training packs or the held-out packs
    cannot be used.
    """
    if recipe.data.prepares:
        prepare(recipe.data, progress=True)
    packs = cast(Packs, open_packs(recipe.data, "train"))
    # Check that the held-out packs can be used.
    open_packs(recipe.data, "held_out")
    if isinstance(packs, StreamedPacks):
        if packs.continues:
            return math.inf
        packs = packs.first_parts
    mixture = packs.mixture if isinstance(packs, MixedPacks) else Mixture.alone(len(packs))
    # Number of packs, counted over all sources, until one source has no unused pack left.
    shares = mixture.shares_of_packs()
    used_up = min(count / share for count, share in zip(mixture.counts, shares, strict=True))
    return int(used_up * recipe.data.length / recipe.batch.tokens)


def least_steps(trunk: int | None) -> int:
    """Return the smallest allowed number for the last step of a run.

    A candidate must train at least FEWEST_STEPS steps after it has branched, because its loss at
    the end is the mean over at least this number of steps. `trunk` is the step of the checkpoint
    where all runs branch, or None if the baseline trains from the start.
    """
    return math.ceil(FEWEST_STEPS / (1 - TRUNK)) if trunk is None else trunk + FEWEST_STEPS


def step_of_checkpoint(path: str | None) -> int | None:
    """Return the step of the checkpoint at `path`, a step-* folder, or None if `path` is None."""
    if path is None:
        return None
    state = load_object(Path(path, "state.json"), "set --from to a step-* folder")
    return state["progress"]["step"]


# ── Rounds ────────────────────────────────────────────────────────────────────────────────────────


def announce(rounds: Rounds, hours: float) -> None:
    """Print the plan and the estimated time. `hours` is the time limit."""
    plan = rounds.plan
    skipped = [name for name in plan.precisions if name not in plan.seconds]
    if skipped:
        say(
            f"\nSkipped, because their trials failed: {', '.join(skipped)}. To try them again, use "
            "another --run_dir."
        )
    trunk = f"from {plan.begin_with}" if plan.begin_with else f"in {plan.base}"
    say(
        f"\nBaseline {plan.base}, candidates {', '.join(plan.candidates)}. The margin is "
        f"fixed at {100 * plan.margin:g} % of the loss.\n"
        "Each round has one seed and takes about "
        f"{duration(rounds.seconds(plan.candidates))}. Each run has {plan.steps:,} steps. "
        f"The first {plan.trunk:,} steps are {trunk}.\n"
        f"{plan.seeds} rounds are planned. They take about "
        f"{duration(rounds.planned_seconds())}, and the limit is {hours:g} hours."
    )


def read_ended_rounds(trainings: WhichTrainings, rounds: Rounds) -> None:
    """Add the rounds whose runs have all ended in earlier starts of the command to `rounds`."""
    while candidates := open_candidates(rounds):
        matrix = matrix_of(trainings, rounds, candidates, number=1)
        if not all(has_ended(matrix, cell) for cell in matrix.cells):
            break
        add_runs(rounds, matrix)


def open_candidates(rounds: Rounds) -> list[str]:
    """Return the candidates with an open verdict, which need another round.

    The list is empty after MOST_SEEDS rounds.
    """
    if len(rounds.runs) >= MOST_SEEDS:
        return []
    return [verdict.name for verdict in verdicts_after(rounds) if verdict.is_open]


def matrix_of(
    trainings: WhichTrainings, rounds: Rounds, candidates: Sequence[str], number: int
) -> Matrix:
    """Return the runs of the next `number` rounds with `candidates`, as a matrix."""
    seed = trainings.recipe.seed + len(rounds.runs)
    return trainings.rounds(rounds.plan, range(seed, seed + number), candidates)


def next_rounds(trainings: WhichTrainings, rounds: Rounds, seconds_left: float) -> Matrix | None:
    """Return the runs of the next round as a matrix, or of several rounds to train together.

    Return None if no candidate needs another round. If the next round would not end within the time
    limit, print this and return None. The time limit is ignored for the first round.

    Args:
        trainings: The recipe and the folder of the runs.
        rounds: The trained rounds.
        seconds_left: Seconds until the time limit.
    """
    candidates = open_candidates(rounds)
    if not candidates:
        return None
    # The plan uses the whole time, and a little of it has passed since then.
    limit = 1.01 * seconds_left
    number = rounds.rounds_together()
    while number > 1 and rounds.seconds(candidates, number) > limit:
        number -= 1
    seconds = rounds.seconds(candidates)
    if seconds <= limit or not rounds.runs:
        return matrix_of(trainings, rounds, candidates, number)
    say(
        f"\nThe next round takes about {duration(seconds)}, but only "
        f"{duration(max(seconds_left, 0))} of --hours are left. To train it, run the same command "
        # Add 10 %, for the time before the round and because two digits may be 5 % too small.
        f"again, with --hours {1.1 * seconds / 3600:.2g} or more."
    )
    return None


def train_rounds(rounds: Rounds, matrix: Matrix) -> None:
    """Train the cells of `matrix`, which are one or more rounds. Add their runs to `rounds`."""
    seeds = dict.fromkeys(cell.recipe.seed for cell in matrix.cells)
    _, *candidates = dict.fromkeys(map(candidate_of, matrix.cells))
    say(
        f"\nnext round: seed {', '.join(map(str, seeds))}, about "
        f"{duration(rounds.seconds(candidates, len(seeds)))}"
    )
    train(matrix, may_fail=False)
    add_runs(rounds, matrix)


def add_runs(rounds: Rounds, matrix: Matrix) -> None:
    """Add the runs of `matrix`, whose cells have ended, to `rounds`. Delete their checkpoints."""
    by_seed: dict[int, list[Cell]] = defaultdict(list)
    for cell in matrix.cells:
        by_seed[cell.recipe.seed].append(cell)
        # No later run branches from the checkpoints.
        shutil.rmtree(cell.run_dir / "checkpoints", ignore_errors=True)
    for cells in by_seed.values():
        runs = runs_of(cells)
        rounds.runs.append(runs)
        rounds.took |= {name: seconds_of(run) for name, run in runs.items() if run.is_finished}
