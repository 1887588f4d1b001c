"""The lengths of documents, as numbers and as a picture: what pack length and which packing suit a corpus?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR, _LINE, _MARK, _INK = "#4c78a8", "#e07b39", "#b23a48", "#333333"


def length_statistics(lengths: np.ndarray) -> dict[str, Any]:
    """Quantiles of `lengths` [documents], and how many documents and tokens have lengths from each power of 2 to the next."""
    quantiles = np.quantile(lengths, (0.1, 0.5, 0.9), method="lower")
    doublings = np.log2(lengths.astype(np.float64)).astype(np.int64)
    documents = np.bincount(doublings)
    tokens = np.bincount(doublings, weights=lengths)
    return {
        "shortest": int(lengths.min()),
        "percentile_10": int(quantiles[0]),
        "median": int(quantiles[1]),
        "mean": float(lengths.mean()),
        "percentile_90": int(quantiles[2]),
        "longest": int(lengths.max()),
        "histogram": [
            {"from": 2**i, "below": 2 ** (i + 1), "documents": int(documents[i]), "tokens": int(tokens[i])}
            for i in range(len(documents))
        ],
    }


def draw_lengths(lengths: np.ndarray, pack_length: int, path: Path) -> None:
    """Write a PNG: how many documents have which length (bars), and which share of all tokens lies in shorter ones (line)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    low, high = min(int(lengths.min()), pack_length) * 0.8, max(int(lengths.max()), pack_length) * 1.25
    edges = np.geomspace(low, high, 61)
    counts, _ = np.histogram(lengths, edges)
    tokens, _ = np.histogram(lengths, edges, weights=lengths)

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and leaves the caller's pyplot alone
    axes = figure.add_subplot()
    axes.stairs(counts, edges, fill=True, color=_BAR, alpha=0.85)
    axes.set(xscale="log", xlim=(low, high), xlabel="tokens in a document (logarithmic)")
    axes.set_ylim(0, 1.18 * counts.max())  # room for the note on the pack length
    axes.set_ylabel("documents", color=_BAR)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))

    share = axes.twinx()
    share.plot(edges, np.concatenate([[0], np.cumsum(tokens)]) / tokens.sum(), color=_LINE, linewidth=2)
    share.set_ylim(0, 1.18)
    share.set_yticks(np.linspace(0, 1, 6))
    share.set_ylabel("tokens in documents up to this length", color=_LINE)
    share.yaxis.set_major_formatter(PercentFormatter(1.0))

    _mark_pack_length(axes, lengths, pack_length, left=pack_length > np.sqrt(low * high))
    median = np.quantile(lengths, 0.5, method="lower")
    title = f"{len(lengths):,} documents, {int(lengths.sum()):,} tokens; median {median:,.0f}, mean {lengths.mean():,.0f}"
    axes.set_title(title, color=_INK, fontsize=11)
    for each in (axes, share):
        each.spines["top"].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Software": None})  # the library's version would make equal packs unequal


def _mark_pack_length(axes: Axes, lengths: np.ndarray, pack_length: int, *, left: bool) -> None:
    """A line at the pack's length, and to its `left` or right how many documents are longer."""
    axes.axvline(pack_length, color=_MARK, linestyle="--", linewidth=1.2)
    axes.annotate(
        f"one pack: {pack_length:,}\n{np.mean(lengths > pack_length):.1%} of documents are longer",
        (pack_length, axes.get_ylim()[1]),
        xytext=(-6 if left else 6, -6),
        textcoords="offset points",
        ha="right" if left else "left",
        va="top",
        color=_MARK,
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
    )
