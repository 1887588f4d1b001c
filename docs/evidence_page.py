"""Compute the table of docs/evidence.md from the files in benchmarks/results/loss/.

To add a study, add its file to STUDIES. `docs.charts.evidence` draws the same rows.

A loss has two intervals over seeds, as in `which`. The wider one decides whether a difference is
shown, and the narrower one whether the loss is equivalent
(`lab.compare.differences.verdict_from`). All wider intervals of a study together have a
confidence of 95 %. They are those of `which` if the study could end after any seed, and intervals
of Student's t if the number of seeds was fixed before.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from foundation.units import markdown
from lab.compare.differences import (
    CONFIDENCE,
    MARGIN,
    LossDifference,
    error_of,
    verdict_from,
)
from lab.experiments.protocol import Protocol
from pretrain.metrics.flops import ModelFlops
from pretrain.model.configuration import load_config
from pretrain.model.huggingface import build_on_meta
from pretrain.settings import commands
from pretrain.settings.config import load_recipe

DOCS = Path(__file__).parent
LOSSES = DOCS.parent / "benchmarks/results/loss"
# Verdict of a comparison that the design did not test.
ESTIMATE = "estimate"
# Names of the precisions in the table and in the picture.
LABELS = {
    "delayed": "FP8 delayed scaling",
    "delayed+head": "FP8 delayed, head too",
    "current": "FP8 current scaling",
    "block": "FP8 blocks",
    "mxfp8": "MXFP8, emulated",
    "nvfp4": "NVFP4, emulated",
    "mxfp4": "MXFP4, emulated",
    "nvfp4 in every layer": "NVFP4 in every layer",
    "nvfp4 until the decay": "NVFP4, then BF16",
    "plain BF16 weights": "plain BF16 weights",
}
# Cells of the evidence's files.
CELLS = {
    "delayed": "delayed_branch",
    "delayed+head": "delayed_head_branch",
    "current": "current_branch",
    "block": "block_branch",
    "mxfp8": "mxfp8_branch",
    "nvfp4": "nvfp4_kept_branch",
    "mxfp4": "mxfp4_branch",
    "nvfp4 in every layer": "nvfp4_branch",
    "nvfp4 until the decay": "nvfp4_then_bf16_branch",
    "plain BF16 weights": "bf16_weights_branch",
}
# The precisions whose means over comparisons of long trainings are in the table.
MEANS = ("delayed", "delayed+head")
# Fewest tokens per parameter of a long training, rounded.
LONG = 5
# Number of precisions that the design tests for each model whose length varies. Some of them may
# not have been trained.
LENGTH_TESTS = 3
# The precisions that the design of the evidence tests. Other cells are estimates.
TESTED = ("delayed", "delayed+head", "current", "block", "mxfp8")


@dataclass(frozen=True)
class Study:
    """A comparison of precisions for one model on one dataset.

    `file` is the name of the result file. A file of `which` may have several answers, of which one
    is named after "#". `more_seeds` is a file with more rounds of the same comparison.
    """

    model: str
    data: str
    file: str
    precisions: tuple[str, ...]
    recipe: str = ""
    more_seeds: str = ""

    @property
    def varies_length(self) -> bool:
        """Return whether the study trains each precision with several tokens per parameter."""
        return "_length_" in self.file


STUDIES = (
    Study("Qwen3 14M", "code and prose", "h200_evidence_14m.jsonl", tuple(CELLS)),
    Study("Qwen3 35M", "code and prose", "h200_evidence_35m.jsonl", ("delayed", "delayed+head")),
    Study("Qwen3 35M", "more code and prose", "h200_evidence_35m_once.jsonl", ("delayed",)),
    Study("Qwen3 112M", "more code and prose", "h200_evidence_111m.jsonl", ("delayed",)),
    Study(
        "Qwen3 14M",
        "Debian's sources",
        "h200_length_14m.jsonl",
        ("delayed", "delayed+head", "block"),
    ),
    Study("Qwen3 35M", "Debian's sources", "h200_length_35m.jsonl", ("delayed",)),
    Study("Qwen3 14M", "code", "which.json#dense_delayed", ("delayed",)),
    Study("GPT-2 124M", "Python", "h100_which_gpt2.json", ("delayed", "delayed+head", "block")),
    Study(
        "Qwen3-0.6B",
        "Python",
        "h200_which_qwen3_0_6b.json",
        ("delayed", "delayed+head"),
        recipe="benchmarks/evidence/which_qwen3_0_6b.yaml",
        more_seeds="h100_which_qwen3_0_6b.json",
    ),
    Study("OLMoE 63M", "code", "which.json#mixture", ("delayed", "current", "block")),
)


@dataclass(frozen=True)
class Cost:
    """Mean over seeds of a loss above BF16's, in percent of BF16's loss.

    `half_width` is that of the wider interval, and `narrow` that of the narrower one.
    """

    mean: float
    half_width: float
    narrow: float
    verdict: str

    def __str__(self) -> str:
        """Return the mean and its wider interval: "+0.07 ± 0.25"."""
        return f"{self.mean:+.2f} ± {self.half_width:.2f}".replace("-", "−")


@dataclass(frozen=True)
class Row:
    """A precision that was compared with BF16."""

    study: Study
    precision: str
    tokens_per_parameter: float
    seeds: int
    served: Cost
    training: Cost

    @property
    def heading(self) -> str:
        """Return the model, the dataset and the tokens per parameter."""
        tokens = f"{self.tokens_per_parameter:.2g} tokens/parameter"
        return f"{self.study.model}, {self.study.data}, {tokens}"


@cache
def measured_rows() -> tuple[Row, ...]:
    """Return the rows of all studies, computed from their result files."""
    return tuple(row for study in STUDIES for row in rows_of(study))


def rows_of(study: Study) -> Iterator[Row]:
    """Return the rows of a study, by the kind of its file."""
    if study.varies_length:
        return rows_of_lengths(study)
    if study.file.endswith(".jsonl"):
        return rows_of_cells(study)
    return rows_of_which(study)


def rows_of_cells(study: Study) -> Iterator[Row]:
    """Yield the rows of a study whose number of seeds was fixed before.

    A run is compared with the BF16 run of the same seed in the same session, from whose checkpoint
    it branches. If a seed was trained in several sessions, the mean of its differences counts.
    """
    lines = [json.loads(line) for line in (LOSSES / study.file).read_text("utf-8").splitlines()]
    header, runs = lines[0], [line for line in lines if "run" in line]
    base = {(run["session"], run["seed"]): run for run in runs if run["cell"] == "bf16"}
    tests = sum(precision in TESTED for precision in study.precisions)
    for precision in study.precisions:
        branches = [run for run in runs if run["cell"] == CELLS[precision]]
        pairs = [(run, base[run["session"], run["seed"]]) for run in branches]
        error = error_of(tests) if precision in TESTED else 1 - CONFIDENCE
        costs = []
        for loss in (held_out_loss, training_loss):
            by_seed = defaultdict(list)
            for run, baseline in pairs:
                by_seed[run["seed"]].append(loss(run) - loss(baseline))
            means = {seed: statistics.fmean(values) for seed, values in by_seed.items()}
            level = statistics.fmean(loss(baseline) for _, baseline in pairs)
            difference = LossDifference(means, level)
            costs.append(fixed_cost(difference, error, is_tested=precision in TESTED))
        yield Row(
            study,
            precision,
            header["tokens"] / header["parameters"],
            len(means),
            *costs,
        )


def held_out_loss(run: Mapping[str, Any]) -> float:
    """Return the held-out loss of the final weights, evaluated in BF16."""
    return float(run["final"]["held_out_loss"])


def training_loss(run: Mapping[str, Any]) -> float:
    """Return the mean training loss of the last 100 steps."""
    return statistics.fmean(run["last_losses"])


def rows_of_lengths(study: Study) -> Iterator[Row]:
    """Yield the rows of the longest trainings of a study that varies the length.

    The number of seeds was fixed before.
    """
    error = error_of(LENGTH_TESTS)
    for precision in study.precisions:
        costs = []
        for key in ("held_out_loss", "training_loss"):
            differences = differences_by_length(study.file, precision, key)
            longest = max(differences)
            difference = differences[longest]
            costs.append(fixed_cost(difference, error, is_tested=True))
        yield Row(study, precision, longest, len(difference.by_seed), *costs)


def differences_by_length(file: str, precision: str, key: str) -> dict[int, LossDifference]:
    """Map tokens per parameter to the loss of `precision` minus that of BF16.

    Args:
        file: Name of the result file.
        precision: Precision in the file.
        key: "held_out_loss" or "training_loss".
    """
    lines = [json.loads(line) for line in (LOSSES / file).read_text("utf-8").splitlines()]
    losses: dict[str, dict[int, dict[int, float]]] = {"bf16": {}, precision: {}}
    for line in lines:
        if line.get("precision") in losses:
            by_length = losses[line["precision"]].setdefault(line["tokens_per_parameter"], {})
            by_length[line["seed"]] = line[key]
    differences = {}
    for length, by_seed in losses[precision].items():
        base = losses["bf16"][length]
        above_base = {seed: loss - base[seed] for seed, loss in by_seed.items()}
        level = statistics.fmean(base[seed] for seed in by_seed)
        differences[length] = LossDifference(above_base, level)
    return differences


def rows_of_which(study: Study) -> Iterator[Row]:
    """Yield the rows of a study by `which`, which could end after any seed."""
    name, _, part = study.file.partition("#")
    content = json.loads((LOSSES / name).read_text("utf-8"))
    content = content[part] if part else content
    answered = content.get("verdict", content)
    error = Protocol(**answered["protocol"]).error
    # The command begins with `python -m pretrain which`. A remark in parentheses may follow it.
    command = shlex.split(content["command"].partition(" (")[0])
    options = commands.read("which", command[4:])
    recipe = load_recipe(DOCS.parent / (study.recipe or options.recipe), options.overrides)
    parameters = ModelFlops.of(build_on_meta(load_config(recipe.model))).parameters
    differences = pooled_differences(study) if study.more_seeds else {}
    for precision in study.precisions:
        candidate = answered["candidates"][precision]
        served, training = differences.get(precision) or [
            LossDifference(
                {int(seed): value for seed, value in candidate[key]["by_seed"].items()},
                candidate[key]["baseline"],
            )
            for key in ("served", "trained")
        ]
        yield Row(
            study,
            precision,
            options.steps * recipe.batch.tokens / parameters,
            len(served.by_seed),
            sequential_cost(served, error),
            sequential_cost(training, error),
        )


def pooled_differences(study: Study) -> dict[str, list[LossDifference]]:
    """Map each precision to its differences in held-out and in training loss.

    They have the rounds of `study.file` and of `study.more_seeds`.
    """
    rounds = {}
    for name in (study.more_seeds, study.file):
        content = json.loads((LOSSES / name).read_text("utf-8"))
        for run in content["runs"]:
            if run["part"] == "rounds" and run["seed"] in content["seeds"]:
                rounds[run["precision"], run["seed"]] = run
    differences = {}
    for precision in study.precisions:
        seeds = [seed for name, seed in rounds if name == precision]
        differences[precision] = [
            LossDifference(
                {seed: rounds[precision, seed][key] - rounds["bf16", seed][key] for seed in seeds},
                statistics.fmean(rounds["bf16", seed][key] for seed in seeds),
            )
            for key in ("held_out_loss", "loss_at_end")
        ]
    return differences


def fixed_cost(difference: LossDifference, error: float, *, is_tested: bool) -> Cost:
    """Return the cost with Student's t intervals, for a number of seeds that was fixed before."""
    halves = [t_half_width(difference, part) for part in (error, 2 * error)]
    return cost_of(difference, *halves, is_tested=is_tested)


def sequential_cost(difference: LossDifference, error: float) -> Cost:
    """Return the cost with the intervals of `which`."""
    halves = [difference.half_width(part) or math.inf for part in (error, 2 * error)]
    return cost_of(difference, *halves, is_tested=True)


def cost_of(difference: LossDifference, half: float, narrow: float, *, is_tested: bool) -> Cost:
    """Return a difference in percent of BF16's loss, with its verdict.

    `half` and `narrow` are the half-widths of the wider and the narrower interval, in nats.
    """
    percent = 100 / difference.baseline
    tolerance = MARGIN * difference.baseline
    verdict = verdict_from(difference.mean, half, narrow, tolerance) if is_tested else ESTIMATE
    return Cost(percent * difference.mean, percent * half, percent * narrow, verdict)


def t_half_width(difference: LossDifference, error: float) -> float:
    """Return the half-width of Student's t interval, whose error probability is `error`."""
    seeds = len(difference.by_seed)
    return t_quantile(seeds - 1, error) * math.sqrt(difference.variance / seeds)


@cache
def t_quantile(freedom: int, error: float) -> float:
    """Return the value that |t| exceeds with probability `error`.

    t has Student's distribution with `freedom` degrees of freedom, which is integrated numerically.
    """
    values = np.linspace(0, 1000, 2_000_001)
    density = (1 + values**2 / freedom) ** (-(freedom + 1) / 2)
    areas = np.cumsum(density)
    return float(np.interp((1 - error) * areas[-1], areas, values))


def mean_cost(costs: Sequence[Cost]) -> Cost:
    """Return the mean of the costs in several comparisons, with an interval over them."""
    # The costs are in percent of BF16's loss, so that loss is 100.
    percent = {index: cost.mean for index, cost in enumerate(costs)}
    return fixed_cost(LossDifference(percent, baseline=100.0), 1 - CONFIDENCE, is_tested=False)


def table() -> str:
    """Return the table of docs/evidence.md."""
    header = ["", "seeds", "held-out loss", "verdict", "training loss"]
    rows = measured_rows()
    cells = []
    for heading in dict.fromkeys(row.heading for row in rows):
        cells.append([f"**{heading}**", "", "", "", ""])
        cells += [
            cells_of(row.precision, row.seeds, row.served, row.training)
            for row in rows
            if row.heading == heading
        ]
    cells.append([f"**Mean of the comparisons from {LONG} tokens/parameter on**", "", "", "", ""])
    for precision in MEANS:
        long = [
            row
            for row in rows
            if row.precision == precision and round(row.tokens_per_parameter) >= LONG
        ]
        served = mean_cost([row.served for row in long])
        training = mean_cost([row.training for row in long])
        cells.append(cells_of(precision, sum(row.seeds for row in long), served, training))
    return markdown(header, cells)


def cells_of(precision: str, seeds: int, served: Cost, training: Cost) -> list[str]:
    """Return the cells of a row of the table."""
    return [LABELS[precision], str(seeds), str(served), served.verdict, str(training)]
