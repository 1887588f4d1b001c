"""The report as a page: what stands in it as text, what is drawn, and what may be in the way."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from pretrain.compare.comparison import RunComparison
from pretrain.compare.page import (
    PROCESS,
    REST,
    UNUSED,
    axes_of,
    code,
    curves_figure,
    ends_figure,
    heat_figure,
    heat_maps,
    memory_parts,
    pictures,
    render,
    short_name,
    step_time,
    what_differs,
)
from pretrain.metrics.run_record import RunRecord, read_run
from pretrain.precision.settings import PRECISIONS
from tests.pretrain.compare.made_runs import make_run, trained

LONG = [3.0 - 0.001 * step for step in range(100)]
SCHEDULE = "precision=[{until: 0.5, use: nvfp4}, {use: bf16}]"


def text_of(page: bytes) -> str:
    """Without script and style."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", page.decode(), flags=re.S)


def two_runs(folder: Path) -> list[RunRecord]:
    return [trained(folder / "a", LONG), trained(folder / "b", [loss + 0.5 for loss in LONG], "precision=delayed")]


def test_the_page_asks_the_network_for_nothing_and_has_all_as_text(tmp_path):
    page = text_of(render(RunComparison.over(two_runs(tmp_path))))
    assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", page)
    assert "above: b" in page and "+0.50000" in page and "10,240" in page and "<code>precision</code>" in page
    for heading in ("Against a", "Where the runs end", "All figures", "Curves", "Memory", "Audit", "What differed"):
        assert f"<h2>{heading}</h2>" in page
    assert "http-equiv" not in page and 'content="7"' in text_of(render(RunComparison.over(two_runs(tmp_path / "x")), every=7))


def test_a_gate_is_told_in_the_page(tmp_path):
    comparison = RunComparison.over(two_runs(tmp_path), 0.6)
    assert "0.6 nats: passed</p>" in text_of(render(comparison, failures=[]))
    assert "b ends +0.5</p>" in text_of(render(comparison, failures=["b ends +0.5"]))


def test_code_in_a_message_is_marked_as_such_and_all_else_is_text():
    assert code("`a.b`: 1 < 2 & `c") == "<code>a.b</code>: 1 &lt; 2 &amp; `c"


def test_names_from_a_run_are_text_in_the_page_and_no_markup(tmp_path):
    name = "<img onerror=alert(1)>&amp;"
    runs = [trained(tmp_path / name), trained(tmp_path / "c", (4.0, 3.0), audit={"effective": "</script><script>alert(1)"})]
    page = render(RunComparison.over(runs)).decode()
    assert "<script>alert" not in page and "<img onerror" not in page and "&lt;img onerror=alert(1)&gt;&amp;amp;" in page
    drawn = [trace.name for trace in curves_figure(RunComparison.over(runs)).data]
    assert not any("<" in each for each in drawn), "plotly reads some HTML in names"


def test_no_two_precisions_look_alike_to_who_sees_no_green_and_all_show_on_white():
    """CIE L*a*b* of what deuteranopia leaves of each (Machado 2009), and the contrast with white."""
    deuteranopia = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    seen = {}
    for name, precision in PRECISIONS.items():
        srgb = np.array([int(precision.colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
        assert 1.05 / (to_xyz[1] @ linear + 0.05) > 2.5, name
        x, y, z = np.cbrt(to_xyz @ np.clip(deuteranopia @ linear, 0, 1) / [0.9505, 1, 1.089])
        seen[name] = np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
    assert min(np.linalg.norm(seen[a] - seen[b]) for a, b in combinations(seen, 2)) > 10


def test_what_is_drawn_are_the_runs_own_figures_on_one_axis(tmp_path):
    comparison = RunComparison.over(two_runs(tmp_path))
    figure = curves_figure(comparison)
    minus = [trace for trace in figure.data if trace.legendgroup == "b" and trace.y[0] == pytest.approx(0.5)]
    assert len(minus) == 1 and minus[0].x.tolist() == list(range(1, 101))
    assert {button.label for button in figure.layout.updatemenus[0].buttons} == {"steps", "tokens", "hours"}
    assert sum(each.showlegend for each in figure.data) == 2, "each run once, for all of its curves"
    end = ends_figure(comparison).data[0]
    gap = comparison.standings[1].gap
    assert list(end.x) == [gap.mean] and list(end.error_x.array) == [gap.half_width]


def test_a_run_before_its_first_step_stands_there_on_every_axis_and_shared_hours_are_none(tmp_path):
    axes = axes_of(trained(tmp_path / "run", (4.0, 3.0)))
    assert [axes[name][1].tolist() for name in ("steps", "tokens")] == [[0, 1, 2], [0, 4096, 8192]]
    assert axes["hours"][1] == pytest.approx([0, 0.1 / 3600, 0.2 / 3600])
    assert "hours" not in axes_of(trained(tmp_path / "shared", side_by_side=True))


ODD = {
    "one step": [3.0],
    "no finite loss": [None, None, None],
    "a flat line": [2.0] * 300,
    "a gap": [11.0, None, *(8 - 0.01 * step for step in range(300))],
    "lost at its end": [3.0, 2.0, None],
}


@pytest.mark.parametrize("losses", ODD.values(), ids=ODD)
def test_any_run_has_a_page_alone_beside_another_and_beside_one_over_other_text(losses, tmp_path):
    run = trained(tmp_path / "run", losses, held_out=len(losses) > 1)
    other, text = trained(tmp_path / "other", (4.0, 3.0, 2.0)), trained(tmp_path / "text", losses, fingerprint="cd34")
    for runs in ([run], [run, other], [other, run, text]):
        assert b"</html>" in render(RunComparison.over(runs))


def test_heat_maps_hold_each_layers_share_at_its_step_and_scales_as_powers_of_two(tmp_path):
    operand = {"layer": "model.layers.3.self_attn.q_proj", "operand": "input", "amax": 4.0, "scale": 0.5, "saturation": 0.0}
    lines = [{"step": 1, "operands": [operand | {"underflow": 0.25}]}]
    lines.append({"step": 9, "operands": [operand | {"underflow": 0.5, "scale": None}]})
    run = make_run(tmp_path / "run")
    path = run / "fp8_statistics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 10, "oper')
    maps = heat_maps(path)
    assert maps["underflow", "input"]["steps"] == [1, 9] and maps["underflow", "input"]["layers"] == ["3 q_proj"]
    assert maps["underflow", "input"]["values"].tolist() == [[0.25, 0.5]]
    np.testing.assert_equal(maps["scale", "input"]["values"], [[-1.0, np.nan]])
    assert heat_maps(tmp_path / "none") is None and short_name("transformer.h.11.attn.c_attn") == "11 c_attn"
    figure = heat_figure({"run": maps})
    assert [trace.visible for trace in figure.data] == [True, False, False, False] and len(
        figure.layout.updatemenus[0].buttons
    ) == 4
    assert "quantization" in pictures(RunComparison.over([read_run(run)]))


def test_of_a_steps_time_the_wait_for_data_stands_apart(tmp_path):
    assert step_time(trained(tmp_path / "run")) == {"computing": 99.0, "waiting for data": 1.0}


def test_memory_by_part_tells_what_was_measured_from_what_was_planned(tmp_path):
    gib = 2**30
    held = {"weights": 2 * gib, "moments": 4 * gib}
    planned = {"parameters": 2 * gib, "optimizer moments": 4 * gib, "the loss": gib}
    run = trained(tmp_path / "run", audit={"memory": {"microbatch": 2, "planned": planned, "held": held}})
    assert memory_parts(run)["measured"] == {PROCESS: 0.5}, "on a CPU"
    for record in run.metrics:
        record["memory_reserved_gib"] = 9.0
    run.summary["memory_gib"] = 8.5
    assert memory_parts(run)["measured"] == {"weights": 2.0, "moments": 4.0, REST: 2.5, UNUSED: 0.5}
    assert memory_parts(run)["planned"] == {"weights": 2.0, "moments": 4.0, "the loss": 1.0}


def test_an_audit_of_several_phases_stands_there_by_its_steps_with_what_computed_each(tmp_path):
    low = {"precision": "nvfp4", "effective": "delayed", "computed_by": "emulation", "reason": "no FP4 here"}
    low["products"] = [{"effective": "delayed", "products": {"forward": "E4M3 x E4M3"}}] * 3 + [
        {"effective": "bf16", "reason": "head"}
    ]
    high = {"precision": "bf16", "effective": "bf16", "computed_by": "torch 9"}
    audit = high | {"weights": "fp32", "precisions": {"delayed": low, "bf16": high}, "phases": {"1": "delayed", "3": "bf16"}}
    audit["parity"] = {"left_out": "it was not asked for"}
    run = trained(tmp_path / "run", (4.0, 3.0, 2.5, 2.25), SCHEDULE, audit=audit)
    page = text_of(render(RunComparison.over([run])))
    assert "run, from step 1: delayed, nvfp4 asked for · emulation" in page and "run, from step 3: bf16 · torch 9" in page
    assert "3 delayed: forward E4M3 x E4M3; 1 bf16 (head)" in page and "left out: it was not asked for" in page


def test_what_differed_has_each_value_and_the_runs_that_have_it(tmp_path):
    runs = two_runs(tmp_path)
    runs.append(trained(tmp_path / "c", LONG, "weights=bf16"))
    runs[2].environment["git"] = {"commit": "ab" * 20}
    differing = what_differs(RunComparison.over(runs))
    assert differing["Settings"]["precision"] == {"bf16": "a, c", "delayed": "b"}
    assert differing["Settings"]["weights"] == {"fp32": "a, b", "bf16": "c"} and "name" not in differing["Settings"]
    assert differing["Code"] == {"git.commit": {"None": "a, b", "ababababab": "c"}} and not differing["Environment"]
