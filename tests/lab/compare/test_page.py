"""The report's page with its pictures."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from lab.compare.comparison import compare
from lab.compare.figures import moving_mean, range_after_the_fall
from lab.compare.page import (
    WRITTEN_BY,
    check_replaceable,
    curves_figure,
    differing_values,
)
from lab.compare.report import Report
from pretrain.metrics.run_record import RunRecord
from tests.lab.made_runs import trained

LONG = [3.0 - 0.001 * step for step in range(100)]
LOSSES = {
    "one step": [3.0],
    "no finite loss": [None, None, None],
    "a flat line": [2.0] * 300,
    "a gap": [11.0, None, *np.linspace(8, 2, 500).tolist()],
    "lost at its end": [3.0, 2.0, None],
}
SCHEDULE = "precision=[{until: 0.5, use: nvfp4}, {use: bf16}]"


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


def page_of(runs: list[RunRecord], folder: Path, *vary: str) -> str:
    """Return the page without scripts and styles."""
    Report.over(runs, vary).write(folder / "page.html")
    return re.sub(r"<(script|style)\b.*?</\1>", "", (folder / "page.html").read_text(), flags=re.S)


def two_runs(folder: Path) -> list[RunRecord]:
    return [
        trained(folder / "a", LONG),
        trained(folder / "b", [loss + 0.5 for loss in LONG], "precision=delayed"),
    ]


def test_the_page_needs_no_network_and_has_all_results_as_text(tmp_path):
    page = page_of(two_runs(tmp_path), tmp_path)
    assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", page)
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == ["Over seeds", "All figures", "Curves", "Audit", "What differed"]
    for text in ("b (+0.0000 over 1 seed, no verdict", "+0.50000", "10,240", "settings.precision"):
        assert text in page


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


def test_curves_are_drawn_by_step_or_by_tokens_if_steps_differ(tmp_path):
    runs = two_runs(tmp_path)
    figure = curves_figure(Report.over(runs).compared_runs)
    minus = [
        trace
        for trace in figure.data
        if trace.legendgroup == "b" and len(trace.y) and trace.y[0] == pytest.approx(0.5)
    ]
    assert len(minus) == 1 and minus[0].x.tolist() == list(range(1, 101))
    assert sum(trace.showlegend for trace in figure.data) == 2, "one entry for each run"
    larger = trained(tmp_path / "larger", LONG, "batch.tokens=8192")
    figure = curves_figure(Report.over([runs[0], larger], ["batch.tokens"]).compared_runs)
    assert [trace.x[0] for trace in figure.data[:2]] == [4096, 8192]


def test_any_run_has_a_page(tmp_path):
    runs = [trained(tmp_path / "other", (4.0, 3.0, 2.0))]
    for name, losses in LOSSES.items():
        path = tmp_path / f"cost $2^4$ and $x {name}"
        runs.append(trained(path, losses, "precision=nvfp4", held_out=len(losses) > 1))
        assert curves_figure(compare(runs[-1:])).data
        runs.append(trained(tmp_path / f"t {name}", losses, fingerprint="cd"))
    assert "</html>" in page_of(runs, tmp_path, "data")


def test_an_audit_of_several_phases_shows_precisions_and_engines(tmp_path):
    def product(effective: str, backend: str, reason: str = "") -> dict[str, str]:
        return {"effective": effective, "backend": backend, "stored": "float32", "reason": reason}

    low = {"precision": "nvfp4", "effective": "delayed", "computed_by": "emulation", "reason": "x"}
    low["products"] = [product("delayed", "emulation")] * 3 + [product("bf16", "torch", "head")]
    high = {"precision": "bf16", "effective": "bf16", "computed_by": "torch 9"}
    high["products"] = [product("bf16", "torch")] * 5
    both = {"precisions": {"delayed": low, "bf16": high}, "phases": {"1": "delayed", "3": "bf16"}}
    audit = high | {"weights": "fp32"} | both
    page = page_of([trained(tmp_path / "run", (4.0, 3.0), SCHEDULE, audit=audit)], tmp_path)
    assert "delayed: 3 in delayed on emulation, weights float32" in page
    assert "delayed: 1 in bf16 on torch, weights float32 (head)" in page
    assert "bf16: 5 in bf16 on torch, weights float32" in page


def test_differing_settings_have_each_value_with_its_runs(tmp_path):
    runs = two_runs(tmp_path)
    runs.append(trained(tmp_path / "c", LONG, "weights=bf16", SCHEDULE))
    runs[2].environment["git"] = {"commit": "ab" * 20}
    differing = differing_values(Report.over(runs).compared_runs)
    assert differing["settings.precision"] == {
        "bf16": "a",
        "delayed": "b",
        "nvfp4 to 50 %, then bf16": "c",
    }
    assert differing["settings.weights"] == {"fp32": "a, b", "bf16": "c"}
    assert "settings.name" not in differing
    assert differing["environment.git.commit"] == {"not set": "a, b", "ababababab": "c"}


def test_options_that_one_precision_lacks_are_no_difference(tmp_path):
    settings = ((), ("precision=delayed",), ("precision=delayed", "fp8_config.fp8_format=HYBRID"))
    runs = [trained(tmp_path / f"{i}", (4.0, 3.0), *text) for i, text in enumerate(settings)]
    option = "settings.fp8_config.fp8_format"
    assert option not in differing_values(Report.over(runs[:2]).compared_runs)
    formats = differing_values(Report.over(runs[1:]).compared_runs)[option]
    assert formats == {"not set": "1", "HYBRID": "2"}


def test_runs_of_different_lengths_are_smoothed_alike(tmp_path):
    """The loss of the long run is not averaged over more steps than that of the short run."""
    spikes = tuple(4.0 - step / 100 + step % 2 for step in range(200))
    runs = [trained(tmp_path / "long", spikes), trained(tmp_path / "short", spikes[:20])]
    long, short = curves_figure(compare(runs)).data[:2]
    assert long.y[:20].tolist() == short.y.tolist()


def test_axes_have_units_and_shares_are_percentages(tmp_path):
    figure = curves_figure(Report.over(two_runs(tmp_path)).compared_runs)
    titles = [annotation.text for annotation in figure.layout.annotations]
    axes = [axis for axis in figure.select_yaxes()]
    units = dict(zip(titles, [axis.title.text for axis in axes], strict=True))
    assert units["training loss"] == units["held-out loss"] == "nats per token"
    assert units["training loss minus the baseline's"] == "nats per token"
    assert units["frozen updates"] == "share of the parameters"
    frozen = figure.data[-2:]
    assert all(trace.y.tolist() == pytest.approx([0.0125] * 100) for trace in frozen)
    assert axes[-1].tickformat == ".2~%"
    assert {axis.exponentformat for axis in axes} == {"e"}, "no SI prefixes of shares"


def test_only_an_empty_file_and_a_report_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "report").write_bytes(b"x" * 10**6 + WRITTEN_BY.encode())
    (tmp_path / "thesis").write_bytes(b"years of work")
    for name in ("absent", "empty", "report"):
        check_replaceable(tmp_path / name)
    for name in ("thesis", "."):
        with pytest.raises(InputError, match=f"--out {tmp_path / name}"):
            check_replaceable(tmp_path / name)
