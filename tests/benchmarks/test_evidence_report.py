"""The tables of docs/evidence_results.md and their picture, from result files with known differences."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from benchmarks.evidence_read import Scale, Speeds, final_loss, read_scales
from benchmarks.evidence_report import BEGIN, END, main
from foundation.errors import InputError
from pretrain.__main__ import main as pretrain
from tests.benchmarks.made_evidence import SLOPE, MadeCell, level, make_evidence, make_speeds

ROOT = Path(__file__).resolve().parents[2]
EXACT = "weights=bf16_exact"
FIVE = (0.001, 0.002, 0.003, 0.002, 0.002)  # nats above the baseline, by seed
HALF = 2.776 * math.sqrt(5e-7 / 5)  # of their interval: t of four degrees, and their variance
CELLS = {
    "bf16": MadeCell(("precision=bf16",), [0.0] * 5),
    "delayed": MadeCell(("precision=delayed",), FIVE),
    "nvfp4": MadeCell(("precision=nvfp4",), [0.1 + above for above in FIVE], "emulation", kl=0.06),
    "mxfp4": MadeCell(("precision=mxfp4",), (0.2, 0.3), "emulation", kl=None),
    "current": MadeCell(("precision=current",), (0.001, None, 0.002, 0.003)),
    "delayed_kept": MadeCell(("precision=delayed", "fp8_config.keep_bf16_layers.last=1"), FIVE),
    "bf16_again": MadeCell(("precision=bf16", "name=again"), (0.0003, -0.0004)),
    "delayed_emulated": MadeCell(("precision=delayed", "fp8_config.backend=emulation"), FIVE[:3], "emulation"),
    "lr2_bf16": MadeCell(("precision=bf16", "optimizer.learning_rate=0.006"), (0.05, 0.05, 0.06)),
    "lr2_delayed": MadeCell(("precision=delayed", "optimizer.learning_rate=0.006"), (0.05, 0.05, 0.06)),
}
SPEEDS = {("precision=bf16", EXACT): 50_000.0, ("precision=delayed", EXACT): 65_000.0, ("precision=nvfp4", EXACT): 90_000.0}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [make_evidence(tmp_path / "small.json", CELLS, scale="14m"), make_speeds(tmp_path / "speeds.json", SPEEDS)]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "evidence.md"
    file.write_text(f"before\n\n{BEGIN}\nolder\n{END}\n\nafter\n")
    return file


def written(files: list[Path], page: Path) -> str:
    *results, speeds = map(str, files)
    assert main([*results, "--page", str(page), "--picture", str(page.parent / "evidence.png"), "--throughput", speeds]) == 0
    return page.read_text()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of one scale, made once."""
    folder = tmp_path_factory.mktemp("made")
    page = folder / "evidence.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    return written([make_evidence(folder / "small.json", CELLS, scale="14m"), make_speeds(folder / "speeds.json", SPEEDS)], page)


def rows(text: str, heading: str = "| cell ") -> dict[str, dict[str, str]]:
    """Rows of the first table whose header begins so, by cell: what stands under each title."""
    lines = text[text.index(heading) :].partition("\n\n")[0].splitlines()
    header, _, *others = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {cells[0]: dict(zip(header, cells, strict=True)) for cells in others}


def minus(text: str) -> str:
    return text.replace("-", "−")


def test_a_row_says_what_the_cell_costs_and_gains(made: str):
    found = rows(made)
    assert [*found] == ["bf16", "delayed", "nvfp4", "mxfp4", "current"], "in the file's order"
    assert found["bf16"] == {
        **{"cell": "bf16", "seeds": "5", "before decay": "2.3300", "after decay": "2.0300", "± 95 %": "sd 0.0158", "in %": "–"},
        **{"verdict": "baseline", "as trained": "2.0300", "tokens": "–", "KL": "1.00", "last word": "25.0 %"},
        **{"speed": "1.00 ×", "at equal time": "–"},
    }
    assert found["delayed"] == {
        **{"cell": "delayed", "seeds": "5", "before decay": "+0.0020", "after decay": "+0.0020", "± 95 %": f"{HALF:.4f}"},
        **{"in %": "+0.10 %", "verdict": "equivalent", "as trained": "+0.0020", "KL": "0.33", "last word": "25.0 %"},
        **{"tokens": minus(f"{100 * math.expm1(0.002 / SLOPE):+.2f} %"), "speed": "1.30 ×"},
        "at equal time": minus(f"{0.002 + SLOPE * math.log(1.3):+.4f}"),
    }
    nvfp4 = found["nvfp4"]
    assert (nvfp4["verdict"], nvfp4["in %"], nvfp4["KL"]) == ("estimate", "+5.02 %", "2.00"), "no test of it was announced"
    assert nvfp4["speed"] == nvfp4["at equal time"] == "–", "emulated: another machine's speed is not its own"


def test_missing_seeds_and_runs_that_broke_off_are_said(made: str):
    found = rows(made)
    mxfp4, current = found["mxfp4"], found["current"]
    assert (mxfp4["seeds"], mxfp4["± 95 %"], mxfp4["verdict"], mxfp4["KL"]) == ("2", "–", "2 seeds: no interval", "–")
    assert (current["seeds"], current["after decay"], current["verdict"]) == ("4", "–", "broke off: 1 run of 4"), "no mean"
    assert current["KL"] == current["last word"] == "–", "of anything"


def test_rates_and_controls_stand_apart_each_against_what_it_differs_from(made: str):
    rates, controls = rows(made, "| cell        |  rate"), rows(made, "| cell             | against")
    assert (rates["bf16"]["rate"], rates["lr2_bf16"]["rate"], rates["lr2_bf16"]["interval"]) == ("0.003", "0.006", "above 0")
    assert (rates["lr2_delayed"]["against"], rates["lr2_delayed"]["minus"]) == ("lr2_bf16", "0")
    emulated, again = controls["delayed_emulated"], controls["bf16_again"]
    assert (emulated["against"], emulated["minus"], emulated["interval"]) == ("delayed", "0", "holds 0")
    assert again["interval"] == "2 seeds: no interval" and controls["delayed_kept"]["against"] == "delayed"
    assert f"end {math.sqrt((9e-8 + 16e-8) / 2):.4f} nats apart (root mean square of 2 pairs)" in made
    assert "The slope of bf16: −0.2000 nats for each factor e of tokens, from 164k to 328k tokens." in made


def test_a_variant_is_an_answer_and_is_held_against_what_it_changes_one_thing_of(files: list[Path], page: Path):
    nvfp4 = MadeCell(("precision=nvfp4",), FIVE, "emulation")
    kept = MadeCell(("precision=nvfp4", "fp8_config.keep_bf16_layers.last=1"), [above - 0.001 for above in FIVE[:3]], "emulation")
    cells = {"bf16": CELLS["bf16"], "nvfp4_branch": nvfp4, "nvfp4_kept_branch": kept}
    text = written([make_evidence(page.with_name("variants.json"), cells, scale="14m"), files[1]], page)
    assert rows(text)["nvfp4_kept_branch"]["after decay"] == "+0.0010"
    variant = rows(text, "| cell              |      against")["nvfp4_kept_branch"]
    assert (variant["against"], variant["seeds"], variant["minus"]) == ("nvfp4_branch", "3", minus("-0.0010"))
    alone = make_evidence(page.with_name("alone.json"), {key: cells[key] for key in ("bf16", "nvfp4_kept_branch")}, scale="14m")
    assert "Variants" not in written([alone, files[1]], page), "nothing to hold it against"


def test_kinds_of_text_have_their_own_differences(made: str):
    found = rows(made, "| cell    | training")
    assert (
        found["delayed"]["training"] == "+0.0010"
        and found["delayed"]["code"] == "+0.0010"
        and found["nvfp4"]["prose"] == "+0.2040"
    )


def test_only_what_stands_between_the_markers_is_replaced_and_a_scale_has_its_own_part(files: list[Path], page: Path):
    large = make_evidence(page.with_name("large.json"), {"bf16": CELLS["bf16"]}, scale="111m", parameters=111_000_000, between=())
    once = written([files[0], large, files[1]], page)
    assert once.startswith(f"before\n\n{BEGIN}\n") and once.endswith(f"{END}\n\nafter\n") and "older" not in once
    assert once.index("### 14m") < once.index("### 111m") and "111 M parameters" in once
    assert once.partition("### 111m")[2].count("| bf16 ") == 1, "no controls and no rates: no tables of them"
    assert written([files[0], large, files[1]], page) == once, "twice is as once"
    assert page.with_name("evidence.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_of_the_evidence_has_the_place():
    text = (ROOT / "docs/evidence_results.md").read_text()
    assert text.count(BEGIN) == 1 and text.index(BEGIN) < text.index(END)
    assert "](evidence.png)" in text and "![" not in text, "the picture is shown with the answer, and linked here"
    assert re.search(r"^!\[.+\]\(evidence\.png\)$", (ROOT / "docs/evidence.md").read_text(), re.MULTILINE)


def test_a_picture_shows_every_precision_that_can_be_compared(files: list[Path], page: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = {}
    monkeypatch.setattr("benchmarks.evidence_picture.save", lambda figure, path: drawn.update(figure=figure))
    written(files, page)
    left, right = drawn["figure"].axes
    assert [label.get_text() for label in left.get_xticklabels()] == ["nvfp4", "mxfp4"]
    assert {text.get_text() for text in right.texts} == {"bf16", "delayed"}
    spread = [line for line in right.get_lines() if line.get_linestyle() == ":"]
    level_of_seeds = sum(map(level, range(1, 6))) / 5
    floor = 100 * math.sqrt((9e-8 + 16e-8) / 2) / level_of_seeds
    assert sorted(line.get_ydata()[0] for line in spread) == pytest.approx([-floor, floor])
    assert drawn["figure"].get_figwidth() * drawn["figure"].dpi >= 800


def test_scales_stand_side_by_side_with_a_marker_each(files: list[Path], page: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = {}
    monkeypatch.setattr("benchmarks.evidence_picture.save", lambda figure, path: drawn.update(figure=figure))
    large = {"bf16": CELLS["bf16"], "delayed_branch": CELLS["delayed"]}  # called as its precision: no other cell is so
    written([files[0], make_evidence(page.with_name("large.json"), large, scale="111m", parameters=111_000_000), files[1]], page)
    _, right = drawn["figure"].axes
    assert [text.get_text().partition(":")[0] for text in right.get_legend().get_texts()] == ["14m", "111m"]
    assert {text.get_text() for text in right.texts} == {"bf16", "delayed"}
    small, other = (bars.lines[0] for bars in right.containers)
    assert small.get_marker() != other.get_marker() and 0 < other.get_xdata()[0] - small.get_xdata()[0] < 0.05
    assert small.get_ydata() == pytest.approx(other.get_ydata())


def test_a_speed_belongs_to_the_very_settings_that_were_timed(files: list[Path]):
    scale, speeds = Scale.read(files[0]), Speeds(ROOT / "benchmarks/results/h200_throughput.json")
    assert 1.2 < speeds.over_baseline(scale, "delayed") < 1.6 and speeds.over_baseline(scale, "bf16") == 1.0
    for cell in ("nvfp4", "delayed_kept", "delayed_emulated", "lr2_delayed"):
        assert speeds.over_baseline(scale, cell) is None


def test_a_seed_that_the_baseline_lacks_is_not_compared(tmp_path: Path):
    made = make_evidence(tmp_path / "e.json", {"bf16": MadeCell(("precision=bf16",), [0.0] * 2), "delayed": CELLS["delayed"]})
    found = Scale.read(made).difference("delayed", final_loss)
    assert found.by_seed == pytest.approx({1: 0.001, 2: 0.002}) and found.half_width() is None


def two_machines(folder: Path) -> list[Path]:
    """Files of one scale: what the second one's baselines are above the first's is chance."""
    bf16, delayed = ("precision=bf16",), ("precision=delayed",)
    emulated = (*delayed, "fp8_config.backend=emulation")
    one = {"bf16": MadeCell(bf16, [0.0] * 3), "delayed": MadeCell(delayed, (0.001, 0.002, 0.003))}
    two = {"bf16": MadeCell(bf16, (0.004, -0.002)), "delayed": MadeCell(delayed, (0.006, 0.001))}
    two |= {"delayed_emulated": MadeCell(emulated, (0.007,), "emulation")}
    return [make_evidence(folder / "one.json", one, scale="14m"), make_evidence(folder / "two.json", two, scale="14m")]


def test_a_run_is_held_against_the_baseline_of_its_own_file(tmp_path: Path):
    (scale,) = read_scales(two_machines(tmp_path))
    assert [*scale.cells] == ["bf16", "delayed", "delayed_emulated", "bf16_again"]
    assert scale.difference("delayed").by_seed == pytest.approx({1: 0.0015, 2: 0.0025, 3: 0.003}), "a seed counts once"
    assert scale.difference("delayed_emulated", against="delayed").by_seed == pytest.approx({1: 0.003 - 0.0015})
    assert scale.difference("bf16_again").by_seed == pytest.approx({1: 0.004, 2: -0.002}), "chance between the files"
    assert scale.floor("bf16_again") == pytest.approx(math.sqrt(1e-5))
    assert scale.values("bf16", final_loss) == pytest.approx({1: level(1) + 0.002, 2: level(2) - 0.001, 3: level(3)})
    assert scale.slope.nats == pytest.approx(SLOPE) and len(scale.between) == 4


def test_every_pair_of_baselines_tells_how_far_chance_goes(tmp_path: Path):
    third = make_evidence(tmp_path / "three.json", {"bf16": MadeCell(("precision=bf16",), [0.001])}, scale="14m")
    scale = Scale.read(*two_machines(tmp_path), third)
    assert scale.apart("bf16_again") == pytest.approx([0.004, -0.002, 0.001, -0.003])
    assert scale.floor("bf16_again") == pytest.approx(math.sqrt((16e-6 + 4e-6 + 1e-6 + 9e-6) / 4))
    assert scale.difference("bf16_again").by_seed == pytest.approx({1: 0.0025, 2: -0.002}), "a seed counts once"


def test_a_page_of_several_files_names_each_and_says_how_they_are_put_together(page: Path, tmp_path: Path):
    text = written([*two_machines(tmp_path), make_speeds(tmp_path / "speeds.json", SPEEDS)], page)
    assert text.count("### 14m") == 1 and "6 runs on" in text and "and 5 runs on" in " ".join(text.split())
    assert "beside that of the first, counts as bf16_again" in " ".join(text.split())
    assert rows(text)["delayed"]["seeds"] == "3" and rows(text, "| cell             | against")["bf16_again"]["seeds"] == "2"


@pytest.mark.parametrize("change", [{"held_out": "other"}, {"settings": {"optimizer.learning_rate": 1.0}}])
def test_files_that_do_not_fit_together_are_refused(change: dict, tmp_path: Path):
    one, two = two_machines(tmp_path)
    content = json.loads(two.read_text())
    two.write_text(
        json.dumps(
            content | {key: content.get(key, {}) | value if type(value) is dict else value for key, value in change.items()}
        )
    )
    with pytest.raises(InputError, match=r"one\.json.*two\.json"):
        read_scales([one, two])


def test_continued_training_has_no_slope_over_tokens(tmp_path: Path):
    cell = MadeCell(("precision=bf16", "model.source=somewhere"), [0.0] * 3)
    assert Scale.read(make_evidence(tmp_path / "e.json", {"bf16": cell})).slope is None


def test_the_report_reads_such_a_file_as_it_reads_run_folders(files: list[Path], tmp_path: Path, capsys):
    command = ["report", str(files[0]), "--vary", "optimizer.learning_rate", "--out", str(tmp_path / "x.png")]
    assert pretrain(command) == 0
    said = capsys.readouterr().out
    assert said.startswith("Against bf16 over 5 seeds, within 0.3 %: equivalent: delayed, delayed_kept, ")
    assert f"The slope of bf16: {minus(f'{SLOPE:+.4f}')} nats" in said and "bf16_again repeats bf16" in said


def test_seeds_of_one_cell_are_of_one_training(files: list[Path]):
    content = json.loads(files[0].read_text())
    for change in (
        {"settings": {"optimizer.learning_rate": 0.001}},
        {"summary": {"data_fingerprint": "cd34"}},
        {"audit": {"backend": "TE"}},
    ):
        runs = dict(content["runs"])
        key, value = next(iter(change.items()))
        runs["delayed-seed2"] = runs["delayed-seed2"] | {key: runs["delayed-seed2"][key] | value}
        files[0].write_text(json.dumps(content | {"runs": runs}))
        with pytest.raises(InputError, match="delayed-seed1 and delayed-seed2 are of one cell and differ in"):
            Scale.read(files[0])


def test_a_cell_of_another_recipe_has_no_verdict_and_several_commits_are_said(page: Path):
    cells = CELLS | {"delayed": MadeCell(("precision=delayed", "schedule.warmup=7"), FIVE)}
    file, speeds = make_evidence(page.with_name("e.json"), cells), make_speeds(page.with_name("speeds.json"), SPEEDS)
    content = json.loads(file.read_text())
    for number, run in enumerate(content["runs"].values()):
        run["commit"] = "a1" if number else "b2"
    file.write_text(json.dumps(content))
    text = " ".join(written([file, speeds], page).split())
    assert rows(page.read_text())["delayed"]["verdict"] == "other settings"
    assert "delayed differs from bf16 in more than it is about, so no cost is told: `schedule.warmup`: 0 and 7." in text
    assert "lr2_bf16 differs" not in text, "a rate is what such a cell is about"
    assert f"The runs are of the code at b2 (1 run), a1 ({len(content['runs']) - 1} runs)." in text


def test_files_that_are_something_else_are_refused_with_what_to_do(files: list[Path], page: Path, tmp_path: Path):
    content = json.loads(files[0].read_text())
    for change, named in (
        ({"runs": {}}, "holds no runs"),
        ({"runs": {key: run for key, run in content["runs"].items() if run["cell"] != "bf16"}}, "holds no run of the cell bf16"),
        (
            {"runs": {key: run | {"endpoints": {}} for key, run in content["runs"].items()}},
            "not as `benchmarks.evidence` makes it",
        ),
        ({"between_baseline_seeds": [{"seeds": [1, 2], "kl": "x"}]}, "not as `benchmarks.evidence` makes it"),
        ({"parameters": "many"}, "not as `benchmarks.evidence` makes it"),
    ):
        other = tmp_path / "other.json"
        other.write_text(json.dumps(content | change))
        with pytest.raises(InputError, match=named):
            Scale.read(other)
    with pytest.raises(InputError, match=r"not as `benchmarks\.throughput` makes it"):
        Speeds(files[0])
    page.write_text("no place\n")
    assert main([str(files[0]), "--page", str(page), "--throughput", str(files[1])]) == 2


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("commit",), ["a"]),
        (("machine",), {"name": "x"}),
        (("settings",), {"data.length.of.what": 1}),
        (("evaluations",), [1]),
        (("evaluations", 0, "step"), [1]),
        (("evaluations", 0, "step"), math.inf),
        (("evaluations", 1, "held_out_loss"), "low"),
        (("evaluations", 1, "held_out_loss"), {}),
    ],
)
def test_a_damaged_run_is_one_message_and_no_traceback(keys: tuple, value: object, files: list[Path]):
    content = json.loads(files[0].read_text())
    place = content["runs"]["delayed-seed2"]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    files[0].write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"small\.json: not as `benchmarks\.\w+` makes it, at .*; make it again"):
        Scale.read(files[0])


@pytest.mark.parametrize("speed", ["fast", None, [1.0], -1.0, 0, math.nan, math.inf])
def test_a_speed_that_is_none_is_refused(speed: object, files: list[Path]):
    content = json.loads(files[1].read_text())
    content["ways"]["1"]["tokens_per_second"]["median"] = speed
    files[1].write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"not as `benchmarks\.throughput` makes it, at a speed of .*; measure again"):
        Speeds(files[1])


def test_losses_that_were_evaluated_in_bf16_are_not_shown_as_trained(files: list[Path]):
    content = json.loads(files[0].read_text())
    content["settings"]["fp8_config.use_autocast_during_eval"] = False
    files[0].write_text(json.dumps(content))
    scale = Scale.read(files[0])
    assert scale.values("delayed", final_loss) and not scale.values("delayed", scale.trained_loss)
