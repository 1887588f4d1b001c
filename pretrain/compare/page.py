"""The report as one page that needs no network: `page/page.html` filled in, with pictures by plotly, whose script it holds.

Text stands in the page as it is, so it can be read and searched where no script runs. Names come from files of runs: they are
text, never markup, in the page by Jinja's escapes and in pictures by `escape`, as plotly reads some HTML.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foundation.files import WRITTEN_BY
from foundation.units import GIB
from pretrain.compare.appearance import as_text
from pretrain.compare.columns import differences_of, figures_of
from pretrain.compare.comparison import RunComparison, Standing, machine_of, moving_mean, window_of
from pretrain.compare.fairness import last_steps
from pretrain.compare.figures import label_of_end, model_name, range_after_the_fall
from pretrain.compare.seed_groups import SeedComparison
from pretrain.metrics.run_folder import STATISTICS_FILE
from pretrain.metrics.run_record import RunRecord
from pretrain.settings.config import flatten

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

FOLDER = Path(__file__).with_name("page")
MOST_POINTS = 2000  # of a curve, which a screen can show
FROZEN_MATTERS = 1e-3  # a share of frozen updates below which there is nothing to see
MEASURES = {"underflow": "underflow", "saturation": "saturation", "scale": "scale, as log2", "amax": "largest value, as log2"}
NAMES = ("name", "run_dir")  # different in every run, and no part of what is compared
MANY = 3  # runs, beyond which those that agree are "all others"
REST, PROCESS, UNUSED = "the rest of the peak", "the process, whole", "reserved, not used"
# The plan's names of what a run holds from step to step, as the audit calls what it has measured.
_HELD = {"parameters": "weights", "remainder bits": "remainders", "optimizer moments": "moments", "gradients": "gradients"}
_OF_A_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.*)")
# Of an audit, what has a place of its own or is of no use to a reader.
_AUDIT_APART = ("precision", "effective", "backend", "computed_by", "products", "precisions", "phases", "schedule", "memory")


def render(
    comparison: RunComparison,
    *,
    seeds: SeedComparison | None = None,
    failures: Sequence[str] | None = None,
    every: float | None = None,
) -> bytes:
    """The page. `seeds`: the same runs by their seeds; `failures`: of the gate, where there is one; `every`: seconds until it is
    read again."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # only a page needs it
    from plotly.offline import get_plotlyjs

    over_seeds = seeds if seeds and seeds.others else None
    templates = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters["code"] = code
    return (
        templates.get_template("page.html")
        .render(
            comparison=comparison,
            seeds=over_seeds,
            answer=(seeds or comparison).answer(),
            about=about(comparison),
            notes=comparison.notes(over_seeds=bool(over_seeds)),
            failures=failures,
            front=[] if seeds else comparison.front,  # of single runs it would join two seeds of one precision
            written_by=WRITTEN_BY,
            every=every,
            figures=figures_of(comparison),
            differences=[] if over_seeds or not comparison.standings[1:] else differences_of(comparison),
            pictures={name: html_of(figure, name) for name, figure in pictures(comparison, front=not seeds).items()},
            audits=[each for standing in comparison.standings for each in audits(standing)],
            differing=what_differs(comparison),
            css=(FOLDER / "page.css").read_text(encoding="utf-8"),
            script=(FOLDER / "page.js").read_text(encoding="utf-8"),
            library=get_plotlyjs(),
        )
        .encode()
    )


def code(text: str) -> str:
    """HTML of `text`, in which what stands between backticks, as in messages and Markdown, is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def about(comparison: RunComparison) -> str:
    """What was trained, on what, in one line."""
    run = comparison.baseline.run
    torch = (run.environment.get("packages") or {}).get("torch")
    return " · ".join(filter(None, [model_name(run), machine_of(run), f"torch {torch}" if torch else ""]))


def html_of(figure: Figure, name: str) -> str:
    top = 100 if figure.layout.updatemenus else 40  # above which its buttons stand
    figure.update_layout(template="plotly_white", margin={"l": 60, "r": 20, "t": top, "b": 50}, legend={"itemsizing": "constant"})
    config = {"displaylogo": False, "responsive": True}
    return figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config, default_width="100%")


def pictures(comparison: RunComparison, *, front: bool = True) -> dict[str, Figure]:
    """The page's figures by name; those that have nothing to show are left out."""
    standings, runs = comparison.standings, comparison.runs
    fast, made = [each for each in standings if each.shown_speed and each.loss is not None and not each.run.broke_off], {}
    if len(standings) > 1 and fast:
        made["speed"] = speed_figure(fast, comparison.front if front else [], by_held_out=comparison.by_held_out)
    if comparison.paired:
        made["ends"] = ends_figure(comparison)
    made["curves"] = curves_figure(comparison)
    if heat := {each.look.label: maps for each in standings if (maps := heat_maps(each.run.path / STATISTICS_FILE))}:
        made["quantization"] = heat_figure(heat)
    if any(step_time(run) for run in runs):
        made["time"] = bars_figure({each.look.label: step_time(each.run) or {} for each in standings}, "ms")
    if any(memory_parts(run) for run in runs):
        parts = {each.look.label: memory_parts(each.run) or {} for each in standings}
        rows = {f"{label}{mark}": kinds.get(kind, {}) for label, kinds in parts.items() for kind, mark in _KINDS.items()}
        made["memory"] = bars_figure({label: amounts for label, amounts in rows.items() if amounts}, "GiB")
    return made


def _marker(standings: Sequence[Standing]) -> dict[str, Any]:
    """Filled in a precision's colour; hollow where it was emulated."""
    symbols = [each.look.symbol + ("-open" if each.run.emulated else "") for each in standings]
    return {"color": [each.look.colour for each in standings], "symbol": symbols, "size": 11}


def speed_figure(shown: Sequence[Standing], front: Sequence[Standing], *, by_held_out: bool) -> Figure:
    """Tokens a second across and loss upwards, and the Pareto front."""
    from plotly import graph_objects as go

    x, y = ([each.shown_speed for each in shown], [each.loss for each in shown])
    names = [escape(each.look.label) for each in shown]
    figure = go.Figure(go.Scatter(x=x, y=y, text=names, mode="markers+text", textposition="top center", marker=_marker(shown)))
    line = {"color": "#999999", "width": 1}
    figure.add_scatter(
        x=[each.speed for each in front], y=[each.loss for each in front], mode="lines", line=line, hoverinfo="skip"
    )
    loss = "held-out loss" if by_held_out else "training loss"
    return figure.update_layout(xaxis_title="tokens/s", yaxis_title=f"{loss}, nats a token", showlegend=False, height=480)


def ends_figure(comparison: RunComparison) -> Figure:
    """Each run's loss minus the baseline's at the end, with its interval; grey: the tolerance."""
    from plotly import graph_objects as go

    paired, tolerance = comparison.paired, comparison.tolerance
    half = [each.gap.half_width if each.gap.has_interval else 0.0 for each in paired]
    ends = go.Scatter(
        x=[each.gap.mean for each in paired],
        y=[escape(each.look.label) for each in paired],
        error_x={"type": "data", "array": half, "color": "#888888"},
        mode="markers",
        marker=_marker(paired),
    )
    title = f"loss minus that of {escape(comparison.baseline.look.label)}, {last_steps(each.gap for each in paired)}"
    figure = go.Figure(ends).update_layout(xaxis_title=title, height=160 + 28 * len(paired))
    figure.add_vrect(x0=-tolerance, x1=tolerance, fillcolor="#888888", opacity=0.15, line_width=0)
    return figure.update_yaxes(autorange="reversed", type="category")


def axes_of(run: RunRecord) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Steps with the one before the first, and where each lies, by axis. Hours are those of a run alone on its machine."""
    steps, tokens = run.curve("tokens")
    times = run.curve("step_ms")[1]
    before = np.concatenate([steps[:1] - 1, steps])
    axes = {"steps": (before, before), "tokens": (before, np.concatenate([tokens[:1] - (run.tokens_per_step or 0), tokens]))}
    if np.isfinite(times).all() and not run.side_by_side:
        axes["hours"] = (before, np.concatenate([[0.0], np.cumsum(times) / 3.6e6]))
    return axes


def curves_figure(comparison: RunComparison) -> Figure:
    """Moving means along the runs, one panel a figure, over one axis: a zoom in one is a zoom in all."""
    from plotly.subplots import make_subplots

    panels = {"training loss": "loss", "held-out loss": "", "minus": "", "gradient norm": "gradient_norm"}
    panels |= {"learning rate": "learning_rate", "frozen updates": "frozen_updates"}
    lines: dict[str, list[tuple[Standing, np.ndarray, np.ndarray]]] = {}
    for each in comparison.standings:
        curves = {title: each.run.curve(key) for title, key in panels.items() if key}
        curves["held-out loss"] = each.run.held_out_curve()
        if comparison.paired and each.differences:
            curves["minus"] = each.differences
        for title, (steps, values) in curves.items():
            if np.isfinite(values).any() and (title != "frozen updates" or np.nanmax(values) >= FROZEN_MATTERS):
                lines.setdefault(title, []).append((each, steps, values))
    shown = [title for title in panels if title in lines] or ["training loss"]
    titles = [f"loss minus that of {escape(comparison.baseline.look.label)}" if each == "minus" else each for each in shown]
    figure = make_subplots(rows=len(shown), cols=1, shared_xaxes=True, vertical_spacing=0.03, subplot_titles=titles)
    axes = {each.look.label: axes_of(each.run) for each in comparison.standings}
    places = {name: [] for name in ("steps", "tokens", "hours") if all(name in known for known in axes.values())}
    for row, title in enumerate(shown, start=1):
        for each, steps, values in lines.get(title, ()):
            if title not in ("held-out loss", "learning rate"):
                values = moving_mean(values, window_of(len(values)))
            chosen = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_POINTS)).astype(int))
            for name, along in places.items():
                along.append(np.interp(steps[chosen], *axes[each.look.label][name]))
            figure.add_scatter(
                x=places["steps"][-1],
                y=values[chosen],
                name=escape(each.look.label if each.is_baseline else label_of_end(each)),
                legendgroup=each.look.label,
                showlegend=row == 1 and len(comparison.standings) > 1,
                mode="lines+markers" if title == "held-out loss" or len(steps) == 1 else "lines",
                line={"color": each.look.colour, "dash": each.look.dash, "width": 1.5},
                row=row,
                col=1,
            )
        if title in ("gradient norm", "frozen updates"):
            figure.update_yaxes(type="log", row=row, col=1)
        elif title in ("training loss", "minus"):
            ended = [values for each, _, values in lines.get(title, ()) if title != "minus" or each.gap]
            figure.update_yaxes(range=range_after_the_fall(ended, [np.zeros(1)] * (title == "minus")), row=row, col=1)
    buttons = [
        {"label": name, "method": "restyle", "args": [{"x": [each.tolist() for each in along]}]} for name, along in places.items()
    ]
    menu = {"buttons": buttons, "type": "buttons", "direction": "right", "x": 0, "y": 1.0, "yanchor": "bottom", "pad": {"b": 30}}
    return figure.update_layout(height=80 + 270 * len(shown), hovermode="x unified", updatemenus=[menu])


def heat_maps(path: Path) -> dict[tuple[str, str], dict[str, Any]] | None:
    """What a run's quantization statistics show, by measure and operand: `layers`, `steps`, and `values` float64 [layer, step],
    binary logarithms of scales and largest values. None where the run quantizes nothing."""
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.is_file() else []
    records = [(line["step"], each) for line in lines for each in line["operands"]]
    layers, steps = list(dict.fromkeys(each["layer"] for _, each in records)), [line["step"] for line in lines]
    rows, places = ({each: place for place, each in enumerate(names)} for names in (layers, steps))
    maps: dict[tuple[str, str], dict[str, Any]] = {}
    for step, each in records:
        for measure in MEASURES:
            empty = {"layers": [short_name(layer) for layer in layers], "steps": steps}
            one = maps.setdefault((measure, each["operand"]), empty | {"values": np.full((len(layers), len(steps)), np.nan)})
            value = np.nan if each[measure] is None else each[measure]
            in_bits = measure in ("scale", "amax")
            one["values"][rows[each["layer"]], places[step]] = (np.log2(value) if value else np.nan) if in_bits else value
    return maps or None


def short_name(layer: str) -> str:
    """`model.layers.3.self_attn.q_proj` as `3 q_proj`: the number of its layer and its last name."""
    match = _OF_A_LAYER.search(layer)
    return f"{match[1]} {match[2].rpartition('.')[-1]}" if match else layer.rpartition(".")[-1]


def heat_figure(heat: Mapping[str, Mapping[tuple[str, str], Mapping[str, Any]]]) -> Figure:
    """What quantization loses by layer and step, a map an operand; a menu chooses the run and the measure."""
    from plotly.subplots import make_subplots

    operands = list(dict.fromkeys(operand for maps in heat.values() for _, operand in maps))
    figure, choices = make_subplots(rows=1, cols=len(operands), shared_yaxes=True, subplot_titles=operands), []
    for label, maps in heat.items():
        for (measure, operand), one in maps.items():
            first, column = not choices, operands.index(operand) + 1
            choice = f"{escape(label)}: {MEASURES[measure]}"
            scale = {"coloraxis": "coloraxis", "visible": first or choice == choices[0]}
            figure.add_heatmap(x=list(map(str, one["steps"])), y=one["layers"], z=one["values"], **scale, row=1, col=column)
            choices.append(choice)
    buttons = [
        {"label": choice, "method": "restyle", "args": [{"visible": [each == choice for each in choices]}]}
        for choice in dict.fromkeys(choices)
    ]
    rows = max(len(one["layers"]) for maps in heat.values() for one in maps.values())
    menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom", "pad": {"b": 30}}
    figure.update_yaxes(autorange="reversed").update_xaxes(type="category", title="step")
    return figure.update_layout(height=min(1200, 200 + 14 * rows), coloraxis={"colorscale": "Viridis"}, updatemenus=[menu])


def bars_figure(rows: Mapping[str, Mapping[str, float]], unit: str) -> Figure:
    """A bar a row, stacked of its parts."""
    from plotly import graph_objects as go

    parts = dict.fromkeys(part for amounts in rows.values() for part in amounts)
    names = list(map(escape, rows))
    bars = [
        go.Bar(name=escape(part), y=names, x=[amounts.get(part, 0.0) for amounts in rows.values()], orientation="h")
        for part in sorted(parts, key=[REST, PROCESS, UNUSED].__contains__)
    ]
    figure = go.Figure(bars).update_layout(barmode="stack", xaxis_title=unit, height=160 + 28 * len(rows))
    return figure.update_yaxes(autorange="reversed", type="category")


def step_time(run: RunRecord) -> dict[str, float] | None:
    """Milliseconds of a median step, waiting for data apart."""
    step_ms, share = run.summary.get("step_ms"), run.summary.get("data_wait_share")
    if step_ms is None or share is None or run.side_by_side:
        return None
    return {"computing": step_ms * (1 - share), "waiting for data": step_ms * share}


_KINDS = {"measured": "", "planned": ", planned"}


def memory_parts(run: RunRecord) -> dict[str, dict[str, float]] | None:
    """GiB by part, `measured` and `planned`; None where the run recorded no memory.

    Measured are what its tensors hold, the rest of the peak that torch counted (activations, the loss, copies), and what was
    reserved beyond the peak. On a CPU nothing but the size of the whole process is measured, of which libraries are a part.
    """
    recorded, peak = run.audit.get("memory") or {"held": {}, "planned": {}}, run.summary.get("memory_gib")
    if peak is None:
        return None
    reserved, measured = run.curve("memory_reserved_gib")[1], {PROCESS: peak}
    if np.isfinite(reserved).any():
        held = {part: size / GIB for part, size in recorded["held"].items()}
        measured = held | {REST: max(peak - sum(held.values()), 0.0), UNUSED: max(float(np.nanmax(reserved)) - peak, 0.0)}
    return {"measured": measured, "planned": {_HELD.get(part, part): size / GIB for part, size in recorded["planned"].items()}}


def audits(each: Standing) -> Iterator[tuple[str, dict[str, str]]]:
    """What a run computed in, as its audit observed it, by a title; of one whose precision changes on the way, phase by phase."""
    run, around = each.run, {key: value for key, value in each.run.audit.items() if key not in _AUDIT_APART}
    for name, own in (run.audited or {None: run.audit}).items() if run.audit else ():
        first_steps = [f"{step:,}" for step, phase in run.phases.items() if phase == name]
        where = f", from step {' and '.join(first_steps)}" if first_steps else ""
        ran = own.get("effective", name)
        by = own.get("computed_by", own.get("backend", "what is not known"))
        title = f"{each.look.label}{where}: {ran}" + (
            f", {own['precision']} asked for" if own.get("precision", ran) != ran else ""
        )
        rows = {key: value for key, value in (around | own).items() if key not in _AUDIT_APART} | _products(
            own.get("products") or []
        )
        yield (
            f"{title} · {by}",
            {key.replace("_", " "): _in_words(value) for key, value in rows.items() if value not in (None, [])},
        )


def _in_words(value: Any) -> str:
    """Objects and lists of an audit as one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')}: {_in_words(own)}" for key, own in value.items())
    return "; ".join(map(_in_words, value)) if isinstance(value, list) else str(value)


def _products(products: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """What linears compute, and how many of them do."""
    kinds: Counter[str] = Counter()
    for product in products:
        formats = "; ".join(f"{name} {operands}" for name, operands in (product.get("products") or {}).items())
        why = f" ({product['reason']})" if product.get("reason") else ""
        kinds[f"{product.get('effective')}{why}" + (f": {formats}" if formats else "")] += 1
    return {"linears": [f"{number} {kind}" for kind, number in kinds.most_common()]}


def what_differs(comparison: RunComparison) -> dict[str, dict[str, dict[str, str]]]:
    """The keys in which not all runs agree, by kind: each value, and the runs that have it."""
    labels = [each.look.label for each in comparison.standings]
    settings = [flatten(run.config) for run in comparison.runs]
    environments = [flatten(run.environment) for run in comparison.runs]
    differing: dict[str, dict[str, dict[str, str]]] = {"Settings": {}, "Environment": {}, "Code": {}}
    for kind, flats in (("Settings", settings), ("Environment", environments)):
        for key in dict.fromkeys(key for flat in flats for key in flat if key not in NAMES and not key.startswith("log.")):
            holders: dict[str, list[str]] = {}
            for label, flat in zip(labels, flats, strict=True):
                holders.setdefault(as_text(flat.get(key)), []).append(label)
            if len(holders) > 1:
                most = max(holders, key=lambda value: len(holders[value]))
                shown = {v: "all others" if v == most and len(own) > MANY else ", ".join(own) for v, own in holders.items()}
                differing["Code" if key.startswith("git") else kind][key] = shown
    return differing
