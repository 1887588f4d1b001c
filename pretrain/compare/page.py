"""The report as one page that needs no network: `page/page.html` filled in, its look and its script beside it.

Text stands in the page as it is, so it can be read and searched where no script runs. Figures travel compressed beside the
plotting library (plotly), which the page unpacks when it is opened.
"""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from foundation.units import count, plural
from pretrain.compare.comparison import RunComparison, machine_of, other_machines
from pretrain.compare.figures import FROZEN_MATTERS, model_name
from pretrain.compare.page_data import CURVES, MEASURES, as_json, page_data
from pretrain.compare.page_differences import audits, differences
from pretrain.compare.page_table import columns_of, rows_of
from pretrain.compare.seed_groups import SeedComparison
from pretrain.metrics.run_record import LAST_STEPS

FOLDER = Path(__file__).with_name("page")
AXES = {
    "steps": "",
    "tokens": "not every run says its tokens",
    "hours": "times of steps are not known of every run, or were shared with others",
}


def render(
    comparison: RunComparison,
    *,
    seeds: SeedComparison | None = None,
    gate: bool = False,
    every: float | None = None,
) -> bytes:
    """The page. `seeds`: the same runs by their seeds; `gate`: whether the tolerance is one that was asked for; `every`: seconds
    until it is read again."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # only a page needs it

    if seeds:  # a front of single runs would join two seeds of one precision
        comparison = replace(comparison, standings=[replace(each, on_front=False) for each in comparison.standings])
    data = page_data(comparison) | {"every": every}
    columns = columns_of(comparison)
    templates = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters["code"] = code
    template = templates.get_template("page.html")
    return template.render(
        comparison=comparison,
        seeds=seeds,
        runs=data["runs"],
        about=about(comparison),
        other_machines=other_machines([each.run for each in comparison.standings]),
        gate=gate and bool(comparison.paired),
        every=every,
        loss_is="held-out loss" if comparison.by_held_out else f"training loss, mean of the last {LAST_STEPS} steps at most",
        speeds=any(run["speed"] is not None for run in data["runs"]),
        gap_steps=plural(max((each.gap.steps for each in comparison.paired), default=0), "step"),
        without_interval=any(not each.gap.has_interval for each in comparison.paired),
        broken=[each for each in comparison.standings if each.run.broken_off],
        # Over seeds, those of other seeds than the baseline's first are paired in a table of their own.
        unpaired=[] if seeds and seeds.others else [each for each in comparison.standings if each.not_paired],
        columns=columns,
        rows=rows_of(comparison, columns),
        axes=[(axis, "" if data["axes"][axis] else why) for axis, why in AXES.items()],
        window=max(run["window"] for run in data["runs"]),
        curves=curves_drawn(comparison, data),
        measures=MEASURES,
        time_parts=any(run["time"] for run in data["runs"]),
        profiled=any(run["time"] and run["time"]["source"] == "profile" for run in data["runs"]),
        memories=any(run["memory"] for run in data["runs"]),
        memory_parts=any(run["memoryParts"] for run in data["runs"]),
        audits=audits(comparison),
        differences=differences(comparison),
        css=(FOLDER / "page.css").read_text(encoding="utf-8"),
        script=(FOLDER / "page.js").read_text(encoding="utf-8"),
        library=library(),
        data=packed(as_json(data)),
    ).encode()


def code(text: str) -> str:
    """HTML of `text`, in which what stands between backticks, as in messages and Markdown, is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


@cache
def library() -> str:
    """plotly's script, a third of its size."""
    from plotly.offline import get_plotlyjs  # only a page needs it

    return packed(get_plotlyjs().encode())


def packed(content: bytes) -> str:
    """Compressed, in characters that a page may hold; the same every time."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


def about(comparison: RunComparison) -> str:
    """Returns what was trained, on what, in one line."""
    run = comparison.baseline.run
    steps = {each.run.summary["steps"] for each in comparison.standings}
    each = plural(min(steps), "step") if len(steps) == 1 else f"{min(steps):,} to {plural(max(steps), 'step')}"
    batch = f" of {count(run.tokens_per_step)} tokens" if run.tokens_per_step else ""
    torch = (run.environment.get("packages") or {}).get("torch")
    return " · ".join(filter(None, [model_name(run), each + batch, machine_of(run), f"torch {torch}" if torch else ""]))


def curves_drawn(comparison: RunComparison, data: Mapping[str, Any]) -> list[str]:
    """The panels that have something to show, by their ids in the page."""

    def shows_something(panel: str) -> bool:
        largest = max((value or 0.0 for run in data["runs"] for value in run["curves"].get(panel, [])), default=0.0)
        return largest >= FROZEN_MATTERS if panel == "frozen" else largest > 0

    beside = {"held-out": any(len(run["heldOut"]["loss"]) > 1 for run in data["runs"]), "minus": bool(comparison.paired)}
    return ["loss", *(panel for panel, due in beside.items() if due), *filter(shows_something, [*CURVES][1:])]
