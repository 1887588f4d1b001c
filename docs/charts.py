"""Draw the pictures of measured speeds and losses: speed, loss, length and evidence.svg."""

from __future__ import annotations

import json
import statistics
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from docs.drawing import FAINT, INK, WIDTH
from docs.evidence_page import (
    ESTIMATE,
    LABELS,
    LOSSES,
    STUDIES,
    Cost,
    Row,
    differences_by_length,
    fixed_cost,
    measured_rows,
)
from lab.compare.differences import (
    BEYOND_MARGIN,
    CANNOT_TELL,
    CONFIDENCE,
    EQUIVALENT,
    MARGIN,
    WITHIN_MARGIN,
    WORSE,
)

SPEEDS = LOSSES.parent / "speed"
PERCENT = 100 * MARGIN
# File of most measurements. The other GPUs of the host were idle.
IDLE = "h200_peers_30_november"
# Trainers of the picture of speeds: a label, the name in the files, and the file of each precision.
TRAINERS = (
    ("this launcher,\nFlashAttention-4", "ours", ("h200_peers_fa4",) * 3),
    ("this launcher,\ncuDNN attention", "ours", (IDLE,) * 3),
    ("llmq ¹", "llmq", (IDLE, "h200_peers_fp8")),
    ("torchtitan", "torchtitan", (IDLE, IDLE)),
    ("Megatron-Core", "Megatron-Core", ("h200_peers_megatron",) * 2),
    ("Hugging Face,\ncompiled", "Hugging Face", (IDLE, IDLE)),
)
PRECISIONS = {"BF16": "#9AA5B1", "FP8": "#0072B2", "FP8 with the head": "#56B4E9"}
# Files of measurements beside a busy GPU.
BUSY = ("h200_peers_fp8", "h200_peers_megatron")
SPEED_NOTES = (
    "Hatched: another GPU of the host was busy. llmq's calls of cuBLAS 12\n"
    "went through a shim to cuBLAS 13.\n"
    "¹ llmq keeps weights, moments and gradients in BF16, and its model\n"
    "has no norms of queries and keys."
)


def read_speeds(name: str) -> dict[str, Any]:
    """Return the content of a file with speeds."""
    return dict(json.loads((SPEEDS / f"{name}.json").read_text(encoding="utf-8")))


def speed() -> Figure:
    """Return bars with the speed of each trainer and precision on one H200."""
    bars = []
    ticks = {}
    place = 0.0
    for label, name, files in TRAINERS:
        begin = place
        for precision, file in zip(PRECISIONS, files, strict=False):
            value = read_speeds(file)["rows"][f"{name} {precision}"]["tokens_per_second"]
            bars.append((place, value, precision, file in BUSY))
            place += 1
        ticks[(begin + place - 1) / 2] = label
        place += 0.7
    figure = Figure(figsize=(WIDTH, 5.1))
    axes = figure.add_axes((0.27, 0.22, 0.71, 0.69))
    for place, value, precision, is_busy in bars:
        color = PRECISIONS[precision]
        axes.barh(
            place, value, 0.86, color=color, hatch="////" if is_busy else None, edgecolor="white"
        )
        axes.annotate(f"{value:,}", (value, place), (3, 0), textcoords="offset points", va="center")
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 84_000)
    axes.set_xticks([0, 20_000, 40_000, 60_000])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.margins(y=0.02)
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in PRECISIONS.items()],
        loc="lower left",
        bbox_to_anchor=(0, 0.905),
        ncols=3,
        frameon=False,
        handlelength=1,
    )
    figure.text(0.02, 0.97, "Tokens/s of Qwen3-1.7B on one H200", weight="bold", fontsize=10.5)
    figure.text(0.02, 0.02, SPEED_NOTES, fontsize=8.5, color=FAINT, linespacing=1.3)
    return figure


# The study of the picture of loss curves.
CURVES = LOSSES / "h200_evidence_111m.jsonl"


def held_out_curves() -> dict[str, dict[int, dict[int, float]]]:
    """Map "bf16" and "delayed_branch" to the held-out losses of each seed by trained tokens."""
    lines = [json.loads(line) for line in CURVES.read_text(encoding="utf-8").splitlines()]
    curves: dict[str, dict[int, dict[int, float]]] = {"bf16": {}, "delayed_branch": {}}
    for run in lines[1:]:
        curves[run["cell"]][run["seed"]] = dict(run["trained_held_out"])
    return curves


def loss() -> Figure:
    """Return the held-out losses of BF16 and FP8 over tokens, and their difference below."""
    curves = held_out_curves()
    figure = Figure(figsize=(WIDTH, 4.6))
    above = figure.add_axes((0.12, 0.47, 0.85, 0.4))
    below = figure.add_axes((0.12, 0.105, 0.85, 0.25))
    labels = {"bf16": "BF16", "delayed_branch": "FP8 after a fifth"}
    colors = {"bf16": PRECISIONS["BF16"], "delayed_branch": PRECISIONS["FP8"]}
    widths = {"bf16": 5, "delayed_branch": 1.6}
    for cell, by_seed in curves.items():
        tokens = list(by_seed[1])
        means = [statistics.fmean(losses[place] for losses in by_seed.values()) for place in tokens]
        millions = [place / 1e6 for place in tokens]
        above.plot(millions, means, color=colors[cell], linewidth=widths[cell], label=labels[cell])
    above.legend(frameon=False, loc="upper right")
    above.set_title("held-out loss, nats per token", loc="left", fontsize=9.5)
    below.axhspan(-PERCENT, PERCENT, color="#EAF3E3")
    below.axhline(0, color=INK, linewidth=0.8)
    differences = []
    for seed, losses in curves["delayed_branch"].items():
        base = curves["bf16"][seed]
        percent = [100 * (value / base[place] - 1) for place, value in losses.items()]
        differences.append(percent)
        millions = [place / 1e6 for place in losses]
        below.plot(millions, percent, color=PRECISIONS["FP8 with the head"], linewidth=0.9)
    means = [statistics.fmean(column) for column in zip(*differences, strict=True)]
    below.plot(millions, means, "o-", color=PRECISIONS["FP8"], linewidth=2, markersize=4)
    below.set_title("FP8, evaluated in FP8, above BF16 in %", loc="left", fontsize=9.5)
    below.text(8, -0.47, f"thin: each seed, green: ± {PERCENT:g} %", color=FAINT, fontsize=9)
    below.set_ylim(-0.55, 0.7)
    below.set_xlabel("million tokens")
    for axes in (above, below):
        axes.set_xlim(0, 575)
    title = "Qwen3 112M on code and prose, mean of 3 seeds"
    figure.text(0.02, 0.955, title, weight="bold", fontsize=10.5)
    return figure


# Color of each precision and format of each model's lines in the picture of costs over lengths.
LINE_COLORS = {"delayed": PRECISIONS["FP8"], "delayed+head": "#D55E00", "block": "#CC79A7"}
LINE_FORMATS = {"Qwen3 14M": "o-", "Qwen3 35M": "s--"}


def length() -> Figure:
    """Return the costs of FP8 over tokens per parameter, in held-out and training loss."""
    figure = Figure(figsize=(WIDTH, 3.1))
    panels = {"held_out_loss": (0.09, "held-out loss"), "training_loss": (0.58, "training loss")}
    for key, (begin, title) in panels.items():
        panel = figure.add_axes((begin, 0.16, 0.4, 0.6))
        panel.axhspan(-PERCENT, PERCENT, color="#EAF3E3")
        panel.axhline(0, color=INK, linewidth=0.8)
        draw_lengths(panel, key)
        panel.set_ylim(-0.3, 0.62)
        panel.set_title(f"{title}, % above BF16", loc="left", fontsize=9.5)
        panel.set_xlabel("tokens per parameter")
    figure.legend(
        handles=[Patch(color=color, label=LABELS[name]) for name, color in LINE_COLORS.items()],
        loc="upper left",
        bbox_to_anchor=(0, 0.945),
        ncols=3,
        columnspacing=1.2,
        handlelength=1,
        frameon=False,
    )
    title = "Qwen3 14M (solid lines) and 35M (dashed), 95 % intervals"
    figure.text(0.02, 0.945, title, weight="bold", fontsize=10.5)
    return figure


def draw_lengths(panel: Axes, key: str) -> None:
    """Draw a line for each precision of each study that varies the length.

    key: "held_out_loss" or "training_loss".
    """
    lines = [
        (study, precision)
        for study in STUDIES
        if study.varies_length
        for precision in study.precisions
    ]
    lengths: set[int] = set()
    for index, (study, precision) in enumerate(lines):
        differences = differences_by_length(study.file, precision, key)
        costs = [
            fixed_cost(difference, 1 - CONFIDENCE, is_tested=False)
            for difference in differences.values()
        ]
        # Draw lines side by side, so that their intervals do not overlap.
        side = 1 + 0.06 * (index - (len(lines) - 1) / 2)
        panel.errorbar(
            [side * tokens for tokens in differences],
            [cost.mean for cost in costs],
            [cost.half_width for cost in costs],
            fmt=LINE_FORMATS[study.model],
            color=LINE_COLORS[precision],
            markersize=4,
        )
        lengths |= differences.keys()
    panel.set_xscale("log")
    panel.set_xticks(sorted(lengths), map(str, sorted(lengths)))
    panel.minorticks_off()


# Colors of the verdicts in the picture of costs, and whether their markers are filled.
VERDICTS = {
    EQUIVALENT: ("#0072B2", True),
    WORSE + WITHIN_MARGIN: ("#56B4E9", True),
    WORSE: ("#E69F00", True),
    WORSE + BEYOND_MARGIN: ("#D55E00", True),
    CANNOT_TELL: ("#444444", False),
    ESTIMATE: ("#CC79A7", True),
}
# Ends of the axes of the picture, in percent. Larger costs are written as numbers.
LOWEST, HIGHEST = -0.75, 0.95


def evidence() -> Figure:
    """Return the costs of all rows: one panel with held-out losses, one with training losses."""
    rows = measured_rows()
    lines: list[tuple[str, Row | None]] = []
    for heading in dict.fromkeys(row.heading for row in rows):
        lines.append((heading, None))
        lines += [(LABELS[row.precision], row) for row in rows if row.heading == heading]
    height = 0.205 * len(lines) + 1.95
    figure = Figure(figsize=(WIDTH, height))
    bottom, top = 1.55 / height, 1 - 0.3 / height
    left, right = (figure.add_axes((begin, bottom, 0.32, top - bottom)) for begin in (0.335, 0.665))
    for panel, title in ((left, "held-out loss"), (right, "training loss")):
        panel.set_title(title, fontsize=10)
        panel.axvspan(-PERCENT, PERCENT, color="#EAF3E3")
        panel.axvline(0, color=INK, linewidth=0.8)
        panel.set_xlim(LOWEST, HIGHEST)
        panel.set_ylim(len(lines) - 0.4, -0.6)  # the first row is at the top
        panel.set_yticks([])
        panel.set_xticks([-0.5, 0, 0.5])
        panel.spines["left"].set_visible(False)
        panel.set_xlabel("% above BF16")
    for place, (label, row) in enumerate(lines):
        right.annotate(  # on top of the left panel
            label,
            (0.03 if row else 0.01, place),
            xycoords=("figure fraction", "data"),
            va="center",
            fontsize=9,
            weight="normal" if row else "bold",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            annotation_clip=False,
        )
        if row is None:
            continue
        draw_cost(left, place, row.served)
        draw_cost(right, place, row.training)
    handles = [
        Line2D([], [], marker="o", color=color, mfc=color if is_filled else "white", label=verdict)
        for verdict, (color, is_filled) in VERDICTS.items()
    ]
    figure.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, 0),
        ncols=2,
        frameon=False,
        title=(
            f'Green: the margin of ± {PERCENT:g} %. Thin: interval for "worse".\n'
            'Thick: interval for "equivalent" and "within the margin".'
        ),
    )
    return figure


def draw_cost(panel: Axes, place: float, cost: Cost) -> None:
    """Draw the mean and both intervals at the height `place`.

    Write the cost as a text if it leaves the axis.
    """
    color, is_filled = VERDICTS[cost.verdict]
    if cost.mean + cost.half_width > HIGHEST:
        panel.annotate(
            f"{cost} ▸",
            (HIGHEST, place),
            ha="right",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
        return
    for half, width in ((cost.half_width, 1.0), (cost.narrow, 3.0)):
        ends = [cost.mean - half, cost.mean + half]
        panel.plot(ends, [place, place], color=color, linewidth=width, solid_capstyle="butt")
    inside = color if is_filled else "white"
    panel.plot(cost.mean, place, "o", color=color, mfc=inside, markersize=5)
