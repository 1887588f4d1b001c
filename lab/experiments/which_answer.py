"""Write the answer of `which`: the table, the advice, and the conditions of its validity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from foundation.files import write_json
from foundation.units import UNKNOWN, count, memory, or_dash, signed, tables, wrap
from lab.compare.differences import EQUIVALENT, WITHIN_MARGIN, LossDifference
from lab.experiments.matrix_file import as_overrides
from lab.experiments.protocol import Protocol, Rounds
from lab.experiments.verdicts import NO_GAIN, USE, Verdict, verdict_of, verdicts_after
from lab.experiments.which_trainings import WhichTrainings
from pretrain.launch.launcher import Launch

# File with the verdicts, in the folder of the runs.
VERDICT_FILE = "verdict.json"
# Entry of the baseline in the table's column "verdict".
BASELINE = "baseline"


def write_answer(trainings: WhichTrainings, rounds: Rounds) -> str:
    """Write verdict.json, and return the table and the answer as text."""
    protocol = rounds.protocol
    verdicts = verdicts_after(rounds)
    text = answer(trainings, protocol, verdicts)
    content = {
        "answer": text,
        "conditions": conditions(trainings, protocol),
        "protocol": asdict(protocol),
        "candidates": {verdict.name: verdict.as_json() for verdict in verdicts},
    }
    write_json(trainings.folder / VERDICT_FILE, content)
    return f"{table(rounds, verdicts)}\n\n{text}"


def progress(rounds: Rounds, name: str) -> str:
    """Return the loss difference and the verdict of the candidate `name` until now, as a line."""
    _, seeds, held_out, *_, word = _row(
        rounds.protocol, verdict_of(rounds.protocol, rounds.runs, name)
    )
    return f"round {seeds}, {name}: held-out loss {held_out}, {word}"


def conditions(trainings: WhichTrainings, protocol: Protocol) -> str:
    """Return the conditions for the answer to be valid, as text."""
    tokens = count(protocol.steps * trainings.recipe.batch.tokens)
    lines = [
        f"This result is valid for this model after {tokens} tokens. Longer runs and larger models "
        "may need a more exact precision. The confidence of the table's intervals is "
        f"{100 * (1 - protocol.error):.3g} % after every round. They decide `worse` and `better`, "
        "and the narrower intervals of the verdicts decide `equivalent` and `within the margin` "
        "(docs/studies/statistics.md has the limits of these intervals)."
    ]
    schedule = trainings.recipe.schedule
    if schedule.kind in ("cosine", "linear") or (schedule.kind == "wsd" and schedule.decay > 0.5):
        lines.append(
            "All gains are upper estimates: the learning rate decays for more than half of the "
            "steps, and the decay makes the slope of the loss too steep (docs/comparing.md)."
        )
    if protocol.begin_with:
        lines.append(
            f"This answer is about the checkpoint {protocol.begin_with}. Its part of a loss "
            "difference is the same for all seeds, so no interval shows the effect of another "
            "checkpoint."
        )
    return "\n".join(map(wrap, lines))


def answer(trainings: WhichTrainings, protocol: Protocol, verdicts: Sequence[Verdict]) -> str:
    """Return a text with one line for each candidate, and the recommendation.

    If a precision is recommended, the last line is the command that trains with this precision.
    """
    lines = []
    for verdict in verdicts:
        interval = interval_within(protocol, verdict)
        lines.append(wrap(f"{verdict.name}: {verdict.word}{interval}, {verdict.advice}."))
    for verdict in verdicts:
        if verdict.advice == USE:
            lines += recommendation(trainings, protocol, verdict)
    if all(verdict.advice == NO_GAIN for verdict in verdicts):
        lines.append(f"Stay with {protocol.base}.")
    elif not any(verdict.speedup for verdict in verdicts):
        lines.append(
            "No recommendation: speeds of emulated precisions are unknown. Repeat this on a GPU."
        )
    return "\n".join(lines)


def recommendation(trainings: WhichTrainings, protocol: Protocol, best: Verdict) -> list[str]:
    """Return two lines about the recommended candidate: its gain and the command to train it."""
    assert best.gain_interval
    low, high = best.gain_interval
    values = trainings.values_of(best.name)
    if protocol.begin_with:
        values["train.begin_with"] = protocol.begin_with
    overrides = [*trainings.overrides, *as_overrides(values)]
    launch = Launch(trainings.accelerate, (str(trainings.recipe_file), *overrides))
    choice = f"{'with' if protocol.settings else 'in'} {best.name}"
    gain = f"{best.gain:.2f} times ({low:.2f} to {high:.2f}) {protocol.base}'s speed"
    return [f"Train {choice}: {gain} at equal loss.", f"  {launch.text}"]


def interval_within(protocol: Protocol, verdict: Verdict) -> str:
    """Return the interval that shows that the loss difference lies within the margin.

    The interval is narrower than the interval in the table (`LossDifference.verdict`).
    Return an empty string if the verdict is not "equivalent" or "within the margin".
    """
    held_out = verdict.held_out
    if held_out is None or not verdict.word.endswith((EQUIVALENT, WITHIN_MARGIN)):
        return ""
    error = 2 * protocol.error
    ends = [signed(100 * end / held_out.baseline, 3) for end in held_out.interval(error)]
    return (
        f" ({100 * (1 - error):.3g} % interval: {' to '.join(ends)} %, "
        f"within ± {100 * protocol.margin:g} %)"
    )


def table(rounds: Rounds, verdicts: Sequence[Verdict]) -> str:
    """Return the Markdown tables of the baseline and the candidates in `verdicts`."""
    protocol = rounds.protocol
    base = verdict_of(protocol, rounds.runs, protocol.base)
    baseline = replace(base, word=BASELINE, speedup=None, tokens=None, gain_interval=None)
    header = [
        "candidate",
        "seeds",
        f"served in {protocol.served}" if protocol.served else "held-out loss",
        "training loss",
        "tokens/s",
        "speed",
        "tokens for equal loss",
        "gain at equal loss",
        "its interval",
        "memory",
        "verdict",
    ]
    return tables(header, [_row(protocol, verdict) for verdict in (baseline, *verdicts)])


def _row(protocol: Protocol, verdict: Verdict) -> list[str]:
    """Return the cells of the table's row of the baseline or a candidate."""
    factor = "{:.2f} ×".format
    held_out = verdict.held_out
    return [
        verdict.name,
        str(len(held_out.by_seed) if held_out else 0),
        _loss(protocol, verdict, held_out),
        _loss(protocol, verdict, verdict.trained),
        or_dash(verdict.tokens_per_second, "{:,.0f}".format),
        or_dash(verdict.speedup, factor),
        or_dash(verdict.tokens, factor),
        or_dash(verdict.gain, factor),
        or_dash(verdict.gain_interval, "{0[0]:.2f} to {0[1]:.2f}".format),
        or_dash(verdict.memory_gib, memory),
        verdict.word,
    ]


def _loss(protocol: Protocol, verdict: Verdict, difference: LossDifference | None) -> str:
    """Return a loss difference in percent of the baseline's loss: "+0.071 ± 0.150 %".

    If `verdict` is the baseline's, return the loss itself. Return a dash if `difference` is None.
    """
    if difference is None:
        return UNKNOWN
    if verdict.word == BASELINE:
        return f"{difference.baseline:.4f}"
    to_percent = 100 / difference.baseline
    half_width = difference.half_width(protocol.error)
    interval = "" if half_width is None else f" ± {to_percent * half_width:.3f}"
    return f"{signed(to_percent * difference.mean, 3)}{interval} %"
