"""The evidence's result files as tables: what each precision costs in loss, as a mean over seeds with its interval.

    python -m benchmarks.evidence.tables

writes `benchmarks/evidence/results.md`, and the table and the picture of the answer in docs/evidence.md, from
`benchmarks/results/loss/h200_evidence_*.jsonl`. A file is a scale: a model of one size on one text. Its lines are sessions (a
command on a machine, with the settings that its runs share) and runs (a cell, that is a precision with its options, under one
seed). A run is held against the baseline of its seed in its own session, as another machine's baseline ends elsewhere by chance.
A seed that several sessions have counts once, by the mean of its differences. Verdicts are those after Holm's correction over all
tests of an endpoint.
"""

from __future__ import annotations

import io
import json
import math
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import with_tables
from foundation.files import replace_file
from foundation.units import UNKNOWN, markdown, or_dash
from pretrain.compare.differences import (
    BETTER,
    CANNOT_TELL,
    CONFIDENCE,
    EQUIVALENT,
    FEWEST_SEEDS,
    MARGIN,
    WORSE,
    SeedDifference,
    t_probability,
)

RESULTS = Path("benchmarks/results/loss")
PAGE, ANSWER, PICTURE = (
    Path("benchmarks/evidence/results.md"),
    Path("docs/evidence.md"),
    Path("docs/evidence.png"),
)
SCALES = ("14m", "14m_lr2", "35m", "35m_once", "111m", "111m_five_times", "continued")
BASELINE = "bf16"
LAST_STEPS = 100  # whose mean is a run's training loss
# Whose equivalence was to be tested before any of them ran; all other cells are estimates.
TESTED = tuple(
    f"{cell}_branch" for cell in ("delayed", "delayed_head", "current", "block", "mxfp8")
)
# The rows of the answer: a scale, a cell, and what it is called; and what a scale is called.
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
SIZES = {
    "14m": "14 million",
    "35m": "35 million",
    "35m_once": "35 million, new text",
    "111m": "112 million",
}

Run = Mapping[str, Any]
Measure = Callable[[Run], float | None]  # a figure of a run, None where it has none


def served_loss(run: Run) -> float | None:
    """Held-out loss of the last weights in BF16 by plain transformers, nats a token."""
    return run["final"]["held_out_loss"]


def trained_loss(run: Run) -> float | None:
    """The same in the precision that trained, as the run itself evaluated it."""
    return run["trained_held_out"][-1][1]


def training_loss(run: Run) -> float:
    """Mean of the last LAST_STEPS steps, in the precision that trained."""
    return statistics.fmean(run["last_losses"])


@dataclass(frozen=True)
class Scale:
    """One file: its sessions by number, and all runs."""

    name: str
    sessions: Mapping[int, Mapping[str, Any]]
    runs: tuple[Run, ...]

    @classmethod
    def read(cls, name: str) -> Scale:
        lines = [
            json.loads(line)
            for line in (RESULTS / f"h200_evidence_{name}.jsonl").read_text().splitlines()
        ]
        runs = tuple(line for line in lines if "run" in line)
        return cls(name, {line["session"]: line for line in lines if "run" not in line}, runs)

    @property
    def cells(self) -> list[str]:
        return list(dict.fromkeys(run["cell"] for run in self.runs))

    def of(self, cell: str) -> Iterator[Run]:
        return (run for run in self.runs if run["cell"] == cell)

    def broken(self, cell: str) -> bool:
        """Whether a run of the cell came to no end: the mean of the others would flatter it."""
        return any("halted" in run or served_loss(run) is None for run in self.of(cell))

    def above_baseline(self, cell: str, measure: Measure) -> dict[int, float]:
        """Return by seed the figure minus that of the baseline in the same session."""
        base = {(run["session"], run["seed"]): measure(run) for run in self.of(BASELINE)}
        differences = defaultdict(list)
        for run in self.of(cell):
            ours, theirs = measure(run), base.get((run["session"], run["seed"]))
            if ours is not None and theirs is not None:
                differences[run["seed"]].append(ours - theirs)
        return {seed: statistics.fmean(values) for seed, values in sorted(differences.items())}

    def level(self, measure: Measure, seeds: Iterator[int] | None = None) -> float:
        """The baseline's figure, the mean over seeds of the mean over its runs."""
        values = defaultdict(list)
        for run in self.of(BASELINE):
            if (value := measure(run)) is not None:
                values[run["seed"]].append(value)
        return statistics.fmean(statistics.fmean(values[seed]) for seed in (seeds or values))

    def difference(self, cell: str, measure: Measure = served_loss) -> SeedDifference | None:
        """The cell above the baseline; None where no seed has both, or one of its runs came to no end."""
        above = {} if self.broken(cell) else self.above_baseline(cell, measure)
        if not above:
            return None
        return replace(
            SeedDifference.of(above, dict.fromkeys(above, 0.0)),
            baseline=self.level(measure, iter(above)),
        )


def share(difference: SeedDifference | None) -> str:
    """ "+0.07 ± 0.14 %" of the baseline's loss; without an interval where there are too few seeds for one."""
    if difference is None:
        return UNKNOWN
    mean, half = 100 * difference.mean / difference.baseline, difference.half_width()
    interval = "" if half is None else f" ± {100 * half / difference.baseline:.2f}"
    return f"{mean:+.2f}{interval} %".replace("-", "−")


def p_values(difference: SeedDifference) -> tuple[float, float]:
    """Returns p of two one-sided t tests against MARGIN, and of a two-sided one against zero. Over three seeds or more."""
    freedom = len(difference.by_seed) - 1
    error = statistics.stdev(difference.by_seed.values()) / math.sqrt(freedom + 1)
    room = (MARGIN * difference.baseline - abs(difference.mean)) / error
    inside = t_probability(abs(room), freedom)
    return (1 - math.copysign(inside, room)) / 2, 1 - t_probability(
        abs(difference.mean) / error, freedom
    )


def holm(p_values: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Each p value after Holm's correction over all of them (Holm 1979): the smallest counts n times, the next n - 1 times."""
    adjusted, largest = {}, 0.0
    for place, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = adjusted[key] = max(largest, min(1.0, (len(p_values) - place) * p_values[key]))
    return adjusted


@dataclass(frozen=True)
class Endpoint:
    """A figure of all scales: the differences of every cell, and what may be said of those that were to be tested."""

    differences: Mapping[tuple[str, str], SeedDifference | None]  # by scale and cell
    words: Mapping[tuple[str, str], str]

    @classmethod
    def of(cls, scales: Mapping[str, Scale], measure: Measure) -> Endpoint:
        differences = {
            (name, cell): scale.difference(cell, measure)
            for name, scale in scales.items()
            for cell in scale.cells
        }
        tested = {
            key: each
            for key, each in differences.items()
            if key[1] in TESTED and each and len(each.by_seed) >= FEWEST_SEEDS
        }
        p = {key: p_values(each) for key, each in tested.items()}
        equivalence, zero = (
            holm({key: values[test] for key, values in p.items()}) for test in (0, 1)
        )
        words = {key: WORSE if each.mean > 0 else BETTER for key, each in tested.items()}
        words |= {key: CANNOT_TELL for key in tested if zero[key] >= 1 - CONFIDENCE}
        words |= {key: EQUIVALENT for key in tested if equivalence[key] < 1 - CONFIDENCE}
        return cls(differences, words)

    def verdict(self, scale: str, cell: str) -> str:
        """The corrected tests' outcome for what was to be tested; all else is an estimate."""
        difference = self.differences[scale, cell]
        if difference is None:
            return "broke off"
        seeds = len(difference.by_seed)
        return self.words.get(
            (scale, cell), "estimate" if seeds >= FEWEST_SEEDS else f"{seeds} seeds: no interval"
        )


def cells_table(scale: Scale, served: Endpoint, training: Endpoint) -> str:
    """Every cell of a scale beside the baseline, whose own losses stand in the first row."""
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
    levels = [
        f"{scale.level(measure):.4f}" for measure in (served_loss, trained_loss, training_loss)
    ]
    words = [run["final"].get("last_word_accuracy") for run in scale.of(BASELINE)]
    seeds = {run["seed"] for run in scale.of(BASELINE)}
    last_word = or_dash(mean(words), "{:.1%}".format)
    rows = [
        [
            BASELINE,
            str(len(seeds)),
            levels[0],
            "baseline",
            levels[1],
            levels[2],
            "baseline",
            "1",
            last_word,
        ]
    ]
    between = mean(
        [
            value
            for session in scale.sessions.values()
            for value in session["kl_between_baseline_seeds"]
        ]
    )
    for cell in scale.cells:
        if cell == BASELINE:
            continue
        distance = mean([run["final"]["kl_to_baseline"] for run in scale.of(cell)])
        rows.append(
            [
                cell,
                str(len({run["seed"] for run in scale.of(cell)})),
                share(served.differences[scale.name, cell]),
                served.verdict(scale.name, cell),
                share(scale.difference(cell, trained_loss)),
                share(training.differences[scale.name, cell]),
                training.verdict(scale.name, cell),
                f"{distance / between:.2f}" if distance is not None and between else UNKNOWN,
                or_dash(
                    mean([run["final"].get("last_word_accuracy") for run in scale.of(cell)]),
                    "{:.1%}".format,
                ),
            ]
        )
    return markdown(header, rows)


def mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def answer_table(scales: Mapping[str, Scale]) -> str:
    """The rows of docs/evidence.md."""
    served, training = Endpoint.of(scales, served_loss), Endpoint.of(scales, training_loss)
    header = [
        "above BF16",
        "parameters",
        "tokens a parameter",
        "seeds",
        "served in BF16",
        "verdict",
    ]
    header += ["as trained", "training loss", "its verdict"]
    rows = []
    for name, cell, label in ROWS:
        ours, theirs = served.differences[name, cell], training.differences[name, cell]
        as_trained = share(scales[name].difference(cell, trained_loss))
        words = served.verdict(name, cell), training.verdict(name, cell)
        session = scales[name].sessions[1]
        row = [
            label,
            SIZES[name],
            f"{session['tokens'] / session['parameters']:.0f}",
            str(len(ours.by_seed)),
            share(ours),
        ]
        rows.append([*row, words[0], as_trained, share(theirs), words[1]])
    return markdown(header, rows)


def draw(scales: Mapping[str, Scale]) -> bytes:
    """PNG of the column "served in BF16" of the answer: each mean at its value, with its 95 % interval, beside the margin."""
    from matplotlib.figure import Figure  # half a second, which only drawing should cost

    served, styles = (
        Endpoint.of(scales, served_loss),
        {EQUIVALENT: ("#0072B2", "#0072B2"), CANNOT_TELL: ("#D55E00", "#D55E00")},
    )
    figure = Figure(figsize=(10, 5.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.axvspan(-100 * MARGIN, 100 * MARGIN, color="#E8EEF2")
    axes.axvline(0, color="#888888", linewidth=0.8)
    for place, (name, cell, _) in enumerate(ROWS):
        difference, word = served.differences[name, cell], served.verdict(name, cell)
        percent, (colour, face) = 100 / difference.baseline, styles.get(word, ("#555555", "white"))
        mean, half = percent * difference.mean, percent * difference.half_width()
        axes.errorbar(
            mean, place, xerr=half, fmt="o", color=colour, markerfacecolor=face, capsize=3
        )
        text = f"{share(difference)}, {len(difference.by_seed)} seeds: {word}"
        axes.annotate(
            text,
            (1, place),
            (6, 0),
            ("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=colour,
        )
    axes.set_yticks(range(len(ROWS)), [f"{SIZES[scale]}: {label}" for scale, _, label in ROWS])
    axes.invert_yaxis()
    axes.set_xlabel(
        f"held-out loss above BF16, %, weights served in BF16; bars: 95 % interval; shaded: margin of {100 * MARGIN:g} %"
    )
    axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def page(scales: Mapping[str, Scale]) -> str:
    """All tables, with the machines and commits behind each."""
    served, training = Endpoint.of(scales, served_loss), Endpoint.of(scales, training_loss)
    parts = [
        "# Evidence: the tables",
        textwrap.fill(
            "`python -m benchmarks.evidence.tables` makes this page from `benchmarks/results/loss/`. What the cells are is in "
            "[design.md](design.md), what they mean in [docs/evidence.md](../../docs/evidence.md). Losses are shares of the "
            "baseline's, means over seeds with the 95 % interval by Student's t. The verdict is that of two one-sided t tests "
            f"at 5 % against a margin of {100 * MARGIN:g} %, after Holm's correction over the {len(served.words)} tests of an "
            "endpoint. KL is over that between baselines of two seeds.",
            100,
        ),
    ]
    for scale in scales.values():
        session = scale.sessions[1]
        commits = sorted({run["commit"][:8] for run in scale.runs if run.get("commit")})
        head = f"{session['parameters']:,} parameters, {session['tokens']:,} tokens; {len(scale.runs)} runs in "
        head += f"{len(scale.sessions)} sessions on {session['gpus'][0]}s, torch {session['packages']['torch']}. "
        parts += [
            f"## {scale.name}",
            textwrap.fill(f"{head}Code: {', '.join(commits)}.", 100),
            cells_table(scale, served, training),
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    scales = {name: Scale.read(name) for name in SCALES}
    replace_file(PAGE, page(scales).encode())
    replace_file(ANSWER, with_tables(ANSWER, "evidence", answer_table(scales)).encode())
    replace_file(PICTURE, draw(scales))


if __name__ == "__main__":
    main()
