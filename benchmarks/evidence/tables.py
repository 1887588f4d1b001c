"""Write the tables and the picture of the evidence: the cost in loss of each precision.

    python -m benchmarks.evidence.tables

Reads `benchmarks/results/loss/h200_evidence_*.jsonl`. Writes `benchmarks/evidence/results.md`, and
the table and the picture of docs/evidence.md.

A file is a *scale*: a model of one size on one dataset. Each line of a file is a session or a run.
A session is one command on one machine. Its line has the settings that its runs share. A run is one
cell with one seed. A cell is a precision with its options. A run is compared with the baseline of
the same seed in the same session, because a baseline on another machine has a slightly different
loss. If a seed was trained in several sessions, the mean of its differences is used. Verdicts are
corrected by Holm's method for all tests of an endpoint (BF16 evaluation, or training loss).
"""

from __future__ import annotations

import io
import json
import math
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.evidence.t_interval import t_half_width, t_probability
from benchmarks.machine import with_tables
from foundation.files import replace_file
from foundation.units import UNKNOWN, markdown, or_dash, plural
from pretrain.compare.differences import (
    BETTER,
    CANNOT_TELL,
    CONFIDENCE,
    EQUIVALENT,
    FEWEST_SEEDS,
    MARGIN,
    WORSE,
    LossDifference,
)

RESULTS = Path("benchmarks/results/loss")
PAGE = Path("benchmarks/evidence/results.md")
ANSWER = Path("docs/evidence.md")
PICTURE = Path("docs/evidence.png")
SCALES = ("14m", "14m_lr2", "35m", "35m_once", "111m", "111m_five_times", "continued")
BASELINE = "bf16"
# Cells whose equivalence is tested, as the design says. All other cells are estimates.
TESTED = tuple(
    f"{cell}_branch" for cell in ("delayed", "delayed_head", "current", "block", "mxfp8")
)
# Rows of docs/evidence.md: scale, cell, label.
ROWS = (
    ("14m", "delayed_branch", "FP8, delayed scaling"),
    ("14m", "delayed_head_branch", "FP8, delayed scaling, the head in FP8 too"),
    ("14m", "delayed_kept_branch", "FP8, delayed scaling, its last layer in BF16"),
    ("14m", "current_branch", "FP8, current scaling"),
    ("14m", "block_branch", "FP8, blocks"),
    ("14m", "mxfp8_branch", "MXFP8, emulated"),
    ("14m", "nvfp4_branch", "NVFP4 in every linear, emulated"),
    ("14m", "nvfp4_kept_branch", "NVFP4, its last layer in BF16, emulated"),
    ("14m", "nvfp4_then_bf16_branch", "NVFP4, the decay in BF16, emulated"),
    ("14m", "mxfp4_branch", "MXFP4, emulated"),
    ("14m", "bf16_weights_branch", "plain BF16 weights, which lose updates"),
    ("35m", "delayed_branch", "FP8, delayed scaling"),
    ("35m", "delayed_head_branch", "FP8, delayed scaling, the head in FP8 too"),
    ("35m_once", "delayed_branch", "FP8, delayed scaling"),
    ("111m", "delayed_branch", "FP8, delayed scaling"),
)
# Map each verdict in the picture to the colours of line and marker, and to an explanation.
STYLES = {
    EQUIVALENT: ("#0072B2", "#0072B2", "within the margin, shown by a test"),
    CANNOT_TELL: ("#D55E00", "#D55E00", "neither equivalence nor a difference is shown"),
    "estimate": ("#555555", "white", "no test was planned"),
}
# Labels of the scales in ROWS.
SIZES = {
    "14m": "14 million",
    "35m": "35 million",
    "35m_once": "35 million, new data",
    "111m": "112 million",
}

Run = Mapping[str, Any]
Measure = Callable[[Run], float | None]  # a figure of a run, or None if the run has none


def served_loss(run: Run) -> float | None:
    """Return the held-out loss of the final weights, evaluated in BF16, in nats per token.

    The loss was computed by plain transformers.
    """
    return run["final"]["held_out_loss"]


def trained_loss(run: Run) -> float | None:
    """Return the final held-out loss, evaluated in the run's precision, in nats per token."""
    return run["trained_held_out"][-1][1]


def training_loss(run: Run) -> float:
    """Return the mean training loss of the last 100 steps, computed in the run's precision."""
    return statistics.fmean(run["last_losses"])


@dataclass(frozen=True)
class Scale:
    """A result file: its sessions by number, and its runs."""

    name: str
    sessions: Mapping[int, Mapping[str, Any]]
    runs: tuple[Run, ...]

    @classmethod
    def read(cls, name: str) -> Scale:
        """Read the result file of a scale."""
        text = (RESULTS / f"h200_evidence_{name}.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        runs = tuple(line for line in lines if "run" in line)
        return cls(name, {line["session"]: line for line in lines if "run" not in line}, runs)

    @property
    def cells(self) -> list[str]:
        """Return the names of all cells, in the order of the file."""
        return list(dict.fromkeys(run["cell"] for run in self.runs))

    def of(self, cell: str) -> Iterator[Run]:
        """Yield the runs of a cell."""
        return (run for run in self.runs if run["cell"] == cell)

    def has_broken_run(self, cell: str) -> bool:
        """Return True if a run of the cell did not finish.

        Such a cell has no mean, because a mean over the other runs would make it look better.
        """
        return any("halted" in run or served_loss(run) is None for run in self.of(cell))

    def above_baseline(self, cell: str, measure: Measure) -> dict[int, float]:
        """Map each seed to the cell's figure minus the baseline's figure in the same session."""
        base = {(run["session"], run["seed"]): measure(run) for run in self.of(BASELINE)}
        differences = defaultdict(list)
        for run in self.of(cell):
            value = measure(run)
            base_value = base.get((run["session"], run["seed"]))
            if value is not None and base_value is not None:
                differences[run["seed"]].append(value - base_value)
        return {seed: statistics.fmean(values) for seed, values in sorted(differences.items())}

    def level(self, measure: Measure, seeds: Iterable[int] | None = None) -> float:
        """Return the baseline's figure: the mean over `seeds` (or all) of the mean over runs."""
        values = defaultdict(list)
        for run in self.of(BASELINE):
            if (value := measure(run)) is not None:
                values[run["seed"]].append(value)
        return statistics.fmean(statistics.fmean(values[seed]) for seed in (seeds or values))

    def difference(self, cell: str, measure: Measure = served_loss) -> LossDifference | None:
        """Return the differences of the cell from the baseline.

        Return None if a run of the cell did not finish, or if no seed was trained for both the cell
        and the baseline.
        """
        above = {} if self.has_broken_run(cell) else self.above_baseline(cell, measure)
        if not above:
            return None
        difference = LossDifference.of(above, dict.fromkeys(above, 0.0))
        return replace(difference, baseline=self.level(measure, above))


def share(difference: LossDifference | None) -> str:
    """Return a difference as a share of the baseline's loss, such as "+0.07 ± 0.14 %".

    The interval is missing if there are too few seeds.
    """
    if difference is None:
        return UNKNOWN
    percent = 100 / difference.baseline
    half = t_half_width(difference)
    interval = "" if half is None else f" ± {percent * half:.2f}"
    return f"{percent * difference.mean:+.2f}{interval} %".replace("-", "−")


def p_values(difference: LossDifference) -> tuple[float, float]:
    """Return p of the two one-sided t tests against MARGIN, and of a two-sided test against zero.

    `difference` must have at least FEWEST_SEEDS seeds.
    """
    freedom = len(difference.by_seed) - 1
    error = statistics.stdev(difference.by_seed.values()) / math.sqrt(freedom + 1)
    size = abs(difference.mean)
    to_margin = (MARGIN * difference.baseline - size) / error
    inside = t_probability(abs(to_margin), freedom)
    equivalence = (1 - math.copysign(inside, to_margin)) / 2
    return equivalence, 1 - t_probability(size / error, freedom)


def holm(p_values: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Return the p values after the correction of Holm (1979) for n tests.

    The smallest is multiplied by n, the next one by n - 1, and so on.
    """
    adjusted = {}
    largest = 0.0
    for place, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[key]))
        adjusted[key] = largest
    return adjusted


@dataclass(frozen=True)
class Endpoint:
    """Differences and verdicts of one figure, such as the training loss, by (scale, cell)."""

    differences: Mapping[tuple[str, str], LossDifference | None]
    verdicts: Mapping[tuple[str, str], str]  # only of tested cells

    @classmethod
    def of(cls, scales: Mapping[str, Scale], measure: Measure) -> Endpoint:
        """Compute the differences of all cells, and test the cells in TESTED."""
        differences = {
            (name, cell): scale.difference(cell, measure)
            for name, scale in scales.items()
            for cell in scale.cells
        }
        tested = {
            key: difference
            for key, difference in differences.items()
            if key[1] in TESTED and difference and len(difference.by_seed) >= FEWEST_SEEDS
        }
        p = {key: p_values(difference) for key, difference in tested.items()}
        equivalence = holm({key: values[0] for key, values in p.items()})
        zero = holm({key: values[1] for key, values in p.items()})
        verdicts = {}
        for key, difference in tested.items():
            if equivalence[key] < 1 - CONFIDENCE:
                verdicts[key] = EQUIVALENT
            elif zero[key] >= 1 - CONFIDENCE:
                verdicts[key] = CANNOT_TELL
            else:
                verdicts[key] = WORSE if difference.mean > 0 else BETTER
        return cls(differences, verdicts)

    def verdict(self, scale: str, cell: str) -> str:
        """Return the verdict of a tested cell, or "estimate"."""
        difference = self.differences[scale, cell]
        if difference is None:
            return "broke off"
        if (scale, cell) in self.verdicts:
            return self.verdicts[scale, cell]
        seeds = len(difference.by_seed)
        if seeds < FEWEST_SEEDS:
            return f"{plural(seeds, 'seed')}: no interval"
        return "estimate"


def cells_table(scale: Scale, served: Endpoint, training: Endpoint) -> str:
    """Return the table of a scale. The first row has the losses of the baseline."""
    header = [
        "cell",
        "seeds",
        "served in BF16",
        "verdict",
        "as trained",
        "training loss",
        "its verdict",
        "KL",
        "last word",
    ]
    between_baselines = mean(
        value
        for session in scale.sessions.values()
        for value in session["kl_between_baseline_seeds"]
    )
    rows = []
    for cell in [BASELINE, *(cell for cell in scale.cells if cell != BASELINE)]:
        seeds = str(len({run["seed"] for run in scale.of(cell)}))
        last_word = mean(run["final"].get("last_word_accuracy") for run in scale.of(cell))
        if cell == BASELINE:
            losses = [
                f"{scale.level(measure):.4f}"
                for measure in (served_loss, trained_loss, training_loss)
            ]
            verdicts = ["baseline", "baseline"]
            distance = "1"
        else:
            losses = [
                share(served.differences[scale.name, cell]),
                share(scale.difference(cell, trained_loss)),
                share(training.differences[scale.name, cell]),
            ]
            verdicts = [served.verdict(scale.name, cell), training.verdict(scale.name, cell)]
            to_baseline = mean(run["final"]["kl_to_baseline"] for run in scale.of(cell))
            distance = UNKNOWN
            if to_baseline is not None and between_baselines:
                distance = f"{to_baseline / between_baselines:.2f}"
        row = [cell, seeds, losses[0], verdicts[0], *losses[1:], verdicts[1]]
        rows.append([*row, distance, or_dash(last_word, "{:.1%}".format)])
    return markdown(header, rows)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if there are none."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


def answer_table(scales: Mapping[str, Scale]) -> str:
    """Return the table of docs/evidence.md."""
    served = Endpoint.of(scales, served_loss)
    training = Endpoint.of(scales, training_loss)
    header = [
        "above BF16",
        "parameters",
        "tokens per parameter",
        "seeds",
        "served in BF16",
        "verdict",
        "as trained",
        "training loss",
        "its verdict",
    ]
    rows = []
    for name, cell, label in ROWS:
        session = scales[name].sessions[1]
        difference = served.differences[name, cell]
        row = [
            label,
            SIZES[name],
            f"{session['tokens'] / session['parameters']:.0f}",
            str(len(difference.by_seed)),
            share(difference),
            served.verdict(name, cell),
            share(scales[name].difference(cell, trained_loss)),
            share(training.differences[name, cell]),
            training.verdict(name, cell),
        ]
        rows.append(row)
    return markdown(header, rows)


def draw(scales: Mapping[str, Scale]) -> bytes:
    """Return a PNG with the differences in BF16 evaluation, their intervals, and the margin."""
    from matplotlib.figure import Figure  # takes half a second to import

    served = Endpoint.of(scales, served_loss)
    # Rows with the same size are next to each other. The name of the size is on a line above them.
    places: dict[float, str] = {}
    figure = Figure(figsize=(10, 6.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    margin = axes.axvspan(-100 * MARGIN, 100 * MARGIN, color="#E8EEF2")
    axes.axvline(0, color="#888888", linewidth=0.8)
    for name, cell, label in ROWS:
        number, *on = SIZES[name].split(",")
        size = ",".join([f"{number} parameters", *on])
        if size not in places.values():
            places[len(places) + 0.25] = size
        place = len(places)
        places[place] = label
        difference = served.differences[name, cell]
        verdict = served.verdict(name, cell)
        percent = 100 / difference.baseline
        line, marker, _ = STYLES.get(verdict, STYLES["estimate"])
        axes.errorbar(
            percent * difference.mean,
            place,
            xerr=percent * t_half_width(difference),
            fmt="o",
            color=line,
            markerfacecolor=marker,
            capsize=3,
        )
        axes.annotate(
            f"{share(difference)}, {len(difference.by_seed)} seeds: {verdict}",
            (1, place),
            (6, 0),
            ("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=line,
        )
    axes.set_yticks(list(places), places.values())
    for place, text in zip(places, axes.get_yticklabels(), strict=True):
        text.set_fontweight("bold" if place % 1 else "normal")
    axes.set_ylim(len(places) - 0.4, -0.3)  # the first row is at the top
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("held-out loss of the final weights above BF16's, in %, evaluated in BF16")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [
        axes.errorbar([], [], xerr=[], fmt="o", color=line, markerfacecolor=marker, capsize=3)
        for line, marker, _ in STYLES.values()
    ]
    explanations = [f"{verdict}: {text}" for verdict, (_, _, text) in STYLES.items()]
    figure.legend(
        [*handles, margin],
        [*explanations, f"margin of {100 * MARGIN:g} %: smaller differences count as equal"],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    figure.suptitle(
        "Cost of each precision in loss: means over seeds with 95 % intervals", fontweight="bold"
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def page(scales: Mapping[str, Scale]) -> str:
    """Return results.md: the tables of all scales, with their machines and commits."""
    served = Endpoint.of(scales, served_loss)
    training = Endpoint.of(scales, training_loss)
    introduction = (
        "`python -m benchmarks.evidence.tables` makes this page from `benchmarks/results/loss/`. "
        "[design.md](design.md) describes the cells, and "
        "[docs/evidence.md](../../docs/evidence.md) discusses the results. "
        "A difference is the loss of the cell minus the loss of the baseline with the same seed, "
        "in percent of the baseline's loss. Each figure is a mean over seeds with a 95 % interval "
        "by Student's t. A verdict is the result of two one-sided t tests at 5 % with a margin of "
        f"{100 * MARGIN:g} %, corrected by Holm's method for the {len(served.verdicts)} tests of "
        "an endpoint. The column KL is the KL divergence between the cell and the baseline, "
        "divided by the KL divergence between baselines of two seeds."
    )
    parts = ["# Evidence: the tables", textwrap.fill(introduction, 100)]
    for scale in scales.values():
        session = scale.sessions[1]
        commits = sorted({run["commit"][:8] for run in scale.runs if run.get("commit")})
        head = (
            f"{session['parameters']:,} parameters, {session['tokens']:,} tokens; "
            f"{plural(len(scale.runs), 'run')} in {plural(len(scale.sessions), 'session')} on "
            f"{session['gpus'][0]}s, torch {session['packages']['torch']}. "
            f"Code: {', '.join(commits)}."
        )
        parts += [
            f"## {scale.name}",
            textwrap.fill(head, 100),
            cells_table(scale, served, training),
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write results.md, and the table and picture of docs/evidence.md."""
    scales = {name: Scale.read(name) for name in SCALES}
    replace_file(PAGE, page(scales).encode())
    replace_file(ANSWER, with_tables(ANSWER, "evidence", answer_table(scales)).encode())
    replace_file(PICTURE, draw(scales))


if __name__ == "__main__":
    main()
