"""Number of steps of each run of `which`, limited by --hours, the recipe and the data."""

from __future__ import annotations

import argparse
import math
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path

from foundation.errors import InputError
from foundation.reading import load_object
from lab.experiments.protocol import Protocol, Rounds
from packing.order import mixture_of
from packing.prepare import prepare
from packing.store import open_packs
from packing.stream import StreamedPacks
from pretrain.metrics.run_record import FEWEST_STEPS
from pretrain.plan.checks import steps_of
from pretrain.settings.recipe import Recipe

# Share of the steps after which candidates branch from the baseline.
TRUNK = 0.2
# Largest number of steps if a recipe sets epochs of a stream, which has no end.
MOST_STEPS = 10**9


def allowed_steps(options: argparse.Namespace, recipe: Recipe) -> range:
    """Return the numbers of steps that a run may have without repeating any data.

    A candidate trains at least FEWEST_STEPS steps after it has branched, because its loss at the
    end is the mean over at least this number of steps. If --steps is set, it is the only number.
    The packs are prepared if they are missing. Raises InputError if no number is allowed.
    """
    checkpoint_step = step_of_checkpoint(options.begin_with)
    if checkpoint_step is None:
        minimum = math.ceil(FEWEST_STEPS / (1 - TRUNK))
    else:
        minimum = checkpoint_step + FEWEST_STEPS
    longest = math.inf
    if options.steps:
        longest = options.steps
    elif not recipe.train.epochs:
        # The number of packs matters only for epochs.
        longest = steps_of(recipe.train, recipe.batch.tokens, packs=0, length=recipe.data.length)
    in_an_epoch = math.inf
    # The packs may take hours to prepare, so refuse too few steps before.
    if longest >= minimum:
        in_an_epoch = steps_in_an_epoch(recipe)
    if options.steps and options.steps > in_an_epoch:
        raise InputError(
            f"--steps {options.steps}: the data is repeated after step {in_an_epoch}, and "
            "repeated data makes the losses of two precisions look more similar than they are; "
            f"set --steps {in_an_epoch} or fewer"
        )
    longest = int(min(longest, in_an_epoch, MOST_STEPS))
    if longest < minimum:
        raise InputError(
            f"--steps, or else `train.steps` in the recipe or its data, allows only {longest} "
            f"steps per run, but {minimum} is the minimum; set --steps {minimum} or more, or use "
            "more data"
        )
    return range(longest if options.steps else minimum, longest + 1)


def with_steps(protocol: Protocol, steps: int) -> Protocol:
    """Return a copy of the protocol for runs with `steps` steps."""
    trunk = step_of_checkpoint(protocol.begin_with)
    if trunk is None:
        trunk = math.ceil(TRUNK * steps)
    return replace(protocol, steps=steps, trunk=trunk)


def fit_steps(
    protocol: Protocol, allowed: range, *, at_once: int, hours: float, seconds_left: float
) -> Protocol:
    """Return a copy of the protocol with the longest runs whose rounds end in time.

    With --steps, the protocol has this number of steps, and the time does not matter. Raises
    InputError if the time is too short for the smallest allowed number of steps.

    Args:
        protocol: The protocol, with the time of each step.
        allowed: The allowed numbers of steps.
        at_once: Number of runs that train at the same time.
        hours: Value of --hours.
        seconds_left: Seconds that are left for all rounds.
    """

    if protocol.steps:
        return with_steps(protocol, protocol.steps)

    def seconds_of_rounds(steps: int) -> float:
        return Rounds(with_steps(protocol, steps), at_once).planned_seconds()

    fitting = bisect_right(allowed, seconds_left, key=seconds_of_rounds)
    if fitting == 0:
        minimum = allowed[0]
        enough = hours + (seconds_of_rounds(minimum) - seconds_left) / 3600
        # Add 5 %, because rounding to two digits may make the number of hours 5 % smaller.
        raise InputError(
            f"--hours {hours:g}: this time is too short for {protocol.seeds} rounds of runs with "
            f"{minimum} steps, which is the minimum; set --hours to {1.05 * enough:.2g} or more"
        )
    return with_steps(protocol, allowed[fitting - 1])


def steps_in_an_epoch(recipe: Recipe) -> float:
    """Return the number of steps that can be trained before any training data is repeated.

    Return infinity if the data is a stream that continues after its first parts. The packs are
    prepared if they are missing. Raises InputError if the training packs or the held-out packs
    cannot be used.
    """
    if recipe.data.prepares:
        prepare(recipe.data, progress=True)
    packs = open_packs(recipe.data, "train")
    # Check that the held-out packs can be used.
    open_packs(recipe.data, "held_out")
    if isinstance(packs, StreamedPacks):
        if packs.continues:
            return math.inf
        packs = packs.first_parts
    mixture = mixture_of(packs)
    # Number of packs, counted over all sources, until one source has no unused pack left.
    shares = mixture.shares_of_packs()
    used_up = min(count / share for count, share in zip(mixture.counts, shares, strict=True))
    return int(used_up * recipe.data.length / recipe.batch.tokens)


def step_of_checkpoint(path: str | None) -> int | None:
    """Return the step of the checkpoint at `path`, a step-* folder, or None if `path` is None."""
    if path is None:
        return None
    state = load_object(Path(path, "state.json"), "set --from to a step-* folder")
    return state["progress"]["step"]
