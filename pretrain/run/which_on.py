"""Predict the answer of `which` on a card: `python -m pretrain which RECIPE --on CARD`.

The command trains nothing, and needs neither a GPU nor packs. It prints

* the recorded answers of `which` for the nearest models,
* the predicted speed of each precision on the card (`pretrain.plan.speed`), beside the recorded
  cost in loss of the nearest model, and
* the predicted time of `which` itself, with the command to run on the card.

answers.csv has the recorded answers and costs, with one row for each precision that was compared
with BF16:

* model, parameters, experts: the trained model. `experts` is 0 for a dense model.
* card: the card that trained. If it lacks the precision, the precision was emulated.
* precision: the candidate, as `which` names it.
* loss_in_percent: held-out loss above BF16, in percent of BF16's loss, as a mean over seeds with
  its 95 % interval (paired t). `verdict` is that of the result file, with a margin of 0.3 %.
* speed, gain_at_equal_loss, its_interval: in rows of `which`, relative to BF16. Empty if not known.
* answer: the answer of `which`, in the row of the precision that the answer is about.
* file: the result file in benchmarks/results/loss/.
"""

from __future__ import annotations

import argparse
import csv
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from foundation.errors import InputError
from foundation.units import (
    GIB,
    UNKNOWN,
    count,
    duration,
    markdown,
    memory,
    or_dash,
    percent,
    plural,
)
from pretrain.compare import which
from pretrain.compare.which_plan import RoundTimes, WhichPlan
from pretrain.compare.which_trainings import HEAD, WhichTrainings, candidate_of
from pretrain.metrics.card_rates import read_rates
from pretrain.model.distributed import as_launched
from pretrain.plan.plan import KEPT_FREE, Plan
from pretrain.plan.speed import Prediction, predict
from pretrain.plan.targets import devices_called, obstacle, plan_on
from pretrain.precision.settings import PRECISIONS
from pretrain.run.job import plan_elsewhere
from pretrain.settings.commands import MARGIN_PERCENT, ON_GPU
from pretrain.settings.recipe import Recipe

ANSWERS = Path(__file__).with_name("answers.csv")
# A row of answers.csv.
Answer = dict[str, str]
# A loss within the margin is not assumed for models with more than this multiple of parameters.
SIMILAR = 10
# Conclusions about a precision. `which` need not train a precision with one of the first two.
COSTS_MORE = f"costs more loss than {MARGIN_PERCENT} %"
NOT_FASTER = "not faster"
FASTER = "smaller gain"


@dataclass(frozen=True)
class Estimate:
    """The predicted speed of a precision on a card, and its measured loss."""

    # Number of parameters of the model.
    parameters: int
    prediction: Prediction
    # The row of answers.csv about the nearest model. Empty if the precision was never measured.
    answer: Answer

    @property
    def conclusion(self) -> str:
        """Return the conclusion from the gain and from the interval of the loss."""
        gain = self.prediction.gain
        loss = self.answer.get("loss_in_percent", "nan ± nan")
        middle, half_width = map(float, loss.split(" ± "))
        is_similar = self.parameters <= SIMILAR * int(self.answer.get("parameters", 0))
        # Map each conclusion to a value that is true if the conclusion applies.
        conclusions = {
            COSTS_MORE: middle - half_width > MARGIN_PERCENT,
            f"not known: {self.prediction.basis}": gain is None,
            NOT_FASTER: gain is not None and round(gain, 2) <= 1,
            FASTER: is_similar and middle + half_width <= MARGIN_PERCENT,
            "not known: loss": True,
        }
        return next(conclusion for conclusion, applies in conclusions.items() if applies)


def main(options: argparse.Namespace) -> int:
    """Run `which` on this machine. With --on, predict its answer instead, and return 0.

    Raises InputError for invalid options, and if the card cannot train the baseline.
    """
    if options.on is None:
        return which.main(options)
    recipe = which.checked_recipe(options)
    if recipe.train.epochs and not options.steps:
        raise InputError("`train.epochs` needs the number of packs; with --on, set --steps instead")
    plans = plans_on(options, recipe)
    base = next(iter(plans.values()))
    parameters = base.flops.parameters
    answers = nearest_answers(parameters, of_mixtures=base.flops.choices > 0)
    estimates = {
        name: Estimate(
            parameters,
            predict(plan, read_rates(plan.devices.name)),
            next((answer for answer in answers if answer["precision"] == name), {}),
        )
        for name, plan in plans.items()
    }
    print(f"{recipe.name}, {count(parameters)} parameters, on {base.devices}\n")
    print(table_of_answers(answers, base.devices.capability))
    largest = max(int(answer["parameters"]) for answer in answers)
    if parameters > largest:
        print(f"\nNo such model above {count(largest)} parameters was measured.")
    print(f"\n{table_of_estimates(estimates)}")
    print(f"\nBasis of the first speed: {next(iter(estimates.values())).prediction.basis}.")
    print(time_of_which(options, recipe, estimates))
    return 0


def plans_on(options: argparse.Namespace, recipe: Recipe) -> dict[str, Plan]:
    """Return the plans of the trials of `which` on the card, by precision, the baseline first.

    Print the reason for each candidate that is skipped, because the card cannot train it, and for
    experts that stay in BF16.
    """
    devices = devices_called(options.on)
    if devices.count > 1:
        raise InputError(
            f"--on {options.on}: a run of `which` trains on one GPU; name the card alone, and set "
            "--gpus to the number of cards"
        )
    first, *others = (name for name, precision in PRECISIONS.items() if precision.quantized)
    names = options.precisions or ["bf16", first, f"{first}{HEAD}", *others]
    overrides = tuple(options.overrides)
    trainings = WhichTrainings(recipe, options.recipe, overrides, ON_GPU, Path())
    accelerator, _ = as_launched(recipe)
    plans: dict[str, Plan] = {}
    for cell in trainings.trial(names).cells:
        try:
            plan = plan_on(devices, *plan_elsewhere(cell.recipe, accelerator, overrides))
            check_card(plan)
            plans[candidate_of(cell)] = plan
            for reason in plan.experts_in_bf16:
                print(f"{candidate_of(cell)}: {reason}")
        except InputError as error:
            if not plans:
                raise InputError(f"--on {options.on}: {candidate_of(cell)}: {error}") from error
            print(f"skipped: {candidate_of(cell)}: {error}")
    return plans


def check_card(plan: Plan) -> None:
    """Raise InputError if the card lacks a precision of the plan or has too little memory."""
    if reason := obstacle(plan):
        raise InputError(reason)
    takes = plan.takes(min(plan.expected_microbatch, plan.packs_per_rank))
    available = plan.devices.memory / (1 - KEPT_FREE)
    if takes > available:
        raise InputError(
            f"needs {memory(takes / GIB)}, but the card has {memory(available / GIB)}; set a "
            "smaller `batch.microbatch`, `optimizer.offload: moments` or "
            "`model.gradient_checkpointing: full`"
        )


def nearest_answers(parameters: int, *, of_mixtures: bool) -> list[Answer]:
    """Return the rows about mixtures of experts, or about dense models, the nearest models first.

    The distance is the difference between the logarithms of the numbers of parameters. Of one
    model, the rows with the most seeds are first.
    """
    with ANSWERS.open(encoding="utf-8", newline="") as file:
        answers = [row for row in csv.DictReader(file) if (row["experts"] != "0") == of_mixtures]
    return sorted(
        answers,
        key=lambda row: (abs(math.log(int(row["parameters"]) / parameters)), -int(row["seeds"])),
    )


def table_of_answers(answers: list[Answer], capability: tuple[int, int] | None) -> str:
    """Return a table of three answers of `which`. Those on cards of the same kind are first.

    capability: the compute capability of the card.
    """
    by_card = sorted(
        (answer for answer in answers if answer["answer"]),
        key=lambda answer: devices_called(answer["card"]).capability != capability,
    )
    columns = {
        "model": "recorded answer",
        "card": "card",
        "precision": "precision",
        "seeds": "seeds",
        "loss_in_percent": "loss in percent",
        "speed": "speed",
        "gain": "gain at equal loss",
        "gain_interval": "its interval",
        "answer": "answer",
    }
    return markdown(
        list(columns.values()),
        [[answer[column] or UNKNOWN for column in columns] for answer in by_card[:3]],
        names=3,
    )


def table_of_estimates(estimates: dict[str, Estimate]) -> str:
    """Return a table of the baseline, which is the first precision, and the candidates."""
    base, *candidates = estimates
    conclusions = {name: estimates[name].conclusion for name in candidates} | {base: "baseline"}
    faster = [name for name in candidates if conclusions[name] == FASTER]
    if faster:
        best = max(faster, key=lambda name: estimates[name].prediction.gain or 0.0)
        conclusions[best] = "try first"
    rows = [
        [
            name,
            or_dash(estimate.prediction.tokens_per_second, "{:,.0f}".format),
            or_dash(estimate.prediction.gain, "{:.2f} ×".format),
            or_dash(estimate.prediction.gain_bar, percent),
            *(
                estimate.answer.get(column, UNKNOWN)
                for column in ("loss_in_percent", "model", "seeds", "verdict")
            ),
            conclusions[name],
        ]
        for name, estimate in estimates.items()
    ]
    header = ["predicted", "tokens/s", "gain over bf16", "±", "loss in percent", "measured with"]
    return markdown([*header, "seeds", "verdict", "conclusion"], rows)


def time_of_which(
    options: argparse.Namespace, recipe: Recipe, estimates: dict[str, Estimate]
) -> str:
    """Return the predicted time of `which` on the card, and the command to run there.

    Unless --precisions is set, skip candidates that cost too much loss or are not faster. The time
    limit, --hours, is ignored.
    """
    base, *candidates = estimates
    skipped = () if options.precisions else (COSTS_MORE, NOT_FASTER)
    names = [base, *(name for name in candidates if estimates[name].conclusion not in skipped)]
    speeds = {name: estimates[name].prediction.tokens_per_second for name in names}
    speed = speeds[base]
    if len(names) == 1:
        return f"No precision is worth a run of `which` on this card: train in {base}."
    if speed is None:
        return f"The time of `which` is not known: {estimates[base].prediction.basis}."
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
        # Without these limits, a run has the steps of the recipe, or those of --steps.
        in_an_epoch=math.inf,
        at_once=at_once,
        seconds_left=math.inf,
    )
    seconds = RoundTimes(plan, at_once).planned_seconds()
    given = {
        "--precisions": ",".join(names),
        "--hours": f"{math.ceil(seconds / 360) / 10:g}",
        "--seeds": options.seeds,
        "--margin": options.margin,
        "--steps": options.steps,
        "--gpus": options.gpus,
        "--from": options.begin_with,
        "--config": options.config,
        "--run_dir": options.run_dir,
    }
    command = ["python", "-m", "pretrain", "which", str(options.recipe), *options.overrides]
    command += [str(word) for option in given.items() if option[1] for word in option]
    return (
        f"`which` takes about {duration(seconds)} on {plural(at_once, 'such card')}, for "
        f"{plan.seeds} seeds of {plan.steps:,} steps. In fewer --hours, its runs are shorter:\n"
        f"  {shlex.join(command)}"
    )
