"""Draw docs/evidence.png: `python -m docs.evidence_picture`.

The figures are those of the table in docs/evidence.md, and of the answers of `which` for the two
largest models in pretrain/run/answers.csv. Tests compare both with the result files.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from pretrain.compare.differences import MARGIN
from pretrain.run.which_on import ANSWERS

DOCS = Path(__file__).parent
# Models and cards of the answers that are drawn, and the heading of each model.
LARGER = {
    ("GPT-2 124M", "H100"): "GPT-2 with 124 million parameters",
    ("Qwen3-0.6B", "H200"): "Qwen3-0.6B",
}
LABELS = {
    "delayed": "FP8, delayed scaling",
    "delayed+head": "FP8, delayed scaling, the head in FP8 too",
    "block": "FP8, blocks",
}
# The color of each verdict, the color of its marker, and its explanation.
STYLES = {
    "equivalent": ("#0072B2", "#0072B2", "within the margin, shown by a test"),
    "cannot tell": ("#D55E00", "#D55E00", "neither equivalence nor a difference is shown"),
    "estimate": ("#555555", "white", "no test was planned"),
}


class Row(NamedTuple):
    """A row of the picture. The loss and its half-width are in percent of BF16's loss."""

    heading: str
    label: str
    loss: float
    half_width: float
    seeds: str
    verdict: str


def rows_of_the_page() -> list[Row]:
    """Return the rows of the table in docs/evidence.md."""
    text = (DOCS / "evidence.md").read_text(encoding="utf-8")
    cells = r"\| (.+?) \| (.+?) \| [\d.]+ \| (\d+) \| ([+−][\d.]+) ± ([\d.]+) % \| (.+?) \|"
    return [
        Row(heading_of(size), label, number(loss), float(half_width), seeds, verdict)
        for label, size, seeds, loss, half_width, verdict in re.findall(f"(?m)^{cells}", text)
    ]


def heading_of(size: str) -> str:
    """Return a size such as "35 million, new data" with the word "parameters"."""
    million, _, data = size.partition(",")
    return f"{million} parameters" + (f",{data}" if data else "")


def rows_of_answers() -> list[Row]:
    """Return the rows of the larger models, which `which` compared."""
    with ANSWERS.open(encoding="utf-8", newline="") as file:
        answers = list(csv.DictReader(file))
    rows = []
    for answer in answers:
        heading = LARGER.get((answer["model"], answer["card"]))
        if heading:
            loss, half_width = answer["loss_in_percent"].split(" ± ")
            label = LABELS[answer["precision"]]
            rows.append(
                Row(
                    heading,
                    label,
                    number(loss),
                    float(half_width),
                    answer["seeds"],
                    answer["verdict"],
                )
            )
    return rows


def number(text: str) -> float:
    """Return the number in a text with a sign, which may be a typographic minus."""
    return float(text.replace("−", "-"))


def draw(rows: list[Row]) -> Figure:
    """Return a picture with the differences in BF16 evaluation, their intervals, and the margin."""
    figure = Figure(figsize=(10, 8.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    margin = axes.axvspan(-100 * MARGIN, 100 * MARGIN, color="#E8EEF2")
    axes.axvline(0, color="#888888", linewidth=0.8)
    # Rows of the same size are next to each other, below a heading.
    places: dict[float, str] = {}
    for row in rows:
        if row.heading not in places.values():
            places[len(places) + 0.25] = row.heading
        place = len(places)
        places[place] = row.label
        line, marker, _ = STYLES[row.verdict]
        axes.errorbar(
            row.loss,
            place,
            xerr=row.half_width,
            fmt="o",
            color=line,
            markerfacecolor=marker,
            capsize=3,
        )
        sign = "−" if row.loss < 0 else "+"
        axes.annotate(
            f"{sign}{abs(row.loss):.2f} ± {row.half_width:.2f} %, {row.seeds} seeds: {row.verdict}",
            (1, place),
            (6, 0),
            ("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=line,
        )
    axes.set_yticks(list(places), list(places.values()))
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
    return figure


if __name__ == "__main__":
    draw([*rows_of_the_page(), *rows_of_answers()]).savefig(DOCS / "evidence.png")
