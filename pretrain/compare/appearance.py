"""How a run looks in every picture: its colour says its precision, its line and marker what else it differs in."""

from __future__ import annotations

import colorsys
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.compare.fairness import keys_told_apart_by, option
from pretrain.metrics.run_record import RunRecord
from pretrain.precision.formats.definition import Precision
from pretrain.precision.settings import PRECISIONS, WEIGHT_DTYPES

# A line's dash in plotly and in matplotlib, and a marker's shape in both: the n-th kind of run within a precision has the n-th.
DASHES = (("solid", "-"), ("dash", "--"), ("dot", ":"), ("dashdot", "-."))
MARKERS = (("circle", "o"), ("square", "s"), ("diamond", "D"), ("triangle-up", "^"), ("cross", "P"), ("star", "*"))
SHADES = 0.16  # how far the lightest and the darkest of one precision lie from its colour


@dataclass(frozen=True)
class Look:
    label: str  # no two runs of a comparison share one
    colour: str
    place: int  # of its kind among the comparison's: of its weights, options and varied settings

    @property
    def dash(self) -> str:
        return DASHES[self.place % len(DASHES)][0]

    @property
    def line(self) -> str:
        return DASHES[self.place % len(DASHES)][1]

    @property
    def symbol(self) -> str:
        return MARKERS[self.place % len(MARKERS)][0]


def colour_of(precision: str | None) -> str:
    """The colour of a precision by its name, of "nvfp4 (ran bf16)" too: what was asked for. Another for what is not known."""
    return PRECISIONS.get((precision or "").split(" ")[0], Precision).colour


def looks_of(runs: Sequence[RunRecord]) -> list[Look]:
    """A look for each run. Runs of one precision and one kind, which differ in names alone, are shades of its colour."""
    keys = [key for key in keys_told_apart_by(runs) if not key.startswith("data.")]
    kinds = [(run.config.get("weights"), *(str(option(run, key)) for key in keys)) for run in runs]
    weights = [*WEIGHT_DTYPES, None]
    places = {kind: place for place, kind in enumerate(sorted(dict.fromkeys(kinds), key=lambda kind: weights.index(kind[0])))}
    one_precision, alike = len({run.precision for run in runs}) == 1, {}
    for index, (run, kind) in enumerate(zip(runs, kinds, strict=True)):
        alike.setdefault((colour_of(run.precision), None if one_precision else kind), []).append(index)
    shades = {index: shade(colour, nth, len(same)) for (colour, _), same in alike.items() for nth, index in enumerate(same)}
    return [Look(label, shades[i], places[kinds[i]]) for i, label in enumerate(unique_names(runs))]


def unique_names(runs: Sequence[RunRecord]) -> list[str]:
    """Each run's folder, or its whole path where two folders are called the same."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.path) for name, run in zip(names, runs, strict=True)]


def shade(colour: str, nth: int, of: int) -> str:
    """The n-th of several shades from dark to light around `colour` ("#RRGGBB"); the colour itself where there is one."""
    if of == 1:
        return colour
    hue, lightness, saturation = colorsys.rgb_to_hls(*(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)))
    lightness += SHADES * (2 * nth / (of - 1) - 1) * (1 - abs(2 * lightness - 1))
    return "#" + "".join(f"{round(255 * part):02X}" for part in colorsys.hls_to_rgb(hue, lightness, saturation))


def as_text(value: Any) -> str:
    """A setting as a reader writes it: the beginning of a fingerprint or a commit, a float without its noise."""
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", value):
        return value[:10]
    return f"{value:g}" if isinstance(value, float) else str(value)
