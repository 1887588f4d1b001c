"""Render the report as one HTML file that needs no network.

`page/page.html` is the template. The file includes plotly's script, which draws the curves. Text
and tables are plain HTML, so they can be read and searched without scripts.

Names of runs and settings come from run folders and may contain special characters of HTML. Jinja
escapes these names in text and tables. In curves, `escape` is called for each name, because
plotly interprets some HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foundation.errors import InputError
from foundation.settings import flatten
from lab.compare.columns import columns_for
from lab.compare.comparison import ComparedRun, machine_of
from lab.compare.curves import model_name, moving_mean, range_after_the_fall, window_of
from lab.compare.fairness import loss_differences
from lab.compare.seed_groups import SeedComparison
from pretrain.metrics.run_record import RunRecord, as_text, observed_layers

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Text that identifies a page of this program. Every page contains it.
WRITTEN_BY = "written by python -m pretrain"
# Folder of the template, the styles and the script.
FOLDER = Path(__file__).with_name("page")
# Maximum number of points in a curve. A screen cannot show more.
MOST_POINTS = 2000
# Title of the panel with the loss difference between a run and the baseline at each step.
AGAINST = "training loss minus the baseline's"
# Map the title of each panel, from top to bottom, to a key in metrics.jsonl. The value of AGAINST
# is None, because that curve is computed from two runs.
PANELS = {
    "training loss": "loss",
    "held-out loss": "held_out_loss",
    AGAINST: None,
    "gradient norm": "gradient_norm",
    "learning rate": "learning_rate",
    "frozen updates": "frozen_updates",
}
# Options of plotly's vertical axes. A learning rate has no unit.
_LOSS_AXIS = {"title": "nats per token"}
AXES = {
    "training loss": _LOSS_AXIS,
    "held-out loss": _LOSS_AXIS,
    AGAINST: _LOSS_AXIS,
    "gradient norm": {"title": "L2 norm, log scale", "type": "log"},
    "frozen updates": {"title": "share of the parameters", "tickformat": ".2~%"},
}
# Panels whose curves are smoothed.
SMOOTHED = ("training loss", AGAINST, "gradient norm", "frozen updates")
# Panels with values at only a few steps. Each value is drawn as a point.
POINTS = ("held-out loss",)
# Keys, and prefixes of keys, that are not listed among the differences, because no two runs have
# the same value.
NAMES = ("settings.name", "settings.run_dir", "settings.log.")

# Step numbers (int64) and values (float64) of a curve.
Curve = tuple[np.ndarray, np.ndarray]


def check_replaceable(path: Path, named: str = "--out") -> None:
    """Raise InputError unless `path` may be overwritten by a page.

    A path may be overwritten if it does not exist, if it is an empty file, or if it is a file that
    contains WRITTEN_BY. The message begins with `named`, the option that sets `path`.
    """
    if not path.exists():
        return
    is_replaceable = False
    if path.is_file():
        content = path.read_bytes()
        is_replaceable = not content or WRITTEN_BY.encode() in content
    if not is_replaceable:
        raise InputError(
            f"{named} {path}: this path exists and was not written by this program; either move it "
            "away, or choose another path"
        )


def render(
    compared_runs: Sequence[ComparedRun],
    seeds: SeedComparison,
    notes: Sequence[str],
) -> bytes:
    """Return the HTML page, encoded in UTF-8.

    Args:
        compared_runs: The runs, the baseline first.
        seeds: The comparison of groups of runs that differ only in their seeds.
        notes: The notes below the answer.
    """
    # These imports are slow, and only the page needs them.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    templates = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    base = compared_runs[0].run
    curves = curves_figure(compared_runs).update_layout(template="plotly_white")
    html = templates.get_template("page.html").render(
        compared_runs=compared_runs,
        seeds=seeds,
        about=f"{model_name(base)} · {machine_of(base)}",
        notes=notes,
        written_by=WRITTEN_BY,
        figures=columns_for(compared_runs),
        curves=curves.to_html(full_html=False, include_plotlyjs=False, div_id="curves"),
        audits={compared.label: audit_of(compared.run) for compared in compared_runs},
        differing=differing_values(compared_runs),
        library=get_plotlyjs(),
    )
    return html.encode()


def curves_of(compared: ComparedRun, window: int) -> dict[str, Curve]:
    """Return the curves of a run by the title of their panel.

    `window` is the number of steps in the moving means of the panels SMOOTHED. Curves without a
    finite value are omitted.
    """
    curves = {panel: compared.run.curve(key) for panel, key in PANELS.items() if key}
    if not (compared.is_baseline or compared.pairing_obstacle):
        curves[AGAINST] = loss_differences(compared.base, compared.run)
    for panel, (steps, values) in curves.items():
        if panel in SMOOTHED:
            curves[panel] = (steps, moving_mean(values, window))
        elif panel in POINTS:
            finite = np.isfinite(values)
            curves[panel] = (steps[finite], values[finite])
    return {panel: curve for panel, curve in curves.items() if np.isfinite(curve[1]).any()}


def curves_figure(compared_runs: Sequence[ComparedRun]) -> Figure:
    """Draw the curves of all runs in panels, one below the other, with a common horizontal axis.

    The horizontal axis shows steps. If the number of tokens per step differs between the runs, it
    shows tokens.
    """
    from plotly.subplots import make_subplots

    in_tokens = len({compared.run.tokens_per_step for compared in compared_runs}) > 1
    # The moving means of all runs have the window that suits the shortest run.
    window = min(window_of(len(compared.run.steps)) for compared in compared_runs)
    curves = [curves_of(compared, window) for compared in compared_runs]
    drawn_panels = set().union(*curves)
    panels = [panel for panel in PANELS if panel in drawn_panels]
    figure = make_subplots(
        rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=0.03, subplot_titles=panels
    )
    for row, panel in enumerate(panels, start=1):
        for compared, by_panel in zip(compared_runs, curves, strict=True):
            if panel not in by_panel:
                continue
            steps, values = by_panel[panel]
            # If the curve has more than MOST_POINTS points, draw only MOST_POINTS of them.
            number = min(len(steps), MOST_POINTS)
            drawn = np.linspace(0, len(steps) - 1, number).astype(int)
            x = steps[drawn]
            if in_tokens:
                x = x * compared.run.tokens_per_step
            has_points = panel in POINTS or len(steps) == 1
            line = {"color": compared.colour, "dash": compared.dash, "width": 1.5}
            figure.add_scatter(
                x=x,
                y=values[drawn],
                name=escape(compared.label),
                legendgroup=compared.label,
                mode="lines+markers" if has_points else "lines",
                line=line,
                # Each run has one entry in the legend.
                showlegend=row == 1,
                row=row,
                col=1,
            )
        # An exponent such as 1e-5 is clearer than plotly's default, 10µ.
        figure.update_yaxes(AXES.get(panel), exponentformat="e", row=row, col=1)
        if panel in ("training loss", AGAINST):
            shown = [by_panel[panel][1] for by_panel in curves if panel in by_panel]
            figure.update_yaxes(range=range_after_the_fall(shown), row=row, col=1)
    figure.update_xaxes(title="tokens" if in_tokens else "step", row=len(panels), col=1)
    return figure.update_layout(
        height=80 + 270 * len(panels),
        hovermode="x unified",
        showlegend=len(compared_runs) > 1,
    )


def audit_of(run: RunRecord) -> list[str]:
    """Return the observed precisions of the linear layers, as lines that begin with the precision.

    For example: "delayed: 28 in delayed on emulation, weights float32".
    """
    return [
        f"{name}: {line}"
        for name, audit in run.audits.items()
        for line in observed_layers(audit.get("products", []))
    ]


def differing_values(
    compared_runs: Sequence[ComparedRun],
) -> dict[str, dict[str, str]]:
    """Return the differences between the runs in their settings and their environment.

    Map each key whose value differs to a dict. This dict maps each value to the labels of the runs
    that have the value.
    """
    runs = [compared.run for compared in compared_runs]
    values_of_runs = [
        # `run.precision` is a text even if the recipe has a schedule of several precisions.
        flatten(
            {
                "settings": run.config | {"precision": run.precision},
                "environment": run.environment,
            }
        )
        for run in runs
    ]
    keys = dict.fromkeys(
        key for values in values_of_runs for key in values if not key.startswith(NAMES)
    )
    differing = {}
    for key in keys:
        labels: dict[str, list[str]] = {}
        for compared, values in zip(compared_runs, values_of_runs, strict=True):
            labels.setdefault(as_text(values.get(key)), []).append(compared.label)
        if len(labels) > 1:
            differing[key] = {value: ", ".join(names) for value, names in labels.items()}
    return differing
