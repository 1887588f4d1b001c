"""The page opened in Chromium: wide and narrow, light and dark; and that sorting, hovering, hiding and the axis switch work.

Skipped where the machine has no `chromium` or Python has no playwright, and the reason says which.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pretrain.compare.comparison import RunComparison
from pretrain.compare.page import render
from pretrain.metrics.run_record import read_run
from tests.pretrain.compare.made_runs import make_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -r requirements-dev.txt")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine: apt-get install chromium")

STEPS = 120
PLOTS = ["speed", "ends", "loss", "held-out", "minus", "norm", "rate", "frozen", "heat", "time", "memory"]
RUNS = {"base": (0.0, []), "exact": (0.01, ["weights=bf16_exact"]), "low": (0.5, ["precision=delayed"])}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of three runs, one of them emulated, with quantization statistics and an evaluation on the way."""
    folder, runs = tmp_path_factory.mktemp("runs"), []
    for name, (above, settings) in RUNS.items():
        losses = [5.0 - 0.01 * step + above for step in range(STEPS)]
        memory = {"microbatch": 1, "planned": {"parameters": 2**28, "the loss": 2**27}, "held": {"weights": 2**28}}
        audit = {"backend": "emulation" if name == "low" else "torch"} | ({"memory": memory} if name == "exact" else {})
        path = make_run(folder / name, losses, *settings, audit=audit)
        halfway = {"step": 60, "event": "evaluation", "held_out_loss": 3.1 + above, "held_out_perplexity": 22.0}
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(halfway) + "\n")
        if name == "low":
            operands = [
                {"layer": f"model.layers.{layer}.mlp.up_proj", "operand": operand, "amax": 1.0, "scale": 8.0, "saturation": 0.0}
                | {"underflow": 0.01 * layer}
                for layer in range(3)
                for operand in ("input", "weight", "grad_output")
            ]
            lines = [json.dumps({"step": step, "operands": operands}) + "\n" for step in (1, 100)]
            (path / "fp8_statistics.jsonl").write_text("".join(lines))
        runs.append(read_run(path))
    page = folder / "report.html"
    page.write_bytes(render(RunComparison.over(runs), gate=True))
    return page.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@contextmanager
def opened(browser: Any, address: str, width: int, theme: str) -> Iterator[Any]:
    """The page, drawn. Nothing may go wrong in it, and nothing be asked of the network."""
    errors: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, offline=True)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.on("request", lambda asked: errors.append(asked.url) if asked.url.startswith("http") else None)
    page.goto(address)
    page.wait_for_selector("html[data-drawn]", timeout=60_000)
    yield page
    context.close()
    assert errors == []


@pytest.fixture(scope="module")
def page(browser: Any, address: str) -> Iterator[Any]:
    with opened(browser, address, 1280, "light") as page:
        yield page


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (400, "dark")])
def test_in_every_shape_all_pictures_are_drawn_and_nothing_is_wider_than_the_screen(width, theme, browser, address):
    """Each is opened in one shape and turned into another: all four in two."""
    with opened(browser, address, width, theme) as page:
        for now_wide, now_theme in ((width, theme), (1680 - width, {"light": "dark", "dark": "light"}[theme])):
            page.set_viewport_size({"width": now_wide, "height": 900})
            page.emulate_media(color_scheme=now_theme)
            page.wait_for_timeout(300)
            assert page.evaluate("document.documentElement.dataset.theme") == now_theme
            drawn = "all => all.filter(plot => plot.querySelector('.main-svg')).map(plot => plot.id)"
            assert page.eval_on_selector_all(".plot", drawn) == PLOTS
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
            cut = "all => all.filter(plot => plot.getBoundingClientRect().right > innerWidth).map(plot => plot.id)"
            assert page.eval_on_selector_all(".plot, .plot .main-svg", cut) == []


def test_a_click_on_a_columns_title_sorts_by_it_and_another_the_other_way(page):
    names = "rows => rows.map(row => row.cells[0].innerText.trim().split(' ')[0])"
    title = page.get_by_role("button", name="loss, last 50")
    title.click()
    assert page.eval_on_selector_all("#table tbody tr", names) == ["low", "exact", "base"]
    assert page.locator("#table th[aria-sort=descending]").inner_text().startswith("loss, last 50")
    title.click()
    assert page.eval_on_selector_all("#table tbody tr", names) == ["base", "exact", "low"]


def test_memory_by_part_has_a_bar_that_was_measured_and_one_that_was_planned(page):
    names = page.eval_on_selector_all("#memory .ytick text", "all => all.map(tick => tick.textContent)")
    assert names == ["base", "exact", "exact, planned", "low"]
    parts = page.locator("#memory-key span").all_text_contents()
    assert parts == ["weights", "the loss", "the process, whole", "allocated at most"]


def test_statistics_of_a_long_run_are_drawn(page):
    """More values than a browser takes as the arguments of one call."""
    page.evaluate(
        """() => {
            const heat = data.runs.find((run) => run.heat).heat;
            heat.steps = Array.from({ length: 20000 }, (_, i) => i);
            const row = heat.steps.map(() => 0.02);
            for (const measure of Object.values(heat.values)) {
                for (const operand of heat.operands) measure[operand] = measure[operand].map(() => row);
            }
            drawHeat();
        }"""
    )
    assert page.locator("#heat-note").inner_text() == "The most is 2.0 %."


def test_the_pointer_on_a_curve_shows_the_run_and_its_loss(page):
    page.locator("#minus").scroll_into_view_if_needed()
    box = page.locator("#minus .nsewdrag").bounding_box()
    shown = page.locator("#minus .hoverlayer .hovertext")
    for share in (0.05, 0.1, 0.2, 0.5):  # the line of `low` is near the top
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * share)
        page.wait_for_timeout(120)
        if shown.count():
            break
    assert "low" in shown.first.text_content() and "+0.5" in shown.first.text_content()


def test_the_axis_switch_changes_all_curves_and_a_zoom_in_one_is_a_zoom_in_all(page):
    last = "id => document.getElementById(id).data.at(-1).x.at(-1)"
    assert page.evaluate(last, "loss") == STEPS
    page.get_by_role("button", name="tokens", exact=True).click()
    assert page.evaluate(last, "loss") == page.evaluate(last, "minus") == STEPS * 4096
    page.evaluate("Plotly.relayout('loss', {'xaxis.range': [1000, 200000]})")
    page.wait_for_function("document.getElementById('norm').layout.xaxis.range[1] === 200000")


def test_a_hidden_run_and_a_chosen_theme_stay_so_when_the_page_is_read_again(page):
    page.get_by_role("button", name="exact", exact=True).click()
    assert page.eval_on_selector("#loss", "plot => plot.data.some(trace => trace.name === 'exact')") is False
    page.get_by_role("button", name="dark", exact=True).click()
    page.reload()
    page.wait_for_selector("html[data-drawn]")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.get_by_role("button", name="exact", exact=True).get_attribute("aria-pressed") == "false"


def test_points_and_lines_are_named_in_ink_and_emulated_times_are_hollow(page):
    assert page.locator("#speed-key span").all_text_contents() == [" base", " exact", " low"]
    page.evaluate("markKey('speed-key', Array.from({ length: 12 }, (_, i) => data.runs[i % 3]))")
    many = [said.strip() for said in page.locator("#speed-key span").all_text_contents()]
    assert many[:3] == ["bf16", "delayed", "weights fp32"] and len(many) == 4, "of many, colours and then shapes"
    page.evaluate("drawSpeed()")
    fills = page.evaluate("document.getElementById('time').data[0].marker.color")
    assert fills[0] == page.evaluate("data.runs[0].colour") and fills[2] == page.evaluate("ink('--card')")
    assert page.locator("#time .ytick text").last.text_content() == "low, emulated"
    inks = page.evaluate("document.getElementById('minus').layout.annotations.map(each => each.font.color)")
    assert set(inks) == {page.evaluate("ink('--ink')")}
    assert page.evaluate("['#4AA8DE', '#C99700', '#1F77B4', '#7D4BD8'].map(inkOn)") == ["#1d2125"] * 2 + ["#fff"] * 2
    assert page.evaluate("document.getElementById('cut-off').hidden") is True, "losses that fall all along"


@pytest.fixture(scope="module")
def halted(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A page of a run, its equal with a loss of 30 in the first step, a run that differs, and one that was halted at step 2."""
    folder, level = tmp_path_factory.mktemp("halted"), [3.0 + 0.01 * (step % 5) for step in range(STEPS)]
    runs = {"base": level, "equal": [30.0, *level[1:]], "above": [x + 0.02 for x in level], "broken": [30.0, 39.0]}
    for name, losses in runs.items():
        make_run(folder / name, losses, *(["weights=bf16"] if name == "broken" else []))
    metrics = folder / "broken" / "metrics.jsonl"
    first, second, *_ = map(json.loads, metrics.read_text().splitlines())
    metrics.write_text(json.dumps(first) + "\n" + json.dumps(second | {"gradient_norm": None, "halted": "no norm"}) + "\n")
    page = folder / "report.html"
    page.write_bytes(render(RunComparison.over([read_run(folder / name) for name in runs])))
    with opened(browser, page.as_uri(), 1280, "light") as page:
        yield page


def test_a_run_that_was_halted_has_no_end_and_does_not_bend_the_scale(halted):
    drawn = "id => document.getElementById(id).data.flatMap(trace => trace.y)"
    assert halted.evaluate(drawn, "ends") == ["base", "equal", "above"]
    said = halted.locator("#ends + p").inner_text()
    assert said == "Not drawn, as it came to no end: broken, halted at step 2."
    low, high = halted.evaluate("document.getElementById('minus').layout.yaxis.range")
    assert low < 0 and 0.02 < high < 0.05


def test_a_caption_says_that_losses_are_cut_off_only_where_they_are_and_that_equals_are_equal(halted):
    assert halted.locator("#cut-off").is_visible()
    halted.evaluate("state.hidden = [2]; state.smooth = false; drawCurves()")
    assert halted.locator("[data-spread=loss]").inner_text() == "The longer 2 lines are equal."
    halted.evaluate("state.hidden = [1, 3]; drawCurves()")
    assert halted.locator("#cut-off").is_hidden()


def test_markup_in_names_of_files_stays_text(browser, tmp_path):
    """Names of a run, of memory's parts and of a profile's come from a folder that may be another's."""
    markup = "<img src=x onerror=\"document.title='ran'\">"
    audit = {"backend": "torch", "memory": {"microbatch": 1, "planned": {f"planned {markup}": 2**20}, "held": {}}}
    folder = make_run(tmp_path / "<img src=x onerror=alert(1)>", audit=audit)
    (folder / "profile.md").write_text(
        f"| part of a step | ms |\n| a part {markup} | 12.5 |\n| gaps | 1.0 |\n| attention | 2.0 |\n"
    )
    address = tmp_path / "report.html"
    address.write_bytes(render(RunComparison.over([read_run(folder)])))
    with opened(browser, address.as_uri(), 1280, "light") as page:
        assert page.locator("img").count() == 0 and page.title() != "ran"
        assert markup in page.locator("#memory-key").inner_text() and markup in page.locator("#time-key").inner_text()
