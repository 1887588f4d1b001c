"""Style of the pictures in docs/pictures/.

The pictures are SVG files that are the same in every run: they have no date, no random names, and
text instead of outlines of letters. Their text is readable at the width of a phone, 380 pixels.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent / "pictures"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "docs",
    "font.family": "sans-serif",
    # The layout is computed for DejaVu Sans. The other fonts are narrower.
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
}
# Width of every picture in inches. At 72 points per inch, a phone shows the text 1 % smaller.
WIDTH = 5.3
INK, FAINT = "#222222", "#777777"


def canvas(height: float) -> tuple[Figure, Axes]:
    """Return a figure and axes without ticks that cover it. One unit is a point, from below."""
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, WIDTH * 72)
    axes.set_ylim(0, height * 72)
    return figure, axes


def svg(draw: Callable[[], Figure]) -> str:
    """Return the text of the SVG file of a picture."""
    content = io.StringIO()
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        draw().savefig(content, format="svg", metadata=metadata)
    # Editors and git warn about spaces at the end of a line.
    return "".join(f"{line.rstrip()}\n" for line in content.getvalue().splitlines())
