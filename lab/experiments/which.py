"""Find the fastest precision at equal loss: `python -m pretrain which RECIPE [key=value ...]`.

`pretrain.settings.commands` describes the method and the result. The command runs two
matrices: first the trials, whose speeds determine the length of the runs, and then the rounds. The
protocol is written between them. After each round, `verdicts` judges the candidates.

Exit status: 0 if all verdicts are final, 1 if a candidate's verdict is open, 2 for invalid input,
and 128 plus the number of the signal if a signal stopped the command.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

from foundation.errors import InputError, as_input_error
from foundation.files import write_json
from foundation.reading import load_object, load_yaml
from foundation.settings import last_steps, parse
from foundation.units import duration, plural
from lab.compare.differences import fewest_seeds
from lab.compare.fairness import in_words
from lab.experiments.matrix_file import Matrix, MatrixSettings, Values, make_matrix
from lab.experiments.matrix_run import say, wait_for_earlier_start
from lab.experiments.protocol import MOST_SEEDS, Protocol, Rounds
from lab.experiments.verdicts import NEEDS_SEEDS, verdicts_after
from lab.experiments.which_answer import VERDICT_FILE, conditions, progress, write_answer
from lab.experiments.which_length import allowed_steps, fit_steps, with_steps
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
from pretrain.launch.launcher import count_gpus, find_configuration
from pretrain.metrics.run_folder import RunFolder
from pretrain.optimizer.schedule import learning_rate
from pretrain.precision.settings import QUANTIZED, phases_of
from pretrain.run.command_checks import check_precisions
from pretrain.settings.config import branch_checkpoint, load_recipe, parse_overrides, resolved
from pretrain.settings.recipe import Recipe

# File with the protocol, in the folder of the runs.
PROTOCOL_FILE = "which.json"
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
    deadline = time.monotonic() + options.hours * 3600
    accelerate = find_configuration(options.config or ("bf16" if count_gpus() else "cpu"))
    recipe = checked_recipe(options)
    folder = Path(options.run_dir or f"runs/which/{recipe.name}")
    trainings = WhichTrainings(
        recipe=recipe,
        recipe_file=options.recipe,
        overrides=tuple(options.overrides),
        accelerate=accelerate,
        folder=folder,
        gpus=options.gpus,
        candidates=read_candidates(options, accelerate) if options.candidates else {},
    )
    with RunFolder(folder, remedy="set another --run_dir"):
        wait_for_earlier_start(sorted(folder.glob("*/*.log")))
        protocol = stored_protocol(trainings, options)
        if protocol is None:
            protocol = new_protocol(trainings, options, deadline)
        else:
            say(
                f"Continuing {folder}: runs of {protocol.steps:,} steps in "
                f"{', '.join(protocol.seconds)}. For longer runs, use another --run_dir."
            )
        # The matrix of a round divides the GPUs into the same number of slots as a trial's.
        rounds = Rounds(protocol, at_once=trainings.trials([protocol.base]).slots or 1)
        announce(rounds, options.hours)
        run_rounds(trainings, rounds, deadline)
    say(f"\n{conditions(trainings, rounds.protocol)}\n\nWritten: {folder / VERDICT_FILE}")
    return int(any(verdict.is_open for verdict in verdicts_after(rounds)))


def checked_recipe(options: argparse.Namespace) -> Recipe:
    """Return the recipe, and set `options.begin_with` to an absolute path or None.

    Raises InputError if the recipe or an option is invalid. No check needs the packs or a GPU.
    """
    served = f"evaluate.served={options.served or 'null'}"
    recipe = load_recipe(options.recipe, [*options.overrides, served])
    begin_with = options.begin_with or branch_checkpoint(recipe)
    options.begin_with = os.path.abspath(begin_with) if begin_with else None
    check_precisions(options, *(name + HEAD for name in QUANTIZED))
    names = options.precisions
    if names and (len(names) < 2 or len(set(names)) < len(names)):
        raise InputError(f"--precisions {','.join(names)}: set at least two different precisions")
    for key, _ in parse_overrides(options.overrides):
        if key in RESERVED:
            raise InputError(
                f"command line: `{key}` is set by this command; remove it, or set {RESERVED[key]}"
            )
    if options.seeds > MOST_SEEDS:
        raise InputError(
            f"--seeds {options.seeds}: a candidate is trained with at most {MOST_SEEDS} seeds; set "
            f"--seeds {MOST_SEEDS} or fewer"
        )
    return recipe


def read_candidates(options: argparse.Namespace, accelerate: Path) -> dict[str, Values]:
    """Read the file --candidates. Return the settings of the baseline and each candidate by name.

    Raises InputError if a setting is wrong, or not allowed for a candidate. `accelerate` is the
    path of the Accelerate configuration.
    """
    file = str(options.candidates)
    if options.precisions:
        raise InputError(f"{file}: the candidates are named twice; remove --precisions")
    common: Values = {"evaluate.served": options.served, "evaluate.merge": 1}
    if options.steps:
        common["train.steps"] = options.steps
    content = {
        "name": "which",
        "recipe": options.recipe,
        "accelerate": accelerate,
        "overrides": common,
        "cells": load_yaml(options.candidates),
    }
    matrix = make_matrix(file, parse(MatrixSettings, content, file), options.overrides)
    if len(matrix.cells) < 2:
        raise InputError(f"{file}: at least two candidates are needed, the baseline first")
    keys = {key for cell in matrix.cells for key in cell.values}
    refused = [key for key in keys if not may_differ(key, served=options.served)]
    if refused:
        raise InputError(
            f"{file}: candidates cannot set `{', '.join(sorted(refused))}`; set it in the recipe"
        )
    for cell in matrix.cells:
        merges = cell.recipe.evaluate.merge > 1
        if merges and (cell == matrix.baseline or not options.steps):
            raise InputError(
                f"{file}: `evaluate.merge` averages checkpoints after `checkpoint.every` steps, so "
                "it needs --steps, and the baseline cannot have it"
            )
    served = {"evaluate.served": options.served} if options.served else {}
    return {
        cell.name: {"precision": resolved(cell.recipe)["precision"]} | cell.values | served
        for cell in matrix.cells
    }


def may_differ(key: str, *, served: str | None) -> bool:
    """Return True if candidates may have other values of `key` than the baseline.

    served: The precision of the evaluation of all models, or None.
    """
    # DEFAULT_SETTINGS has this key only to override the recipe.
    if key == "evaluate.merge":
        return True
    if served and key.startswith("fp8_config.keep_bf16"):
        # All models are quantized in the same way for their evaluation.
        return False
    # The keys of `fp8_config` in DEFAULT_SETTINGS must be equal in all runs.
    return key.startswith(KEYS_OF_CANDIDATES) and key not in DEFAULT_SETTINGS


# ── The protocol ──────────────────────────────────────────────────────────────────────────────────


def stored_protocol(trainings: WhichTrainings, options: argparse.Namespace) -> Protocol | None:
    """Read the protocol from the folder of the runs. Return None if there is none yet.

    Raises InputError if the options differ from the protocol. Otherwise a user could change the
    margin after seeing the results, and the verdicts would be worthless.
    """
    file = trainings.folder / PROTOCOL_FILE
    if not file.exists():
        return None
    remedy = "use another --run_dir"
    # Another version of the launcher may have written other fields.
    with as_input_error((TypeError,), f"{file}: cannot be continued", remedy):
        stored = Protocol(**load_object(file, remedy))
    # If the command line names no candidates, it accepts those of the protocol.
    names = options.precisions or list(trainings.candidates) or stored.precisions
    requested = asdict(requested_protocol(trainings, options, names))
    earlier = asdict(stored)
    # Values that the command line sets. The other values are measured or computed.
    fixed = ["begin_with", "margin", "precisions", "seeds", "served", "settings"]
    if options.steps:
        fixed.append("steps")
    differences = {
        key: (requested[key], earlier[key]) for key in fixed if requested[key] != earlier[key]
    }
    if differences:
        raise InputError(
            f"{file}: the earlier `which` in this folder has set or chosen other values (current "
            f"value and earlier value): {in_words(differences)}; either keep the earlier values, "
            "or use another --run_dir"
        )
    return stored


def requested_protocol(
    trainings: WhichTrainings, options: argparse.Namespace, names: list[str]
) -> Protocol:
    """Return the protocol of the command line before the trials, with no speeds.

    `names` are the names of the baseline and the candidates. The number of steps is 0 if --steps is
    not set.
    """
    return Protocol(
        begin_with=options.begin_with,
        margin=options.margin / 100,
        precisions=names,
        seconds=dict.fromkeys(names, 0.0),
        start=0.0,
        seeds=options.seeds,
        steps=options.steps or 0,
        trunk=0,
        served=options.served,
        settings=dict(trainings.candidates),
    )


def new_protocol(
    trainings: WhichTrainings, options: argparse.Namespace, deadline: float
) -> Protocol:
    """Run the trials, compute the length of the runs, and write the protocol.

    Raises InputError if `options.seeds` is too small, if the baseline or all candidates fail in the
    trials, or if the runs would be too short.

    Args:
        trainings: The recipe and the folder of the runs.
        options: The command line.
        deadline: Value of time.monotonic() at which --hours are over.
    """
    recipe = trainings.recipe
    names = options.precisions or list(trainings.candidates) or default_candidates(recipe.weights)
    protocol = requested_protocol(trainings, options, names)
    minimum = fewest_seeds(protocol.error)
    if options.seeds < minimum:
        raise InputError(
            f"--seeds {options.seeds}: a comparison of {len(names)} precisions needs at least "
            f"{minimum} seeds; set --seeds {minimum} or more"
        )
    allowed = allowed_steps(options, recipe)
    trials = trainings.trials(names)
    # Speeds of candidates that the recipe does not allow are not measured.
    protocol = replace(protocol, seconds=dict.fromkeys(map(candidate_of, trials.cells), 0.0))
    # Check the longest runs, so that most mistakes end the command before the trials.
    check_branches(trainings, with_steps(protocol, allowed[-1]))
    seconds, start = measure(trainings, trials)
    protocol = fit_steps(
        replace(protocol, seconds=seconds, start=start),
        allowed,
        at_once=trials.slots or 1,
        hours=options.hours,
        seconds_left=deadline - time.monotonic(),
    )
    check_branches(trainings, protocol)
    write_json(trainings.folder / PROTOCOL_FILE, asdict(protocol))
    return protocol


def measure(trainings: WhichTrainings, trials: Matrix) -> tuple[dict[str, float], float]:
    """Run the trials. Return the seconds of a step in each precision, and of a start.

    Raises InputError if the baseline or all candidates fail.
    """
    names = ", ".join(map(candidate_of, trials.cells))
    say(f"trials of {TRIAL_STEPS} steps: {names}")
    for cell in trials.cells:
        # Delete a trial that was run with other settings, so that it runs again. No result depends
        # on the deleted trial, because no protocol has been written yet.
        if cell.differences:
            shutil.rmtree(cell.run_dir)
    train(trials, may_fail=True)
    delete_checkpoints(trials)
    runs = {name: run for name, run in runs_of(trials.cells).items() if run.is_finished}
    if len(runs) < 2:
        raise InputError(
            "there is nothing to compare: every other precision failed in its trial; read the logs "
            f"in {trainings.folder}/trial, or set other precisions"
        )
    tokens = trainings.recipe.batch.tokens
    seconds = {name: tokens / run.summary["tokens_per_second"] for name, run in runs.items()}
    # Seconds that each trial took in addition to its steps. The lower median is used, because
    # trials that compile kernels for all later runs take longer.
    overheads = [seconds_of(run) - TRIAL_STEPS * seconds[name] for name, run in runs.items()]
    return seconds, max(0.0, statistics.median_low(overheads))


def check_branches(trainings: WhichTrainings, protocol: Protocol) -> None:
    """Check that the settings of candidates differ from the baseline's only after the branch.

    Raises InputError if a candidate's schedule of the learning rate differs earlier, if its first
    phase of precision ends earlier, or if the runs of a round have other invalid settings.
    """
    rounds = trainings.rounds(protocol, [trainings.recipe.seed], protocol.candidates)
    baseline = rounds.baseline.recipe

    def rate_before_branch(recipe: Recipe) -> float:
        # Use the baseline's peak, because a candidate may have another one.
        peak = baseline.optimizer.learning_rate
        return learning_rate(protocol.trunk - 1, recipe.schedule, peak, protocol.steps)

    for cell in rounds.cells[1:]:
        untils = [until for until, _ in phases_of(cell.recipe.precision)]
        first_phase_end, *_ = last_steps("precision", untils, protocol.steps)
        has_same_rate = rate_before_branch(cell.recipe) == rate_before_branch(baseline)
        if first_phase_end <= protocol.trunk or not has_same_rate:
            raise InputError(
                f"cell {cell.name}: candidates continue from step {protocol.trunk:,} of the "
                "baseline; let decays of the learning rate and phases of precision begin later, or "
                "set --steps to a smaller number"
            )


def default_candidates(weights: str) -> list[str]:
    """Return the names of the default baseline and the default candidates.

    On a GPU, the baseline is BF16. The candidates are all quantized precisions that the GPU
    supports, and the first of these precisions again with a quantized head (+head). If the GPU
    supports no quantized precision, the only candidate is an emulated precision.

    On a CPU, the only candidate is an emulated precision. The baseline is BF16 if `weights`, the
    recipe's setting, is "bf16" or "bf16_exact", and FP32 otherwise.
    """
    emulated = next(iter(QUANTIZED))
    if not count_gpus():
        return ["bf16" if weights.startswith("bf16") else "fp32", emulated]
    # Use a child process. It allocates GPU memory, which is released when the process ends.
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        supported = child.submit(supported_precisions).result()
    return ["bf16", *(supported or [emulated]), *(f"{name}{HEAD}" for name in supported[:1])]


def supported_precisions() -> list[str]:
    """Return the quantized precisions that the GPU supports. Runs in a child process."""
    # Import this module here, because it imports torch.
    from pretrain.precision.selection import support_check_on

    unsupported_because = support_check_on("cuda")
    return [name for name, precision in QUANTIZED.items() if unsupported_because(precision) is None]


# ── Rounds ────────────────────────────────────────────────────────────────────────────────────────


def announce(rounds: Rounds, hours: float) -> None:
    """Print the protocol and the estimated time. `hours` is the time limit."""
    protocol = rounds.protocol
    say(
        f"\nBaseline {protocol.base}, candidates {', '.join(protocol.candidates)}. The margin is "
        f"fixed at {100 * protocol.margin:g} % of the loss."
    )
    say(
        f"{protocol.seeds} rounds take about {duration(rounds.planned_seconds())}, and the limit "
        f"is {hours:g} hours."
    )
    say(f"Each run has {protocol.steps:,} steps. Candidates branch at step {protocol.trunk:,}.")


def run_rounds(trainings: WhichTrainings, rounds: Rounds, deadline: float) -> None:
    """Train rounds until no candidate needs another one, or until the time is over.

    Rounds that have ended in earlier starts of the command are read. All rounds are added to
    `rounds`. The answer is written before each round that is trained. It is written and printed at
    the end. `deadline` is a value of `time.monotonic`.
    """
    while candidates := open_candidates(rounds):
        matrix = matrix_of(trainings, rounds, candidates, number=1)
        if not all(has_ended(matrix, cell) for cell in matrix.cells):
            if rounds.runs:
                write_answer(trainings, rounds)
            number = affordable_rounds(rounds, candidates, deadline - time.monotonic())
            if number == 0:
                break
            matrix = matrix_of(trainings, rounds, candidates, number)
            train(matrix, may_fail=False)
        add_runs(rounds, matrix)
        for name in candidates:
            say(progress(rounds, name))
    say(f"\n{write_answer(trainings, rounds)}")


def open_candidates(rounds: Rounds) -> list[str]:
    """Return the candidates with an open verdict, which need another round.

    The list is empty after MOST_SEEDS rounds.
    """
    verdicts = verdicts_after(rounds)
    return [verdict.name for verdict in verdicts if verdict.advice == NEEDS_SEEDS]


def matrix_of(
    trainings: WhichTrainings, rounds: Rounds, candidates: Sequence[str], number: int
) -> Matrix:
    """Return the runs of the next `number` rounds with `candidates`, as a matrix."""
    seed = trainings.recipe.seed + len(rounds.runs)
    return trainings.rounds(rounds.protocol, range(seed, seed + number), candidates)


def affordable_rounds(rounds: Rounds, candidates: Sequence[str], seconds_left: float) -> int:
    """Return the number of rounds to train together next, and print their time.

    Return 0 and print the missing time if the next round would not end within the time limit. The
    time limit is ignored for the first round.

    Args:
        rounds: The trained rounds.
        candidates: The candidates with an open verdict.
        seconds_left: Seconds until the time limit.
    """
    # The length of the runs was chosen so that the rounds take all the time that was left then. A
    # little of it has passed since, so the last planned round may exceed the limit by 1 %.
    limit = 1.01 * seconds_left
    number = rounds.rounds_together()
    while number > 1 and rounds.seconds(candidates, number) > limit:
        number -= 1
    seconds = rounds.seconds(candidates, number)
    if seconds <= limit or not rounds.runs:
        say(f"\ntraining the next {plural(number, 'round')}, about {duration(seconds)}")
        return number
    left = duration(max(seconds_left, 0))
    # Add 10 %, for the time before the round and because two digits may be 5 % too small.
    enough = 1.1 * seconds / 3600
    say(
        f"\nThe next round takes about {duration(seconds)}, but only {left} of --hours are left. "
        f"To train it, run the same command again, with --hours {enough:.2g} or more."
    )
    return 0


def add_runs(rounds: Rounds, matrix: Matrix) -> None:
    """Add the runs of `matrix`, whose cells have ended, to `rounds`. Delete their checkpoints."""
    # No later run branches from the checkpoints.
    delete_checkpoints(matrix)
    for seed in dict.fromkeys(cell.recipe.seed for cell in matrix.cells):
        runs = runs_of(cell for cell in matrix.cells if cell.recipe.seed == seed)
        rounds.runs.append(runs)
        rounds.took |= {name: seconds_of(run) for name, run in runs.items() if run.is_finished}


def delete_checkpoints(matrix: Matrix) -> None:
    """Delete the checkpoints of all runs of a matrix."""
    for cell in matrix.cells:
        shutil.rmtree(cell.run_dir / "checkpoints", ignore_errors=True)
