"""Differences over seeds as a picture: a row a group, its single seeds, their mean with its interval, and the margin."""

from __future__ import annotations

from pathlib import Path

from pretrain.compare.appearance import colour_of
from pretrain.compare.fairness import CONFIDENCE
from pretrain.compare.figures import GREY, new_figure, save, style_panel, title
from pretrain.compare.seed_groups import SeedComparison, whole_percent

ROW_INCHES = 0.36
MARGIN_COLOUR = "#EEEEEE"


def plot_seeds(seeds: SeedComparison, path: Path) -> None:
    """Draw the groups, per cent of the baseline's loss, into a PNG at `path`; InputError as `save`."""
    results = [each for each in seeds.results if each.difference]
    figure = new_figure(9, 1.6 + ROW_INCHES * max(len(results), 2))
    panel = figure.subplots()
    style_panel(panel)
    panel.grid(visible=False, axis="y")
    panel.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    margin = 100 * seeds.margin
    panel.axvspan(-margin, margin, color=MARGIN_COLOUR, zorder=0)
    panel.axvline(0, color=GREY, linewidth=0.8)
    for place, each in enumerate(results):
        difference, run = each.difference, next(iter(each.group.runs.values()))
        per_cent, colour = 100 / difference.baseline, colour_of(run.precision)
        values = [value * per_cent for value in difference.by_seed.values()]
        panel.plot(values, [place] * len(values), "|", color=colour, markersize=9, alpha=0.6)
        half = difference.half_width()
        fill = "white" if run.emulated else colour
        panel.errorbar(
            difference.mean * per_cent,
            place,
            xerr=None if half is None else half * per_cent,
            fmt="o",
            color=colour,
            markerfacecolor=fill,
            capsize=3,
        )
    panel.set_yticks(range(len(results)), [each.group.name for each in results])
    panel.set_ylim(max(len(results), 2) - 0.5, -0.5)
    panel.margins(x=0.08)
    panel.set_xlabel(f"loss minus that of {seeds.baseline.group.name}, % of it")
    subtitle = f"ticks: single seeds; bars: {whole_percent(CONFIDENCE)} interval over seeds; grey: ± {margin:g} %"
    hollow = any(run.emulated for each in results for run in each.group.runs.values())
    title(panel, f"{len(seeds.baseline.losses)} seeds", subtitle + ("; hollow: emulated" if hollow else ""))
    save(figure, path)
