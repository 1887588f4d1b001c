"""The report as one page that needs no network: `page/page.html` filled in, with pictures by plotly, whose script it holds.

Text stands in the page as it is, so it can be read and searched where no script runs. Names come from files of runs: they are
text, never markup, in the page by Jinja's escapes and in pictures by `escape`, as plotly reads some HTML.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foundation.units import plural
from pretrain.compare.columns import as_text, differences_of, figures_of
from pretrain.compare.comparison import RunComparison, Standing, machine_of
from pretrain.compare.figures import model_name, moving_mean, range_after_the_fall, window_of
from pretrain.compare.output_files import WRITTEN_BY
from pretrain.compare.seed_groups import SeedComparison
from pretrain.metrics.run_folder import STATISTICS_FILE
from pretrain.metrics.run_record import RunRecord, read_lines
from pretrain.settings.config import flatten

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

FOLDER = Path(__file__).with_name("page")
MOST_POINTS = 2000  # of a curve, which a screen can show
WORST_LAYERS = 3  # of the gap to BF16, drawn beside the whole gradient
LAYER = "gap/cosine/"  # with which a step's key of a layer's cosine begins
LOSS_GAP, COSINE = "low precision's loss minus BF16's", "the gradient's cosine with BF16's"
POINTS = ("held-out loss", LOSS_GAP, COSINE)  # panels of curves that have no value at most steps
PANELS = (
    "training loss",
    "held-out loss",
    "minus the baseline",
    "gradient norm",
    "learning rate",
    "frozen updates",
    *POINTS[1:],
)
MEASURES = {
    "underflow": "underflow",
    "saturation": "saturation",
    "scale": "scale, as log2",
    "amax": "largest value, as log2",
}
# different in every run, and no part of what is compared
NAMES = ("settings.name", "settings.run_dir", "settings.log.")


def render(
    comparison: RunComparison, seeds: SeedComparison | None, answer: str, every: float | None
) -> bytes:
    """The page. `seeds`: the same runs by their seeds, where several groups are compared; `every`: seconds between readings."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # only a page needs it
    from plotly.offline import get_plotlyjs

    templates = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    run = comparison.baseline.run
    torch = (run.environment.get("packages") or {}).get("torch")
    html = templates.get_template("page.html").render(
        comparison=comparison,
        seeds=seeds,
        answer=answer,
        about=" · ".join(
            filter(None, [model_name(run), machine_of(run), f"torch {torch}" if torch else ""])
        ),
        notes=comparison.notes(over_seeds=bool(seeds)),
        written_by=WRITTEN_BY,
        every=every,
        figures=figures_of(comparison),
        differences=[] if seeds or not comparison.standings[1:] else differences_of(comparison),
        pictures={
            name: figure.update_layout(template="plotly_white").to_html(
                full_html=False, include_plotlyjs=False, div_id=name
            )
            for name, figure in pictures(comparison).items()
        },
        audits={each.label: audit_of(each.run) for each in comparison.standings},
        differing=what_differs(comparison),
        library=get_plotlyjs(),
    )
    return html.encode()


def pictures(comparison: RunComparison) -> dict[str, Figure]:
    """The page's figures by name; those that have nothing to show are left out."""
    statistics = {
        each.label: maps
        for each in comparison.standings
        if (maps := heat_maps(each.run.path / STATISTICS_FILE))
    }
    return {"curves": curves_figure(comparison)} | (
        {"quantization": heat_figure(statistics)} if statistics else {}
    )


def curves_of(each: Standing) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """(steps, values) of a run's curves by their panels, and by layers where they are of one: of the gap to BF16 those where it
    was widest at the last look. Smoothed are those that have a value at every step, but the learning rate."""
    keys = {
        "training loss": "loss",
        "gradient norm": "gradient_norm",
        "frozen updates": "frozen_updates",
    }
    raw = {title: each.run.curve(key) for title, key in keys.items()}
    if each.differences and not each.is_baseline:
        raw["minus the baseline"] = each.differences
    curves = {
        (title, ""): (steps, moving_mean(values, window_of(len(values))))
        for title, (steps, values) in raw.items()
    }
    curves |= {
        ("held-out loss", ""): each.run.curve("held_out_loss"),
        ("learning rate", ""): each.run.curve("learning_rate"),
    }
    looked = [step for step in each.run.steps if "gap/loss" in step]
    cosines = (
        {
            key: value
            for key, value in looked[-1].items()
            if key.startswith(LAYER) and value is not None
        }
        if looked
        else {}
    )
    worst = sorted(cosines, key=cosines.__getitem__)[:WORST_LAYERS]
    for title, key in (
        (LOSS_GAP, "gap/loss"),
        (COSINE, "gap/cosine"),
        *((COSINE, key) for key in worst),
    ):
        steps, values = each.run.curve(key)
        curves[title, key.removeprefix(LAYER) if key in worst else ""] = (
            steps[known := np.isfinite(values)],
            values[known],
        )
    return {
        place: (steps, values)
        for place, (steps, values) in curves.items()
        if np.isfinite(values).any()
    }


def curves_figure(comparison: RunComparison) -> Figure:
    """Curves along the runs, one panel a figure, over one axis: a zoom in one is a zoom in all. The axis are steps, or tokens
    where steps have not the same number."""
    from plotly.subplots import make_subplots

    curves = [curves_of(each) for each in comparison.standings]
    shown = [title for title in PANELS if any((title, "") in each for each in curves)] or [
        PANELS[0]
    ]
    figure = make_subplots(
        rows=len(shown), cols=1, shared_xaxes=True, vertical_spacing=0.03, subplot_titles=shown
    )
    in_tokens = len({run.tokens_per_step for run in comparison.runs}) > 1
    for row, title in enumerate(shown, start=1):
        for each, own in zip(comparison.standings, curves, strict=True):
            own = {part: curve for (panel, part), curve in own.items() if panel == title}
            for part, (steps, values) in (own or {"": (np.array([]), np.array([]))}).items():
                chosen = np.unique(
                    np.linspace(0, len(steps) - 1, min(len(steps), MOST_POINTS)).astype(int)
                )
                figure.add_scatter(
                    x=steps[chosen] * (each.run.tokens_per_step if in_tokens else 1),
                    y=values[chosen],
                    name=escape(f"{each.label}: {part}" if part else each.label),
                    legendgroup=each.label,
                    showlegend=bool(part) or (row == 1 and len(comparison.standings) > 1),
                    mode="lines+markers" if title in POINTS or len(steps) == 1 else "lines",
                    line={"color": each.colour, "dash": "dot" if part else each.dash, "width": 1.5},
                    row=row,
                    col=1,
                )
        if title == "gradient norm":
            figure.update_yaxes(type="log", row=row, col=1)
        elif title in ("training loss", "minus the baseline"):
            ended = [own[title, ""][1] for own in curves if (title, "") in own]
            figure.update_yaxes(
                range=range_after_the_fall(ended) if ended else None, row=row, col=1
            )
    figure.update_xaxes(title="tokens" if in_tokens else "step", row=len(shown), col=1)
    return figure.update_layout(height=80 + 270 * len(shown), hovermode="x unified")


def heat_maps(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What a run's quantization statistics show, by measure and operand: `layers`, `steps`, and `values` float64 [layer, step],
    binary logarithms of scales and largest values. Empty where the run quantizes nothing."""
    lines = read_lines(path) if path.is_file() else []
    records = [(line["step"], each) for line in lines for each in line["operands"]]
    layers, steps = (
        list(dict.fromkeys(each["layer"] for _, each in records)),
        [line["step"] for line in lines],
    )
    maps = defaultdict(
        lambda: {
            "layers": layers,
            "steps": steps,
            "values": np.full((len(layers), len(steps)), np.nan),
        }
    )
    for step, each in records:
        for measure in MEASURES:
            value = each[measure]
            if measure in ("scale", "amax"):
                value = np.log2(value) if value else None
            maps[measure, each["operand"]]["values"][
                layers.index(each["layer"]), steps.index(step)
            ] = value
    return maps


def heat_figure(heat: Mapping[str, Mapping[tuple[str, str], Mapping[str, Any]]]) -> Figure:
    """What quantization loses by layer and step, a map an operand; a menu chooses the run and the measure."""
    from plotly.subplots import make_subplots

    operands = list(dict.fromkeys(operand for maps in heat.values() for _, operand in maps))
    figure, choices = (
        make_subplots(
            rows=1,
            cols=len(operands),
            shared_yaxes=True,
            subplot_titles=list(map(escape, operands)),
        ),
        [],
    )
    for label, maps in heat.items():
        for (measure, operand), one in maps.items():
            choices.append(f"{escape(label)}: {MEASURES[measure]}")
            scale = {"coloraxis": "coloraxis", "visible": choices[-1] == choices[0]}
            column = operands.index(operand) + 1
            figure.add_heatmap(
                x=list(map(str, one["steps"])),
                y=list(map(escape, one["layers"])),
                z=one["values"],
                **scale,
                row=1,
                col=column,
            )
    buttons = [
        {
            "label": choice,
            "method": "restyle",
            "args": [{"visible": [each == choice for each in choices]}],
        }
        for choice in dict.fromkeys(choices)
    ]
    rows = max(len(one["layers"]) for maps in heat.values() for one in maps.values())
    menu = {
        "buttons": buttons,
        "x": 0,
        "xanchor": "left",
        "y": 1.0,
        "yanchor": "bottom",
        "pad": {"b": 30},
    }
    figure.update_yaxes(autorange="reversed").update_xaxes(type="category", title="step")
    return figure.update_layout(
        height=min(1200, 200 + 14 * rows), coloraxis={"colorscale": "Viridis"}, updatemenus=[menu]
    )


def audit_of(run: RunRecord) -> list[str]:
    """What linears computed in, as the audit observed it: a line for each precision that steps were in."""
    lines = []
    for name, own in run.audit.get(
        "precisions", {run.audit.get("effective", run.precision): run.audit}
    ).items():
        kinds = Counter(
            f"{each['effective']} ({each['reason']})" if each.get("reason") else each["effective"]
            for each in own.get("products", [])
        )
        linears = ", ".join(
            f"{plural(number, 'linear')} in {kind}" for kind, number in kinds.most_common()
        )
        lines.append(f"{name} ({own.get('computed_by', own.get('backend'))}): {linears}")
    return lines


def what_differs(comparison: RunComparison) -> dict[str, dict[str, str]]:
    """The keys of settings and environment in which not all runs agree: each value, and the runs that have it."""
    said = (
        {"settings": run.config | {"precision": run.precision}, "environment": run.environment}
        for run in comparison.runs
    )
    flats = [*map(flatten, said)]  # phases of precision are said in a word
    differing = {}
    for key in dict.fromkeys(key for flat in flats for key in flat if not key.startswith(NAMES)):
        holders: dict[str, list[str]] = {}
        for each, flat in zip(comparison.standings, flats, strict=True):
            holders.setdefault(as_text(flat.get(key)), []).append(each.label)
        if len(holders) > 1:
            differing[key] = {value: ", ".join(labels) for value, labels in holders.items()}
    return differing
