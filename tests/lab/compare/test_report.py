"""`python -m pretrain report`: the answer, the tables, the page and its pictures.

report.txt has the output of a report, and the curves, audits and differences of its page.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from lab.compare.comparison import compare
from lab.compare.curves import moving_mean, range_after_the_fall
from lab.compare.page import (
    WRITTEN_BY,
    audit_of,
    check_replaceable,
    curves_figure,
    differing_values,
)
from lab.compare.report import Report
from pretrain.__main__ import main
from pretrain.metrics.run_record import RunRecord, read_run
from tests.lab.made_runs import append, make_run, note, rows_of, trained

LONG = [3.0 - 0.001 * step for step in range(100)]
LOSSES = {
    "one step": [3.0],
    "no finite loss": [None, None, None],
    "a flat line": [2.0] * 300,
    "a gap": [11.0, None, *np.linspace(8, 2, 500).tolist()],
    "lost at its end": [3.0, 2.0, None],
}


def product(effective: str, backend: str, reason: str = "") -> dict[str, str]:
    return {"effective": effective, "backend": backend, "stored": "float32", "reason": reason}


PHASES = {"precision": "bf16", "effective": "bf16", "computed_by": "torch", "weights": "fp32"}
PHASES["precisions"] = {
    "delayed": {
        "effective": "delayed",
        "products": [product("delayed", "emulation")] * 3 + [product("bf16", "torch", "head")],
    },
    "bf16": {"effective": "bf16", "products": [product("bf16", "torch")] * 5},
}
PHASES["phases"] = {"1": "delayed", "3": "bf16"}


def write_runs(folder: Path) -> list[Path]:
    """Write runs whose figures are shown in different ways, the baseline first."""
    fell_back = {"backend": "torch", "effective": "bf16"}
    option = ("precision=delayed", "fp8_config.fp8_format=HYBRID")
    phases = "precision=[{until: 0.5, use: nvfp4}, {use: bf16}]"
    runs = [
        make_run(folder / "base", LONG),
        make_run(folder / "delayed", [x + 0.5 for x in LONG], "precision=delayed", held_out=False),
        make_run(folder / "hybrid", LONG, *option, audit={"backend": "emulation"}),
        make_run(folder / "shared", LONG, "weights=bf16", side_by_side=True),
        make_run(folder / "fell back", LONG[:50], "precision=nvfp4", audit=fell_back),
        make_run(folder / "phases", LONG, phases, audit=PHASES, held_out=False),
        make_run(folder / "halted", LONG[:9], held_out=False),
    ]
    append(runs[3], {"step": 100, "event": "served", "served_loss": 2.45, "served_precision": "x"})
    append(runs[5], {"step": 2, "event": "evaluation", "held_out_loss": 2.5})
    append(runs[5], {"step": 101, "tokens": 4096, "epoch": 1.0, "loss": 2.9})
    note(runs[6], halted="step 9: the gradient norm is nan")
    return runs


def text_of(report: Report) -> str:
    """Return the output, and the curves, audits and differences of the page as lines."""
    compared_runs = report.compared_runs
    figure = curves_figure(compared_runs)
    titles = [annotation.text for annotation in figure.layout.annotations]
    lines = []
    for title, axis in zip(titles, figure.select_yaxes(), strict=True):
        ends = [f"{end:.3f}" for end in axis.range or ()]
        lines.append(f"{title}: {axis.title.text}, {axis.tickformat}, {axis.exponentformat} {ends}")
        for trace in figure.data:
            if trace.yaxis == axis.plotly_name.replace("axis", ""):
                points = [f"({trace.x[i]}, {trace.y[i]:.5g})" for i in (0, -1)]
                shown = f"{trace.mode}, in the legend: {trace.showlegend}"
                lines.append(f"  {trace.name}: {len(trace.x)} from {' to '.join(points)}, {shown}")
    audits = [line for run in compared_runs for line in audit_of(run.run)]
    differing = [f"{key}: {values}" for key, values in differing_values(compared_runs).items()]
    return "\n".join([*report.tables(), "", *lines, "", *audits, "", *differing, ""])


def test_the_report_of_various_runs_is_as_before(tmp_path, stored):
    runs = [read_run(path) for path in write_runs(tmp_path)]
    runs[3].environment["git"] = {"commit": "ab" * 20}
    stored("report.txt", text_of(Report.over(runs)))


def test_the_command_prints_tables_and_writes_only_the_page(tmp_path, capsys):
    runs = [str(make_run(tmp_path / "a")), str(make_run(tmp_path / "b", [4.1, 3.1, 2.6, 2.35]))]
    assert main(["report", *runs]) == 0
    printed = capsys.readouterr().out
    assert "+0.10000" in printed and "± 95 %" not in printed, "one seed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "recipe.yaml"]
    page = tmp_path / "out" / "mine.html"
    log = tmp_path / "a.log"
    log.touch()
    assert main(["report", runs[1], *runs, str(log), "--out", str(page)]) == 0
    assert "minus b" in page.read_text() and "Against b, " in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path.name} is not a run folder" in capsys.readouterr().err


def test_a_short_wait_and_a_wait_of_an_emulated_run_are_shown(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", audit={"backend": "emulation"})]
    tables = "\n".join(Report.over([*map(read_run, runs)]).tables())
    assert "data wait 1.0 %" in tables, "equal in all rows"
    metrics = runs[1] / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"data_wait_ms": 1.0', '"data_wait_ms": 0.04'))
    tables = "\n".join(Report.over([*map(read_run, runs)]).tables())
    waits = [rows[-1][-1] for rows in rows_of(tables).values()]
    assert waits == ["data wait", "1.0 %", "0.0 %"]


# ── The page ──────────────────────────────────────────────────────────────────────────────────────


def page_of(runs: list[RunRecord], folder: Path, *vary: str) -> str:
    """Return the page without scripts and styles."""
    Report.over(runs, vary).write(folder / "page.html")
    return re.sub(r"<(script|style)\b.*?</\1>", "", (folder / "page.html").read_text(), flags=re.S)


def test_the_page_needs_no_network_and_has_all_results_as_text(tmp_path):
    page = page_of([read_run(path) for path in write_runs(tmp_path)], tmp_path)
    assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", page)
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == ["Over seeds", "All figures", "Curves", "Audit", "What differed"]
    for text in ("over 1 seed, no verdict", "+0.50000", "10,240", "settings.precision"):
        assert text in page
    assert "delayed: 3 in delayed on emulation" in page


def test_names_from_a_run_are_never_markup(tmp_path):
    """Plotly reads some HTML in names."""
    audit = {"effective": "</script><script>alert(1)"}
    runs = [trained(tmp_path / "<img onerror=alert(1)>&amp;")]
    runs.append(trained(tmp_path / "c", (4.0, 3.0), audit=audit))
    Report.over(runs).write(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in page and "<img onerror" not in page
    assert "&lt;img onerror=alert(1)&gt;&amp;amp;" in page
    drawn = [trace.name for trace in curves_figure(Report.over(runs).compared_runs).data]
    assert not any("<" in text for text in drawn)


def test_any_run_has_a_page(tmp_path):
    runs = [trained(tmp_path / "other", (4.0, 3.0, 2.0))]
    for name, losses in LOSSES.items():
        path = tmp_path / f"cost $2^4$ and $x {name}"
        runs.append(trained(path, losses, "precision=nvfp4", held_out=len(losses) > 1))
        assert curves_figure(compare(runs[-1:])).data
        runs.append(trained(tmp_path / f"t {name}", losses, fingerprint="cd"))
    assert "</html>" in page_of(runs, tmp_path, "data")


def test_only_an_empty_file_and_a_report_are_replaced(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "report").write_bytes(b"x" * 10**6 + WRITTEN_BY.encode())
    (tmp_path / "thesis").write_bytes(b"years of work")
    for name in ("absent", "empty", "report"):
        check_replaceable(tmp_path / name)
    for name in ("thesis", "."):
        with pytest.raises(InputError, match=f"--out {tmp_path / name}"):
            check_replaceable(tmp_path / name)


# ── Curves ────────────────────────────────────────────────────────────────────────────────────────


def test_curves_are_drawn_by_tokens_if_steps_differ_and_smoothed_alike(tmp_path):
    """The loss of the long run is not averaged over more steps than that of the short run."""
    spikes = tuple(4.0 - step / 100 + step % 2 for step in range(200))
    runs = [trained(tmp_path / "long", spikes)]
    runs.append(trained(tmp_path / "short", spikes[:20], "batch.tokens=8192"))
    long, short = curves_figure(compare(runs)).data[:2]
    assert long.y[:20].tolist() == short.y.tolist()
    assert (long.x[0], short.x[0]) == (4096, 8192)


@given(
    losses=st.lists(st.floats(-1e3, 1e3) | st.just(float("nan")), min_size=1, max_size=50),
    half=st.integers(0, 30),
)
def test_the_moving_mean_covers_the_finite_values_of_its_window(losses, half):
    values = np.array(losses, dtype=np.float64)
    means = moving_mean(values, 2 * half + 1)
    for i in range(len(values)):
        around = values[max(0, i - half) : i + half + 1]
        around = around[np.isfinite(around)]
        if len(around):
            assert means[i] == pytest.approx(around.mean(), abs=1e-8)
        else:
            assert np.isnan(means[i])


@given(steps=st.integers(60, 400), fall=st.floats(1.1, 20.0))
def test_first_points_do_not_flatten_the_rest(steps, fall):
    """The loss of the first step is higher than the other losses, which fall from 3 to 2."""
    losses = np.concatenate([[3.0 + fall], np.linspace(3, 2, steps)])
    low, high = range_after_the_fall([losses])
    assert low < 2.0 and high < 3.2
