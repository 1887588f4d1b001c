"""The report as a page: what stands in it as text, what its script is given to draw, and what may be in the way."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundation.errors import InputError
from pretrain.compare.comparison import RunComparison
from pretrain.compare.kept_runs import read_kept
from pretrain.compare.page import code, render
from pretrain.compare.page_data import PROCESS, REST, UNUSED, heat_maps, memory_parts, page_data, short_name, step_time
from pretrain.compare.page_differences import audits
from pretrain.compare.page_table import columns_of
from pretrain.compare.report import read_runs, write
from pretrain.metrics import profile
from pretrain.metrics.run_record import RunRecord, read_run
from pretrain.precision.settings import PRECISIONS
from tests.pretrain.compare.made_runs import make_run, trained

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "benchmarks/results/loss/h200_comparison.json"
THROUGHPUT = ROOT / "benchmarks/results/speed/h200_throughput.json"
LONG = [3.0 - 0.001 * step for step in range(100)]


def carried(page: bytes) -> dict[str, Any]:
    """What the page's script unpacks."""
    packed = re.search(rb'id="data">([^<]+)<', page)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def text_of(page: bytes) -> str:
    """Without script, style and what is packed."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", page.decode(), flags=re.S)


def two_runs(folder: Path) -> list[Any]:
    return [trained(folder / "a", LONG), trained(folder / "b", [loss + 0.5 for loss in LONG], "precision=delayed")]


def test_the_page_asks_the_network_for_nothing(tmp_path):
    page = text_of(render(RunComparison.over(two_runs(tmp_path))))
    assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", page)
    assert "import " not in page and len(re.findall("<section", page)) >= 6


def test_the_answer_and_the_table_stand_in_the_page_as_text(tmp_path):
    page = text_of(render(RunComparison.over(two_runs(tmp_path))))
    assert 'class="answer">No run is both faster than a and within 0.01 nats of it.' in page
    assert "+0.5000" in page and "10,240" in page and "loss − baseline, last 64" in page
    assert "<code>precision</code>" in page and "Pareto front" in page


def test_a_difference_and_its_error_have_as_many_decimals(tmp_path):
    above = np.random.default_rng(0).normal(3e-4, 1e-4, len(LONG))
    runs = [*two_runs(tmp_path), trained(tmp_path / "c", [float(loss) for loss in LONG + above])]
    shown = re.search(r"\+0\.000(\d+) <span class=\"beside\">± 0\.(\d+)<", text_of(render(RunComparison.over(runs))))
    assert shown and 3 + len(shown[1]) == len(shown[2]) == 5


def test_what_a_column_says_and_what_each_picture_shows_can_be_read_without_a_pointer(tmp_path):
    page = text_of(render(RunComparison.over(two_runs(tmp_path))))
    for column in columns_of(RunComparison.over(two_runs(tmp_path / "more"))):
        assert f"<dt>{column.name}</dt><dd>" in page
    plots = re.findall(r'<div class="plot"[^>]*>', page)
    assert len(plots) >= 6 and all('role="img"' in plot and re.search(r'aria-label="\w[^"]+\."', plot) for plot in plots)


def test_code_in_a_message_is_marked_as_such_and_all_else_is_text():
    assert code("`a.b`: 1 < 2 & `c") == "<code>a.b</code>: 1 &lt; 2 &amp; `c"


def test_no_two_precisions_look_alike_to_who_sees_no_green_and_all_show_on_both_themes():
    """CIE L*a*b* of what deuteranopia leaves of each (Machado 2009), and the contrast with the dark card and the white one."""
    deuteranopia = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    seen = {}
    for name, precision in PRECISIONS.items():
        srgb = np.array([int(precision.colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
        luminance = to_xyz[1] @ linear
        assert 1.05 / (luminance + 0.05) > 2.5 and (luminance + 0.05) / 0.064 > 2.9, name
        x, y, z = np.cbrt(to_xyz @ np.clip(deuteranopia @ linear, 0, 1) / [0.9505, 1, 1.089])
        seen[name] = np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
    assert min(np.linalg.norm(seen[a] - seen[b]) for a, b in combinations(seen, 2)) > 10


def test_names_from_a_run_are_text_in_the_page_and_no_markup(tmp_path):
    runs = [trained(tmp_path / "<b>&amp;"), trained(tmp_path / "c", (4.0, 3.0), audit={"effective": "<script>alert(1)</script>"})]
    page = render(RunComparison.over(runs)).decode()
    assert "<script>alert" not in page and "&lt;b&gt;&amp;amp;" in page


def test_an_audit_says_what_came_of_each_kernel_and_of_parity(tmp_path):
    found = json.loads(THROUGHPUT.read_text())["ways"]["delayed_exact"]["audit"]
    told = [{"source": "this run", "failures": [], "plain": {}}, {"source": "this run", "failures": ["the loss", "a gradient"]}]
    told.append({"failures": [], "loss": 1.0})  # as it was before there were sources
    others = [trained(tmp_path / str(number), audit=found | {"parity": each}) for number, each in enumerate(told)]
    runs = [trained(tmp_path / "h200", audit=found), *others, trained(tmp_path / "older", audit=found | {"kernels": ["norm"]})]
    (left_out, *told, older), attention = [each.rows for each in audits(RunComparison.over(runs))], found["kernels"][0]
    assert left_out["kernels"].startswith(f"attention packed_fa4: {attention['said']}; products: agrees with emulated products: ")
    assert left_out["kernels"].count(": agrees with ") == len(found["kernels"]) and "{" not in left_out["kernels"]
    assert left_out["parity"] == "left out: it would cost 9% of this short run; `parity=on` checks it all the same"
    assert [each["parity"] for each in told] == ["passed, this run", "the loss; a gradient, this run", "passed"]
    assert older["kernels"] == "norm"


def test_what_is_drawn_are_the_runs_own_figures(tmp_path):
    runs = two_runs(tmp_path)
    data = carried(render(RunComparison.over(runs)))
    first, second = data["runs"]
    assert first["steps"] == list(range(1, 101)) and first["tokens"][-1] == 409_600
    assert first["hours"][-1] == pytest.approx(100 * 0.1 / 3600)
    assert first["curves"]["loss"] == pytest.approx(LONG) and first["baseline"] and not first["minus"]["at"]
    assert second["minus"]["loss"] == pytest.approx([0.5] * 100) and second["gap"] == pytest.approx(0.5)
    assert data["axes"] == {"steps": True, "tokens": True, "hours": True}


def test_an_evaluation_from_before_the_first_step_stands_there_on_every_axis(tmp_path):
    def evaluated(first: int, before: float, *settings: str) -> RunRecord:
        path = make_run(tmp_path / f"from{first}", (4.0, 3.0, 2.0), *settings)
        ended = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        moved = [each | {"step": each["step"] + first, "tokens": each.get("tokens", 0) + 4096 * first} for each in ended]
        began = {"step": first, "event": "evaluation", "held_out_loss": before, "held_out_perplexity": 9.0}
        (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (began, *moved)))
        return read_run(path)

    runs = [evaluated(0, 6.5), evaluated(5, 6.0, "train.begin_with=runs/x/checkpoints/step-00000005", "train.steps=8")]
    drawn = [run["heldOut"] for run in page_data(RunComparison.over(runs))["runs"]]
    assert drawn[0] == {"steps": [0, 3], "tokens": [0, 12_288], "hours": [0, pytest.approx(0.3 / 3600)], "loss": [6.5, 2.4]}
    assert [drawn[1][axis] for axis in ("steps", "tokens")] == [[5, 8], [5 * 4096, 8 * 4096]] and drawn[1]["hours"][0] == 0

    if shutil.which("node") is None:
        pytest.skip("needs node, to run what the page's script shows of it")
    page = (ROOT / "pretrain/compare/page/page.js").read_text()
    whole = re.search(r"^function whole\(\) \{.*?^\}", page, flags=re.M | re.S)[0]
    given = f"const state = {{}}, data = {json.dumps(page_data(RunComparison.over(runs)))};"
    script = f"{given} {whole}; console.log(JSON.stringify(Object.keys(data.axes).map((axis) => (state.axis = axis, whole()))));"
    ranges = json.loads(subprocess.run(["node", "-e", script], capture_output=True, check=True).stdout)
    assert len(ranges) == 3 and all(low < 0 < high for low, high in ranges)


def test_a_loss_that_is_no_number_is_a_gap_and_hours_that_were_shared_are_no_axis(tmp_path):
    data = page_data(RunComparison.over([trained(tmp_path / "a", [3.0, None, 2.0], side_by_side=True)]))
    assert data["runs"][0]["curves"]["loss"] == [3.0, None, 2.0] and data["axes"]["hours"] is False
    assert data["runs"][0]["speed"] is None


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
        comparison = RunComparison.over(runs)
        assert carried(render(comparison))["runs"][0]["steps"] and comparison.answer()
        lost = [each.look.label for each in comparison.standings if losses[-1] is None and each.run is not other]
        assert len(runs) == 1 or (f"The loss of {', '.join(lost)} ends as no number." in comparison.answer()) == bool(lost)


def test_heat_maps_hold_each_layers_share_at_its_step_and_scales_as_powers_of_two(tmp_path):
    name = "model.layers.3.self_attn.q_proj"
    operands = [{"layer": name, "operand": "input", "amax": 4.0, "scale": 0.5, "underflow": 0.25, "saturation": 0.0}]
    lines = [{"step": 1, "operands": operands}, {"step": 9, "operands": [operands[0] | {"scale": None, "underflow": 0.5}]}]
    path = tmp_path / "fp8_statistics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 10, "oper')
    heat = heat_maps(path)
    assert heat["steps"] == [1, 9] and heat["layers"] == ["3 q_proj"]
    assert heat["values"]["underflow"]["input"] == [[0.25, 0.5]] and heat["values"]["scale"]["input"] == [[-1.0, None]]
    assert heat_maps(tmp_path / "none") is None
    odd = [
        '{"step": 3}',
        "[]",
        '{"step": 3, "operands": 3}',
        '{"step": 3, "operands": [true]}',
        '{"step": 3, "operands": [{"scale": -1}]}',
        "\xff",
    ]
    path.write_bytes("\n".join([*odd, json.dumps(lines[0]), ""]).encode("latin-1"))
    assert heat_maps(path)["steps"] == [1]
    assert [short_name(each) for each in ("lm_head", "transformer.h.11.attn.c_attn")] == ["lm_head", "11 c_attn"]


def test_a_profile_says_where_a_steps_time_goes_and_without_one_the_wait_is_known(tmp_path):
    run = trained(tmp_path / "run")
    assert step_time(run) == {"source": "median", "parts": {"computing": 99.0, "waiting for data": 1.0}}
    seconds = {"products of the layers": 0.0125, "attention": 0.001}
    (run.path / "profile.md").write_text(profile.render(seconds, 0.02, 0.0005))
    parts = step_time(run)["parts"]
    assert step_time(run)["source"] == "profile" and "the step" not in parts
    assert parts["products of the layers"] == 12.5 and parts["attention"] == 1.0 and parts["waiting for data"] == 0.5
    assert sum(parts.values()) == pytest.approx(20.0)


def test_memory_by_part_tells_what_was_measured_from_what_was_planned(tmp_path):
    gib = 2**30
    held, planned = (
        {"weights": 2 * gib, "moments": 4 * gib},
        {"parameters": 2 * gib, "optimizer moments": 4 * gib, "the loss": gib},
    )
    run = trained(tmp_path / "run", audit={"memory": {"microbatch": 2, "planned": planned, "held": held}})
    assert memory_parts(run)["measured"] == {PROCESS: 0.5}, "on a CPU"
    for record in run.metrics:
        record["memory_reserved_gib"] = 9.0
    run.summary["memory_gib"] = 8.5
    found = memory_parts(run)
    assert (
        found["measured"] == {"weights": 2.0, "moments": 4.0, REST: 2.5, UNUSED: 0.5} and sum(found["measured"].values()) == 9.0
    )
    assert found["planned"] == {"weights": 2.0, "moments": 4.0, "the loss": 1.0}
    assert memory_parts(trained(tmp_path / "older")) is None
    assert "as the plan had reckoned it before" in text_of(render(RunComparison.over([run])))


def test_runs_kept_in_a_result_file_are_compared_as_runs_are():
    runs = read_runs([KEPT], Path("bf16-fp32"))
    assert len(runs) == 18 and runs[0].name == "bf16-fp32" and runs[0].side_by_side
    comparison = RunComparison.over(runs)
    exact = next(each for each in comparison.standings if each.look.label == "delayed-bf16_exact")
    assert exact.gap.steps == 64 and exact.gap.has_interval
    assert exact.held_out_gap == pytest.approx(0.0002, abs=5e-5) and exact.speed is None
    data = page_data(comparison)
    assert data["axes"] == {"steps": True, "tokens": True, "hours": False}
    assert "rate" not in data["runs"][0]["curves"], "it was not kept, and is not made up"


def test_a_kept_run_that_a_matrix_named_is_compared_too(tmp_path):
    content = json.loads(KEPT.read_text())
    names = ("bf16-fp32", "delayed-bf16_exact-linear+head", "=odd")
    content["runs"] = dict(zip(names, content["runs"].values(), strict=False))
    (tmp_path / "kept.json").write_text(json.dumps(content))
    comparison = RunComparison.over(read_kept(tmp_path / "kept.json"))
    assert tuple(each.run.name for each in comparison.standings) == names and comparison.answer()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"runs": {}}', "holds no runs with losses"),
        ('{"runs": {"a": {"losses": [1]}}}', "not as `benchmarks.collect_runs` makes it, at 'settings'"),
    ],
)
def test_a_file_that_holds_no_kept_runs_is_refused(content, says, tmp_path):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InputError, match=rf"x\.json: {says}"):
        read_kept(tmp_path / "x.json")


SCHEDULE = "precision=[{until: 2, use: nvfp4}, {use: bf16}]"
LOW = {"precision": "nvfp4", "effective": "delayed", "reason": "no FP4 here", "computed_by": "emulation", "confirmed_in_step": 1}
HIGH = {"precision": "bf16", "effective": "bf16", "reason": None, "computed_by": "torch 9", "products": []}
LAST = HIGH | {"weights": "fp32", "schedule": "delayed to step 2, then bf16", "precisions": {"delayed": LOW, "bf16": HIGH}}


def test_a_run_of_several_phases_has_the_audit_of_each_by_its_steps(tmp_path):
    run = trained(tmp_path / "run", (4.0, 3.0, 2.5, 2.25), SCHEDULE, audit=LAST | {"phases": {"1": "delayed", "3": "bf16"}})
    low, high = audits(RunComparison.over([run]))
    assert (low.label, low.asked, low.ran, low.by) == ("run, steps 1 to 2", "nvfp4", "delayed", "emulation")
    assert low.rows == {"why": "no FP4 here", "weights": "fp32", "confirmed in step": "1"}
    assert (high.label, high.asked, high.ran, high.by) == ("run, steps 3 to 4", "bf16", "bf16", "torch 9")
    assert high.rows == {"weights": "fp32"}, "nothing of the phase before"
    page = text_of(render(RunComparison.over([run, trained(tmp_path / "b")])))
    assert "run, steps 1 to 2: nvfp4 asked for, <b>delayed</b>" in page and "run, steps 3 to 4: <b>bf16</b>" in page


def test_an_audit_shows_every_kind_of_linears_though_there_are_as_many_of_two(tmp_path):
    products = [
        {"effective": name, "reason": why} for name, why in (("mxfp8", None), ("bf16", "the first layer"), ("bf16", "head"))
    ]
    run = trained(tmp_path / "run", audit=HIGH | {"products": [*products, products[0]]})
    (shown,) = audits(RunComparison.over([run]))
    assert shown.rows == {"2 linears": "mxfp8", "1 linears": "bf16 (the first layer); and as many: bf16 (head)"}


def test_a_precision_that_comes_twice_is_confirmed_in_the_phase_of_its_step_alone(tmp_path):
    found = LAST | {"phases": {"1": "bf16", "2": "delayed", "3": "bf16", "4": "delayed"}}
    found["precisions"] = {"delayed": LOW | {"confirmed_in_step": 4}, "bf16": HIGH}
    shown = audits(RunComparison.over([trained(tmp_path / "run", (4.0, 3.0, 2.5, 2.25, 2.0), SCHEDULE, audit=found)]))
    assert [each.label for each in shown] == ["run, step 1", "run, step 2", "run, step 3", "run, steps 4 to 5"]
    assert [each.rows.get("confirmed in step") for each in shown] == [None, None, None, "4"]


def test_audits_of_phases_to_come_lost_or_of_older_versions_are_shown_as_far_as_known(tmp_path):
    def shown(name: str, audit: dict[str, Any], losses: tuple[float, ...] = (4.0, 3.0, 2.5, 2.25)) -> list[tuple[Any, ...]]:
        found = audits(RunComparison.over([trained(tmp_path / name, losses, SCHEDULE, audit=audit)]))
        return [(each.label, each.asked, each.ran) for each in found]

    to_come = LAST | {"phases": {"1": "delayed", "3": "bf16"}}
    assert shown("begun", to_come, (4.0,)) == [("begun, step 1", "nvfp4", "delayed")]
    assert shown("older", LAST) == [("older", "nvfp4", "delayed"), ("older", "bf16", "bf16")]
    lost = to_come | {"precisions": {"bf16": HIGH}}
    assert shown("lost", lost) == [("lost, steps 1 to 2", "delayed", "delayed"), ("lost, steps 3 to 4", "bf16", "bf16")]
    little = LAST | {"precisions": {"delayed": {"backend": "emulation"}, "bf16": {"backend": "torch"}}}
    low, high = audits(RunComparison.over([trained(tmp_path / "little", (4.0, 3.0), SCHEDULE, audit=little)]))
    assert (low.ran, low.by, high.ran, high.by) == ("delayed", "emulation", "bf16", "torch 9"), "of neither what the other has"
    assert "confirmed in step" not in low.rows | high.rows and low.rows.keys() == {"weights"}
    alone = HIGH | {"precision": "nvfp4"}  # both phases fell back to one precision
    assert shown("alone", alone) == [("alone", "nvfp4 to step 2, then bf16", "bf16")]


def test_a_bar_in_the_name_of_a_run_leaves_the_tables_whole(tmp_path):
    runs = [make_run(tmp_path / name, LONG) for name in ("a", "b|c")]
    out = write(runs, out=tmp_path / "x.png")
    table = [line for line in out.splitlines() if line.startswith("|")][:4]
    assert "b\\|c" in table[-1] and len({line.replace("\\|", "").count("|") for line in table}) == 1


def test_the_script_sets_no_markup_but_swatches_of_its_own():
    """Names come from files of runs, which may be another's; test_page_in_a_browser.py tries some."""
    script = (ROOT / "pretrain/compare/page/page.js").read_text()
    assert set(re.findall(r"innerHTML = (.*?);", script)) == {"swatch(runOf(place))", "sign"}
    assert not re.search(r"outerHTML|insertAdjacentHTML|document\.write", script)
