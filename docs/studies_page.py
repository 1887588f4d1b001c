"""Compute the tables of the pages in docs/studies/ from their result files.

Means are over seeds, with Student's t intervals of 95 %.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from docs.evidence_page import LOSSES, t_quantile
from foundation.units import markdown

SIZES = {"14m": "14 M", "35m": "35 M"}
MUON_PRECISIONS = {
    "delayed": "FP8, delayed scaling",
    "block": "FP8, blocks",
    "nvfp4": "NVFP4 in every linear",
}
MUON_LOSSES = {
    "held_out_loss": "**held-out loss above BF16, in %**",
    "training_loss": "**training loss of the last 100 steps above BF16, in %**",
}
TRAINED_IN = {
    "bf16": "BF16",
    "delayed": "FP8, delayed scaling",
    "block": "FP8, blocks",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
}
SERVED_IN = {**TRAINED_IN, "nvfp4_1d": "NVFP4 1-D"}
# Rows of the table of the last part of the training: a label, and the name of the runs.
LAST_PARTS = {
    "decay over 5 %": "decay-0.05",
    "decay over 50 %": "decay-0.5",
    "decay as 1-sqrt": "decay-0.2-sqrt",
    "decay to a tenth of the rate": "decay-0.2-to-tenth",
    "mean of the last 4 checkpoints": "decay-0.2-mean-4",
    "constant rate, mean of the last 8": "constant-mean-8",
    "last 1 % in the served precision": "tail-0.01",
    "last 2 %": "tail-0.02",
    "last 5 %": "tail-0.05",
    "last 5 %, decay to a tenth of the rate": "tail-0.05-to-tenth",
    "all after the first fifth": "block",
}

Lines = list[dict[str, Any]]


def read_lines(name: str) -> Lines:
    """Return the objects of a result file with one object per line."""
    text = (LOSSES / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def with_interval(values: Sequence[float]) -> str:
    """Return the mean over seeds with its interval."""
    seeds = len(values)
    half = t_quantile(seeds - 1, 0.05) * statistics.stdev(values) / seeds**0.5
    return f"{statistics.mean(values):+.2f} ± {half:.2f}".replace("-", "−")


def muon() -> str:
    """Return the table of losses under Muon and under AdamW."""
    studies = {
        size: [line for line in read_lines(f"h200_muon_{size}") if "run" in line] for size in SIZES
    }
    columns = [
        f"{name}, {size}" if name else "Muon − AdamW"
        for size in SIZES.values()
        for name in ("AdamW", "Muon", "")
    ]
    levels = []
    for size, lines in studies.items():
        for optimizer in ("adamw", "muon"):
            runs = runs_of(lines, size, optimizer, "bf16")
            # The BF16 runs of two seeds were trained twice. The first ones count here.
            first = {run["seed"]: run["held_out_loss"] for run in reversed(runs)}
            levels.append(f"{statistics.mean(first.values()):.4f}")
        levels.append("")
    rows = [["BF16: held-out loss in nats", *levels]]
    for key, heading in MUON_LOSSES.items():
        rows.append([heading, *[""] * 6])
        for precision, label in MUON_PRECISIONS.items():
            cells = []
            for size, lines in studies.items():
                adamw, muon = (
                    costs_in_percent(lines, size, optimizer, precision, key)
                    for optimizer in ("adamw", "muon")
                )
                difference = [more - less for less, more in zip(adamw, muon, strict=True)]
                cells += map(with_interval, (adamw, muon, difference))
            rows.append([label, *cells])
    return markdown(["", *columns], rows)


def runs_of(lines: Lines, size: str, optimizer: str, precision: str) -> Lines:
    """Return the runs of the study of Muon, without those of its search of learning rates."""
    return [
        line
        for line in lines
        if (line["matrix"], line["optimizer"], line["precision"])
        == (f"muon_{size}", optimizer, precision)
    ]


def costs_in_percent(
    lines: Lines, size: str, optimizer: str, precision: str, key: str
) -> list[float]:
    """Return the loss of each seed above that of the BF16 run of its session, in percent.

    `key` is the key of the loss, one of MUON_LOSSES.
    """
    base = {
        (run["session"], run["seed"]): run[key] for run in runs_of(lines, size, optimizer, "bf16")
    }
    by_seed = {
        run["seed"]: 100 * (run[key] / base[run["session"], run["seed"]] - 1)
        for run in runs_of(lines, size, optimizer, precision)
    }
    return [by_seed[seed] for seed in sorted(by_seed)]


def served_in() -> str:
    """Return the table of losses by the precision of the training and that of serving, in %."""
    losses = {
        (line["trained"], line["seed"], line["served"]): line["loss"]
        for line in read_lines("h100_served_14m")[1:]
        # The weights of the last step. Other lines have means of several checkpoints.
        if line["merged"] == [line["steps"]]
    }
    rows = []
    for trained, label in TRAINED_IN.items():
        seeds = [seed for name, seed, served in losses if (name, served) == (trained, "bf16")]
        cells = [label, str(len(seeds))]
        for served in SERVED_IN:
            percent = [
                100 * (losses[trained, seed, served] / losses["bf16", seed, "bf16"] - 1)
                for seed in seeds
            ]
            cells.append(with_interval(percent) if any(percent) else "baseline")
        rows.append(cells)
    return markdown(["trained in ↓ served in →", "seeds", *SERVED_IN.values()], rows)


def last_part() -> str:
    """Return the table of served losses by the last part of the training, in %."""
    studies = {size: read_lines(f"h200_served_decay_{size}") for size in SIZES}
    small, large = studies["14m"], studies["35m"]
    rows = [["BF16", "baseline", "", "baseline", "baseline", ""]]
    for label, cell in LAST_PARTS.items():
        rows.append(
            [
                label,
                cost_of_served(small, "nvfp4", cell),
                prediction(small, cell),
                cost_of_served(small, "block", cell),
                cost_of_served(large, "nvfp4", cell),
                prediction(large, cell),
            ]
        )
    header = ["last part", "NVFP4, 14 M", "predicted", "FP8, 14 M", "NVFP4, 35 M", "predicted"]
    return markdown(header, rows)


def prediction(lines: Lines, cell: str) -> str:
    """Return the loss in percent that was predicted before the runs, or ""."""
    predicted = lines[0]["predictions"]["nvfp4"].get(cell, "")
    return f"{predicted:+}".replace("-", "−") if predicted else str(predicted)


def cost_of_served(lines: Lines, served: str, cell: str) -> str:
    """Return the served loss of a cell above that of the baseline in percent.

    Return "" for a cell that was not trained for this served precision.
    """
    losses, baseline = (
        [
            line["served_loss"]
            for line in lines[1:]
            if line["run"].rpartition("-seed=")[0] == f"{served}-{name}"
        ]
        for name in (cell, "baseline")
    )
    if not losses:
        return ""
    return with_interval([100 * (a / b - 1) for a, b in zip(losses, baseline, strict=True)])


def misses() -> str:
    """Return the table of the share of simulated series of seeds that miss the mean.

    A series has an interval after each seed. It misses if one of its intervals misses.
    """
    content = json.loads((LOSSES / "which_miss_rates.json").read_text(encoding="utf-8"))
    rates = content["intervals"]["the product's"]["error 0.05"]["misses"]
    rows = [[name, f"{share:.0%}".replace("%", " %")] for name, share in rates.items()]
    return markdown(["distribution of the differences", "intervals that miss"], rows)


def extra_tokens() -> str:
    """Return the table of estimated extra tokens, divided by the true number.

    Extra tokens are those by which a candidate of `which` reaches the baseline's loss.
    """
    tokens = json.loads((LOSSES / "which_estimates.json").read_text(encoding="utf-8"))["tokens"]
    rows = [
        [f"`wsd`, decay of 20 %, {steps} steps", span(tokens["by_steps"][steps].values())]
        for steps in ("2000", "400", "150")
    ]
    for floor in ("0", "0.1", "0.3"):
        shares = [
            share
            for schedule in ("wsd, decay 0.8", "cosine", "linear")
            for share in tokens["by_floor"][schedule][floor].values()
        ]
        removed = f"{floor} nats by the decay"
        rows.append([f"`cosine`, `linear` or a long decay, {removed}", span(shares)])
    return markdown(["schedule", "estimate / truth"], rows)


def span(values: Iterable[float]) -> str:
    """Return the smallest and the largest value: "0.97 to 1.04"."""
    listed = list(values)
    return f"{min(listed):.2f} to {max(listed):.2f}"
