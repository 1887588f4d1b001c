"""Predict the answer of `which` on a card: `python -m pretrain which RECIPE --on CARD`.

The command trains nothing, and needs neither a GPU nor packs. It prints

* the recorded answer about the nearest model for each precision,
* the table of the command `plan`, with the predicted speed of each precision on the card, and
* the predicted time of `which` itself, with the precisions that are worth a run.

`make docs` writes answers.csv. It has the recorded answers and costs, with one row for each
precision that was compared with BF16:

* measured with, parameters, experts: the trained model. `experts` is 0 for a dense model.
* card: the card that trained. If it lacks the precision, the precision was emulated.
* precision: the candidate, as `which` names it.
* loss in percent: held-out loss above BF16, in percent of BF16's loss, as a mean over seeds with
  the interval of docs/evidence.md. `verdict` is about the same interval and a margin of 0.3 %.
* speed, gain at equal loss, its interval: in rows of `which`, relative to BF16. Empty if not known.
* answer: the answer of `which`, in the row of the precision that the answer is about.
* file: the result file in benchmarks/results/loss/.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Mapping
from pathlib import Path

from foundation.errors import InputError
from foundation.units import UNKNOWN, count, duration, markdown, plural
from pretrain.compare import which
from pretrain.compare.which_plan import Rounds, WhichPlan
from pretrain.metrics.cards import cards_in
from pretrain.settings.commands import MARGIN_PERCENT
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

ANSWERS = Path(__file__).with_name("answers.csv")
# Columns of answers.csv that are printed.
SHOWN = (
    "precision",
    "measured with",
    "card",
    "tokens per parameter",
    "seeds",
    "loss in percent",
    "verdict",
    "speed",
    "gain at equal loss",
    "its interval",
    "answer",
)
# A row of answers.csv.
Answer = Mapping[str, str]


def main(options: argparse.Namespace) -> int:
    """Run `which` on this machine. With --on, predict its answer instead, and return 0.

    Raises InputError for invalid options, and if the card cannot train the baseline.
    """
    if options.on is None:
        return which.main(options)
    if options.served or options.candidates:
        raise InputError(
            "--on predicts answers about precisions that are evaluated in BF16; remove --served "
            "and --candidates, or --on"
        )
    recipe = which.checked_recipe(options)
    cards_in(options.on)
    # Import these modules here, because they import transformers, which takes seconds.
    from pretrain.plan.plan import settings_that_fit
    from pretrain.plan.speed import predict
    from pretrain.plan.targets import obstacle
    from pretrain.run.plan_command import device_table, fits, plans_on

    overrides = [*options.overrides, "precision=bf16", "fp8_config.scope=linear"]
    if options.steps:
        overrides.append(f"train.steps={options.steps}")
    elif recipe.train.epochs:
        raise InputError("`train.epochs` needs the number of packs; with --on, set --steps instead")
    plans = plans_on(options.on, load_recipe(options.recipe, overrides), overrides)
    devices = plans["bf16"].devices
    if devices.count > 1:
        raise InputError(
            f"--on {options.on}: a run of `which` trains on one GPU; name the card alone, and set "
            "--gpus to the number of cards"
        )
    flops = plans["bf16"].flops
    answers = nearest_answers(flops.parameters, of_mixtures=flops.choices > 0)
    print(f"{recipe.name}, {count(flops.parameters)} parameters\n\n{table_of_answers(answers)}")
    nearest = next(iter(answers.values()))
    print(f"{line_about(nearest, flops.parameters, plans['bf16'].total_tokens)}\n")
    print(device_table(plans, price=None), end="\n\n")
    speeds = {
        name: predict(plan).tokens_per_second
        for name, plan in plans.items()
        if obstacle(plan) is None and fits(plan)
    }
    names = options.precisions or list(dict.fromkeys(["bf16", *speeds]))
    if unable := [name for name in names if name not in speeds]:
        plan = plans.get(unable[0])
        reason = "the recipe does not support this precision"
        if plan is not None:
            reason = obstacle(plan) or f"the recipe does not fit; {settings_that_fit(plan)}"
        raise InputError(f"--on {options.on}: {unable[0]}: {reason}")
    print(time_of_which(options, recipe, speeds, answers))
    return 0


def nearest_answers(parameters: int, *, of_mixtures: bool) -> dict[str, Answer]:
    """Map each precision to its row about the nearest mixture of experts, or dense model.

    The distance is the difference between the logarithms of the numbers of parameters. Of several
    rows about one model, take the one with the most seeds. The nearest models are first.
    """
    with ANSWERS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["experts"] != "0") == of_mixtures]
    rows.sort(
        key=lambda row: (abs(math.log(int(row["parameters"]) / parameters)), -int(row["seeds"]))
    )
    nearest: dict[str, Answer] = {}
    for row in rows:
        nearest.setdefault(row["precision"], row)
    return nearest


def table_of_answers(answers: Mapping[str, Answer]) -> str:
    """Return a table of recorded answers, one for each precision."""
    rows = [[answer[column] or UNKNOWN for column in SHOWN] for answer in answers.values()]
    return markdown(SHOWN, rows, names=3)


def line_about(nearest: Answer, parameters: int, tokens: int) -> str:
    """Return a line that compares the nearest model with a recipe.

    parameters, tokens: the number of parameters and of training tokens of the recipe.
    """
    measured = int(nearest["parameters"])
    ratio = f"{max(measured, parameters) / min(measured, parameters):.2g} times"
    size = "larger" if measured > parameters else "smaller"
    trained = count(round(float(nearest["tokens per parameter"]) * measured))
    return (
        f"nearest: {nearest['measured with']}, {ratio} {size}, {trained} tokens; the recipe has "
        f"{tokens / parameters:.2g} tokens per parameter"
    )


def is_worth_a_run(base: float | None, speed: float | None, answer: Answer | None) -> bool:
    """Return False if a precision is not faster, or if its recorded loss is above the margin.

    base, speed: the predicted speeds of the baseline and of the precision, or None.
    answer: the recorded answer, or None if the precision was never measured.
    """
    if base and speed and round(speed / base, 2) <= 1:
        return False
    if answer is None:
        return True
    middle, half_width = map(float, answer["loss in percent"].split(" ± "))
    return middle - half_width <= MARGIN_PERCENT


def time_of_which(
    options: argparse.Namespace,
    recipe: Recipe,
    speeds: Mapping[str, float | None],
    answers: Mapping[str, Answer],
) -> str:
    """Return the predicted time of `which` on the card, and the options to set there.

    Unless --precisions is set, the candidates are those that are worth a run. Raises InputError if
    --hours are too few for runs of the least length.

    speeds: the predicted tokens per second in each precision that the card can train, or None. They
        include --precisions and BF16.
    """
    names = options.precisions or list(dict.fromkeys(["bf16", *speeds]))
    base, *candidates = names
    speed = speeds[base]
    if not options.precisions:
        candidates = [
            name for name in candidates if is_worth_a_run(speed, speeds[name], answers.get(name))
        ]
    if not candidates:
        return f"No precision is worth a run of `which` on this card: train in {base}."
    if speed is None:
        return "The time of `which` is not known."
    names = [base, *candidates]
    which.check_seeds(options, names)
    at_once = options.gpus or 1
    plan = which.fit_steps(
        WhichPlan(
            begin_with=options.begin_with,
            margin=options.margin / 100,
            precisions=names,
            # A candidate whose speed is not known is assumed to be as fast as the baseline.
            seconds={name: recipe.batch.tokens / (speeds[name] or speed) for name in names},
            start=which.USUAL_ON_GPU[0],
            seeds=options.seeds,
            steps=0,
            trunk=0,
        ),
        options=options,
        recipe=recipe,
        # The packs are not known.
        in_an_epoch=math.inf,
        at_once=at_once,
        seconds_left=3600 * options.hours,
    )
    planned = Rounds(plan, at_once).planned_seconds()
    return (
        f"`which` takes about {duration(planned)} for {plan.seeds} seeds of {plan.steps:,} steps, "
        f"with {plural(at_once, 'run')} at a time.\n"
        "In more or fewer --hours, its runs are longer or shorter, up to the recipe's length. Run\n"
        "the same command there, and replace --on by\n"
        f"  --precisions {','.join(names)} --hours {math.ceil(planned / 360) / 10:g}"
    )
