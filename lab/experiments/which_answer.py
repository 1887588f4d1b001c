"""Write the answer of `which`: the table, the advice, and the conditions of its validity."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace

from foundation.files import write_json
from foundation.units import count, memory, signed
from lab.compare.columns import Column, table_of
from lab.compare.differences import EQUIVALENT, WITHIN_MARGIN, LossDifference
from lab.experiments.matrix_file import as_overrides
from lab.experiments.verdicts import NO_GAIN, USE, Verdict, verdict_of, verdicts_after
from lab.experiments.which_plan import Rounds, WhichPlan
from lab.experiments.which_trainings import WhichTrainings
from pretrain.launch.launcher import Launch

# File with the verdicts, in the folder of the runs.
VERDICT_FILE = "verdict.json"
# Entry of the baseline in the table's column "verdict".
BASELINE = "baseline"


def write_answer(trainings: WhichTrainings, rounds: Rounds) -> str:
    """Write verdict.json, and return the text to print.

    The text has the table, the answer, and the conditions for the answer to be valid.
    """
    plan = rounds.plan
    verdicts = verdicts_after(rounds)
    text = answer(trainings, plan, verdicts)
    write_json(
        trainings.folder / VERDICT_FILE,
        {
            "answer": text,
            "protocol": asdict(plan),
            "candidates": {verdict.name: verdict.as_json() for verdict in verdicts},
        },
    )
    limits = (
        "This result is valid for this model after "
        f"{count(plan.steps * trainings.recipe.batch.tokens)} tokens, with a margin of "
        f"± {100 * plan.margin:g} % of the baseline's loss. The confidence of the table's "
        f"intervals is {100 * (1 - plan.error):.3g} % after every round, if the differences "
        "between seeds are normally distributed. In simulations with skewed differences, 95 % "
        "intervals missed the mean in 12 % of exponential and 21 % of lognormal series. No "
        "interval takes a rare bad seed into account that has not been trained. Longer runs and "
        "larger models may need a more exact precision."
    )
    return f"{table(rounds, verdicts)}\n\n{text}\n\n{limits}"


def answer(trainings: WhichTrainings, plan: WhichPlan, verdicts: Sequence[Verdict]) -> str:
    """Return a text with one line for each candidate, reservations, and the recommendation.

    If a precision is recommended, the last line is the command that trains with this precision.
    """
    lines = []
    if plan.served:
        lines.append(f"Judged by the held-out loss of the model served in {plan.served}:")
    lines += [
        f"{verdict.name}: {verdict.word}{interval_within(plan, verdict)}, {verdict.advice}."
        for verdict in verdicts
    ]
    schedule = trainings.recipe.schedule
    if schedule.kind in ("cosine", "linear") or (schedule.kind == "wsd" and schedule.decay > 0.5):
        lines.append(
            "All gains are upper estimates: the learning rate decays for more than half of the "
            "steps, and the decay makes the slope of the loss too steep (docs/which.md)."
        )
    if plan.begin_with:
        lines.append(
            f"This answer is about the checkpoint {plan.begin_with}. Its part of a loss "
            "difference is the same for all seeds, so no interval shows the effect of another "
            "checkpoint."
        )
    best = next((verdict for verdict in verdicts if verdict.advice == USE), None)
    if best and best.gain_interval:
        low, high = best.gain_interval
        lines.append(
            f"Train {'with' if plan.settings else 'in'} {best.name}: {best.gain:.2f} times "
            f"({low:.2f} to {high:.2f}) {plan.base}'s speed at equal loss."
        )
        values = trainings.values_of(best.name)
        if plan.begin_with:
            values["train.begin_with"] = plan.begin_with
        overrides = [*trainings.overrides, *as_overrides(values)]
        launch = Launch(trainings.accelerate, (str(trainings.recipe_file), *overrides))
        lines.append(f"  {shlex.join(['accelerate', 'launch', *launch.arguments])}")
    elif all(verdict.advice == NO_GAIN for verdict in verdicts):
        lines.append(f"Stay with {plan.base}.")
    return "\n".join(lines)


def interval_within(plan: WhichPlan, verdict: Verdict) -> str:
    """Return the interval that shows that the loss difference lies within the margin.

    The interval is narrower than the interval in the table (`LossDifference.verdict`).
    Return an empty string if the verdict is not "equivalent" or "within the margin".
    """
    held_out = verdict.held_out
    error = 2 * plan.error
    interval = held_out.interval(error) if held_out else None
    if not (held_out and interval and verdict.word.endswith((EQUIVALENT, WITHIN_MARGIN))):
        return ""
    ends = [signed(100 * end / held_out.baseline, 3) for end in interval]
    return (
        f" ({100 * (1 - error):.3g} % interval: {' to '.join(ends)} %, "
        f"within ± {100 * plan.margin:g} %)"
    )


def table(rounds: Rounds, verdicts: Sequence[Verdict]) -> str:
    """Return the Markdown table of the baseline and the candidates in `verdicts`."""
    plan = rounds.plan
    baseline = replace(
        verdict_of(plan, rounds.runs, plan.base),
        word=BASELINE,
        speedup=1.0,
        tokens=1.0,
        gain_interval=None,
    )
    evaluated = f"served in {plan.served}" if plan.served else "held-out loss"
    columns = [
        Column(
            "candidate" if plan.settings else "precision",
            "",
            lambda verdict: verdict.name,
            is_text=True,
        ),
        Column(
            "seeds", "", lambda verdict: len(verdict.held_out.by_seed) if verdict.held_out else 0
        ),
        Column(evaluated, "", lambda verdict: _loss(plan, verdict, verdict.held_out)),
        Column("training loss", "", lambda verdict: _loss(plan, verdict, verdict.trained)),
        Column("tokens/s", "", lambda verdict: verdict.tokens_per_second, "{:,.0f}".format),
        Column("speed", "", lambda verdict: verdict.speedup, "{:.2f} ×".format),
        Column("tokens for equal loss", "", lambda verdict: verdict.tokens, "{:.2f} ×".format),
        Column("gain at equal loss", "", lambda verdict: verdict.gain, "{:.2f} ×".format),
        Column(
            "its interval",
            "",
            lambda verdict: verdict.gain_interval,
            "{0[0]:.2f} to {0[1]:.2f}".format,
        ),
        Column("memory", "", lambda verdict: verdict.memory_gib, memory),
        Column("verdict", "", lambda verdict: verdict.word),
    ]
    return table_of(columns, [baseline, *verdicts])


def _loss(plan: WhichPlan, verdict: Verdict, difference: LossDifference | None) -> str | None:
    """Return a loss difference in percent of the baseline's loss: "+0.071 ± 0.150 %".

    If `verdict` is the baseline's, return the loss itself. Return None if `difference` is None.
    """
    if difference is None:
        return None
    if verdict.word == BASELINE:
        return f"{difference.baseline:.4f}"
    scale = 100 / difference.baseline
    half = difference.half_width(plan.error)
    interval = "" if half is None else f" ± {scale * half:.3f}"
    return f"{signed(scale * difference.mean, 3)}{interval} %"
