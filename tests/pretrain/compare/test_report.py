"""Run folders read, compared and drawn: `run_files`, `fairness`, `report` and `figures`."""

from __future__ import annotations

import io
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.image import imread
from matplotlib.lines import Line2D
from matplotlib.text import Text

from foundation.errors import InputError
from pretrain.__main__ import main
from pretrain.compare import figures
from pretrain.compare.comparison import RunComparison
from pretrain.compare.fairness import PairedDifference, at_the_end, batch_means_error, check_comparable, loss_differences
from pretrain.compare.figures import plot_losses
from pretrain.compare.report import comparison_table, grid_tables, summary_table, tables, write
from pretrain.compare.smoothing import moving_mean, window_of
from pretrain.metrics.run_record import RunRecord, read_metrics, read_run
from pretrain.precision.settings import PRECISIONS
from tests.pretrain.compare.made_runs import make_run, trained


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def rows(table: str) -> dict[str, dict[str, str]]:
    """The table's rows by their first cell, each by its column."""
    header, _rule, *lines = cells(table)
    return {line[0]: dict(zip(header, line, strict=True)) for line in lines}


# ── Files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_metrics_are_read_as_written_and_a_line_still_being_written_is_left_out(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    records = read_metrics(run)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 4]
    assert records[-1]["event"] == "evaluation"


def test_a_damaged_line_a_missing_file_and_a_folder_that_is_no_run_are_named(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, \n')
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2: not valid JSON"):
        read_metrics(run)
    (run / "metrics.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(InputError, match=r"line 1: has no `step`"):
        read_metrics(run)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match=r"metrics\.jsonl: there is no such file"):
        read_run(run)
    with pytest.raises(InputError, match=r"nothing: there is no such run folder"):
        read_run(tmp_path / "nothing")


def test_figures_come_from_the_metrics_even_where_an_older_summary_says_otherwise(tmp_path):
    path = make_run(tmp_path / "run")
    (path / "summary.json").write_text(json.dumps({"data_fingerprint": "cd34", "steps": 2, "loss": 9.0}))
    run = read_run(path)
    assert run.summary["steps"] == 4 and run.summary["loss"] == 2.25 and run.data_fingerprint == "ab12"
    (path / "environment.json").write_text("{}")  # as of an older version
    assert read_run(path).data_fingerprint == "cd34"


# ── Fairness ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("seed=7", "`seed`: 42 and 7"),
        ("batch.tokens=8192", "`batch.tokens`: 4096 and 8192"),
        ("train.steps=5", "`train.steps`: 4 and 5"),
        ("optimizer.learning_rate=0.5", "`optimizer.learning_rate`: 0.0003 and 0.5"),
        ("schedule.kind=cosine", "`schedule.kind`: wsd and cosine"),
        ("model.config.hidden_size=64", "`model.config.hidden_size`: 32 and 64"),
        ("model.config.head_dim=8", "`model.config.head_dim`: not set and 8"),
        ("data.mask_boundaries=false", "`data.mask_boundaries`: True and False"),
        ("evaluate.packs=3", "`evaluate.packs`: None and 3"),
    ],
)
def test_runs_that_were_trained_differently_are_refused_and_the_difference_is_named(setting, named, tmp_path, capsys):
    ours, theirs = make_run(tmp_path / "ours"), make_run(tmp_path / "theirs", (4.0, 3.0), setting)
    assert main(["report", str(ours), str(theirs)]) == 2
    message = capsys.readouterr().err
    assert named in message and "ours" in message and "theirs" in message
    assert not (tmp_path / "comparison.png").exists()


def test_runs_over_other_data_are_refused(tmp_path):
    runs = [trained(tmp_path / "ours"), trained(tmp_path / "theirs", fingerprint="cd34")]
    with pytest.raises(InputError, match=r"`data\.fingerprint`: ab12 and cd34"):
        check_comparable(runs)


def test_runs_may_differ_in_what_is_compared_and_in_where_and_how_visibly_they_ran(tmp_path):
    settings = ["precision=delayed", "weights=bf16_exact", "fp8_config.scope=linear+head", "fp8_config.margin=1"]
    settings += ["batch.microbatch=4", "model.compile=none", "log.every=7", "checkpoint.every=9", "data.packs=elsewhere"]
    check_comparable([trained(tmp_path / "ours"), trained(tmp_path / "theirs", (4.0, 3.0), *settings)])


def test_a_run_whose_data_is_not_known_is_reported_alone_and_compared_with_none(tmp_path):
    unknown, known = trained(tmp_path / "unknown", fingerprint=None), trained(tmp_path / "known")
    check_comparable([unknown])
    for pair in ([unknown, known], [known, unknown]):
        with pytest.raises(InputError, match=r"unknown: its files do not say its `data_fingerprint`"):
            check_comparable(pair)


# ── Paired differences ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_paired_difference_uses_the_steps_that_both_runs_have_and_only_finite_losses(tmp_path):
    first = trained(tmp_path / "first", [4.0, 3.0, None, 2.0, 2.0])
    second = trained(tmp_path / "second", [4.5, 3.1, 2.5, 2.3])
    steps, differences = loss_differences(first, second)
    assert steps.tolist() == [1, 2, 4] and differences == pytest.approx([0.5, 0.1, 0.3])
    assert cells(comparison_table([first, second]))[-1] == [
        "second",
        "+0.3000",
        "too few steps",
        "0.2000",
        "3",
        "+0.3000",
        "too few steps",
        "0.2000",
        "3",
    ]


@given(st.lists(st.floats(-10, 10), min_size=64, max_size=200))
def test_the_standard_error_is_that_of_batch_means_computed_plainly(values: list[float]):
    size = math.floor(math.sqrt(len(values)))
    rest = values[len(values) % size :]
    means = [statistics.fmean(rest[i : i + size]) for i in range(0, len(rest), size)]
    expected = math.sqrt(statistics.variance(means) * size / len(values))
    assert batch_means_error(np.array(values)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_the_standard_error_allows_for_correlated_steps(correlation: float):
    """Of an AR(1) process of unit innovations the mean's is 1 / ((1 - correlation) sqrt(n)), in closed form for long series."""
    rng, n = np.random.default_rng(0), 2000
    errors, naive = [], []
    for _ in range(40):
        values, noise = np.zeros(n), rng.normal(size=n)
        for i in range(1, n):
            values[i] = correlation * values[i - 1] + noise[i]
        errors.append(batch_means_error(values))
        naive.append(values.std() / math.sqrt(n))
    true = 1 / ((1 - correlation) * math.sqrt(n))
    assert np.mean(errors) == pytest.approx(true, rel=0.12)
    assert np.mean(naive) < 0.6 * true or correlation == 0.0, "what sd / sqrt(n) would claim"


def test_too_few_steps_have_no_spread_and_no_error():
    assert math.isnan(batch_means_error(np.arange(63.0))) and not math.isnan(batch_means_error(np.arange(64.0)))
    assert math.isnan(PairedDifference.of(np.ones(1)).sd)
    assert PairedDifference.of(np.zeros(0)).steps == 0 and math.isnan(PairedDifference.of(np.zeros(0)).mean)
    assert len(at_the_end(np.arange(11))) == 11 and len(at_the_end(np.arange(80))) == 64
    assert at_the_end(np.arange(1000)).tolist() == [*range(800, 1000)]


def test_where_steps_are_too_few_for_an_error_the_report_says_so_and_shows_none(tmp_path):
    """Two batches that happen to agree would give an error of zero."""
    losses = [4.0 + 0.1 * (step % 2) for step in range(20)]
    runs = [trained(tmp_path / "a", losses), trained(tmp_path / "b", [loss + 0.25 for loss in losses], "precision=delayed")]
    row = cells(comparison_table(runs))[-1]
    assert row == ["b", "+0.2500", "too few steps", "0.0000", "20", "+0.2500", "too few steps", "0.0000", "20"]
    page = write([run.path for run in runs], out=tmp_path / "x.png")
    assert "too few steps: a standard error needs at least eight batches" in page
    runs.append(trained(tmp_path / "c", losses, "weights=bf16"))
    assert rows(grid_tables(runs)[0])["fp32"]["delayed"] == "+0.2500 (sd 0.0000; too few steps)"


# ── Tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_table_shows_each_runs_figures_and_a_dash_for_what_is_not_known(tmp_path):
    table = summary_table([trained(tmp_path / "a"), trained(tmp_path / "b", held_out=False)])
    _header, _rule, a, b = cells(table)
    assert a[:7] == ["a", "bf16", "fp32", "torch", "4", "16.4k", "2.9375"]
    assert a[7:] == ["2.4000", "11.02", "10.2k", "50.0 %", "512 MiB", "1.2 %", "1.0 %"]
    assert b[7:9] == ["–", "–"] and b[:1] + b[9:] == ["b", *a[9:]]
    assert len({len(line) for line in table.splitlines()}) == 1


def test_tables_fit_the_terminal_and_a_file_has_whole_ones(tmp_path, capsys, monkeypatch):
    runs = [str(make_run(tmp_path / name, [4.0] * 100)) for name in ("a", "b")]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    for out in ("report.png", "report.html"):
        page = tmp_path / f"{out}.md"
        assert main(["report", *runs, "--out", str(tmp_path / out), "--markdown", str(page)]) == 0
        printed = capsys.readouterr().out
        assert (
            "\n  held-out       2.4000\n" in printed
            and max(map(len, printed.split("* ")[0].splitlines())) <= 80
            and "| run" not in printed
        )
        assert "| run | precision" in page.read_text() and "std. error" in page.read_text()


def test_a_run_that_was_broken_off_has_no_end_in_the_tables_and_they_say_how(tmp_path):
    losses = [4.0 + 0.1 * (step % 2) for step in range(100)]
    runs = [trained(tmp_path / "base", losses), trained(tmp_path / "lost", [*losses[:50], *[None] * 50], "precision=delayed")]
    runs += [trained(tmp_path / "exact", losses, "weights=bf16_exact"), trained(tmp_path / "cut", losses[:2], "precision=nvfp4")]
    runs[-1].summary["halted"] = "step 2: the gradient norm is nan"
    table = rows(comparison_table(runs))
    assert [table[name]["at the end"] for name in table] == ["has no finite loss from step 51 on", "0", "was halted at step 2"]
    assert rows(grid_tables(runs)[0])["fp32"]["nvfp4"] == "was halted at step 2"
    said = "\n".join(tables(runs))
    assert "* cut was halted at step 2: step 2: the gradient norm is nan" in said
    assert "* lost has no finite loss from step 51 on." in said


def test_a_held_out_loss_of_an_earlier_step_than_the_runs_last_says_which(tmp_path):
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n" + lines[3].replace('"step": 4', '"step": 5') + "\n")
    found = read_run(run)
    assert rows(summary_table([found]))["run"]["held-out"] == "2.4000 (step 4)"


def test_the_loss_column_says_over_how_many_steps_it_is_the_mean(tmp_path):
    short, long = trained(tmp_path / "short", [3.0] * 12), trained(tmp_path / "long", [3.0] * 60)
    assert "loss, last 12" in rows(summary_table([short]))["short"]
    assert "loss, last 50" in rows(summary_table([long]))["long"]
    assert "loss, last 12 or 50" in rows(summary_table([short, long]))["long"]


def test_a_branch_whose_mean_leaves_out_steps_that_the_other_has_says_so(tmp_path):
    losses = {"trunk": [3.0] * 40, "branch": [3.0] * 40, "long_branch": [3.0] * 70}
    for name, each in losses.items():
        make_run(tmp_path / name, each)
        metrics = tmp_path / name / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True)
        metrics.write_text("".join(lines[10 * (name != "trunk") :]))
    [header, _rule, *table] = cells(summary_table([read_run(tmp_path / name) for name in losses]))
    assert [row[header.index("loss, last 30 or 40 or 50")] for row in table] == ["3.0000", "3.0000 (from step 11)", "3.0000"]


def test_runs_with_scales_of_whole_tensors_that_split_a_step_in_other_ways_are_named(tmp_path):
    said = "are a microbatch's, so losses depend a little on how a step is split into these"
    for precision, noted in (("delayed", True), ("nvfp4", True), ("mxfp8", False), ("bf16", False)):
        runs = [
            trained(tmp_path / f"{precision}-{packs}", (3.0, 2.0), f"precision={precision}", f"batch.microbatch={packs}")
            for packs in (1, 4)
        ]
        ways = f"{said}: {precision}-1 (1 pack x 1 rank); {precision}-4 (4 packs x 1 rank)."
        assert (ways in "\n".join(tables(runs))) == noted and said not in "\n".join(tables(runs[:1]))
    searched = {"backend": "torch", "memory": {"microbatch": 4, "planned": {}, "held": {}}}
    auto = trained(tmp_path / "auto", (3.0, 2.0), "precision=nvfp4", audit=searched)
    assert said not in "\n".join(tables([auto, read_run(tmp_path / "nvfp4-4")]))
    assert "auto (4 packs x 1 rank)" in "\n".join(tables([auto, read_run(tmp_path / "nvfp4-1")]))


def test_a_speed_that_is_not_the_hardwares_is_marked_and_one_that_was_shared_is_not_shown(tmp_path):
    emulated = trained(tmp_path / "emulated", (3.0, 2.0), "precision=nvfp4", audit={"backend": "emulation"})
    shared = trained(tmp_path / "shared", (3.0, 2.0), side_by_side=True)
    table = rows(summary_table([emulated, shared]))
    assert (table["emulated"]["tok/s"], table["emulated"]["MFU"]) == ("10.2k (emulated)", "–")
    assert (table["shared"]["tok/s"], table["shared"]["MFU"], table["shared"]["data wait"]) == ("–", "–", "–")
    said = write([emulated.path, shared.path], out=tmp_path / "x.png")
    assert "computed in software" in said and "shared its machine" in said


def test_a_run_that_fell_back_to_another_precision_says_which_one_it_ran_in(tmp_path):
    run = trained(tmp_path / "run", (3.0, 2.0), "precision=nvfp4", audit={"backend": "torch", "effective": "bf16"})
    assert rows(summary_table([run]))["run"]["precision"] == "nvfp4 (ran bf16)"


def test_what_runs_of_one_precision_differ_in_has_a_column(tmp_path):
    runs = [trained(tmp_path / "bf16")]
    runs += [trained(tmp_path / s, (3.0, 2.0), "precision=delayed", f"fp8_config.scope={s}") for s in ("linear", "linear+head")]
    table = rows(summary_table([*runs, trained(tmp_path / "mxfp8", (3.0, 2.0), "precision=mxfp8")]))
    assert [row["scope"] for row in table.values()] == ["–", "linear", "linear+head", "linear"]
    assert "fp8_format" not in table["bf16"]


def grid_of_runs(folder: Path, scopes: Sequence[str] = ("linear",)) -> list[RunRecord]:
    rng = np.random.default_rng(0)
    base, runs = 3 + rng.normal(0, 0.1, 400), []
    for weights in ("bf16_exact", "fp32"):
        for precision in ("nvfp4", "bf16"):
            for scope in scopes if precision == "nvfp4" else scopes[:1]:
                settings = [f"precision={precision}", f"weights={weights}", f"fp8_config.scope={scope}"]
                losses = (base + rng.normal(0.01, 0.005, 400)).tolist()
                runs.append(trained(folder / f"{precision}-{weights}-{scope}", losses, *settings))
    return runs


def test_the_grid_holds_the_paired_difference_at_the_end_with_its_error_and_sd(tmp_path):
    runs = grid_of_runs(tmp_path)
    [grid] = grid_tables(runs)
    assert cells(grid)[0] == ["weights", "bf16", "nvfp4"], "in the registry's order"
    assert list(rows(grid)) == ["fp32", "bf16_exact"]
    for run in runs[1:]:
        losses = [[record["loss"] for record in r.metrics[:400]] for r in (runs[0], run)]
        last = [theirs - ours for ours, theirs in zip(*losses, strict=True)][-80:]
        means = [statistics.fmean(last[8 * i : 8 * i + 8]) for i in range(10)]  # 80 steps: batches of floor(sqrt(80))
        error = math.sqrt(statistics.variance(means) * 8 / 80)
        cell = rows(grid)[run.config["weights"]][run.config["precision"]]
        mean = statistics.fmean(last)
        digits = 5 if min(abs(mean), error) < 1e-4 else 4
        assert cell == f"{mean:+.{digits}f} ± {error:.{digits}f} (sd {statistics.stdev(last):.4f})".replace("-", "−")
    assert rows(grid)["bf16_exact"]["nvfp4"] == "baseline"


def test_each_scope_has_a_grid_of_its_own_and_what_has_none_stands_in_all(tmp_path):
    runs = grid_of_runs(tmp_path, ("linear", "linear+head"))
    linear, head = grid_tables(runs)
    assert cells(linear)[0][0] == "weights (scope linear)" and cells(head)[0][0] == "weights (scope linear+head)"
    assert rows(linear)["fp32"]["bf16"] == rows(head)["fp32"]["bf16"] != "–"
    assert rows(linear)["fp32"]["nvfp4"] != rows(head)["fp32"]["nvfp4"]


# ── Pictures ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(losses=st.lists(st.floats(-1e3, 1e3) | st.just(float("nan")), max_size=50), half=st.integers(0, 30))
def test_the_moving_mean_is_the_mean_of_the_finite_values_around(losses, half):
    values = np.array(losses, dtype=np.float64)
    got = moving_mean(values, 2 * half + 1)
    for i in range(len(values)):
        around = values[max(0, i - half) : i + half + 1]
        around = around[np.isfinite(around)]
        assert np.isnan(got[i]) if not len(around) else got[i] == pytest.approx(around.mean(), abs=1e-8)


@given(steps=st.integers(1, 5000))
def test_smoothing_does_not_move_a_curve_by_part_of_a_step(steps):
    window = window_of(steps)
    assert window % 2 == 1 and abs(window - steps / 50) <= 1.5
    straight = np.arange(float(steps))
    inner = slice(window // 2, steps - window // 2)
    assert moving_mean(straight, window)[inner] == pytest.approx(straight[inner], abs=1e-6)


LOSSES = {
    "one step": [3.0],
    "two steps": [3.0, 2.0],
    "no finite loss": [None, None, None],
    "a flat line": [2.0] * 300,
    "a gap": [11.0, None, *np.linspace(8, 2, 500).tolist()],
}


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
def test_any_run_can_be_drawn_alone(losses, tmp_path):
    run = trained(tmp_path / "run", losses, held_out=len(losses) > 1)
    plot_losses([run], tmp_path / "new" / "loss.png", asked_for=True)
    picture = imread(tmp_path / "new" / "loss.png")
    assert picture.shape[:2] == (975, 1350) and picture.std() > 0.05
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["loss.png"]


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
def test_any_run_can_be_drawn_beside_another(losses, tmp_path):
    runs = [trained(tmp_path / "run", losses, held_out=len(losses) > 1), trained(tmp_path / "other", (4.0, 3.0, 2.0))]
    drawn = figures._figure_of_several(runs)
    assert len(drawn.subfigs[0].axes[0].get_legend().legend_handles) == 2
    if losses is LOSSES["no finite loss"]:  # a picture takes a second, and that of the least that there can be is enough
        plot_losses(runs, tmp_path / "both.png")
        assert imread(tmp_path / "both.png").std() > 0.05


def test_runs_with_the_same_losses_are_named_beside_their_line(tmp_path):
    drawn = figures._figure_of_several([trained(tmp_path / name, (4.0, 3.0, 2.0)) for name in ("one", "other")])
    differences = drawn.subfigs[0].axes[1]
    names = {text.get_text(): text.get_position()[1] for text in differences.texts if text.get_position()[0] > 1}
    assert [name.split()[0] for name in names] == ["one,", "other"]
    assert list(names.values()) == pytest.approx([0.5, 0.5 + figures.LABEL_GAP])


def texts_beside(runs: Sequence[RunRecord]) -> list[str]:
    """What stands at the right ends of the differences, and above them."""
    panel = figures._figure_of_several(runs).subfigs[0].axes[1]
    return [text.get_text() for text in panel.texts]


def test_a_picture_says_where_runs_end_as_the_page_does_and_over_which_steps(tmp_path):
    rising = [3.0 + 0.004 * step for step in range(80)]
    runs = [trained(tmp_path / "base", [3.0] * 80), trained(tmp_path / "other", rising, "precision=delayed")]
    [_, other] = RunComparison.over(runs).standings
    assert other.gap.mean == pytest.approx(0.004 * 47.5) and other.gap.steps == 64
    ends, above = texts_beside(runs)[:-1], texts_beside(runs)[-1]
    assert "other +0.1900" in ends and "mean of the last 64 steps" in above


def test_a_run_that_was_broken_off_is_drawn_without_an_end_and_sets_no_scale(tmp_path):
    base = np.random.default_rng(0).normal(3.0, 0.1, 100)
    runs = [trained(tmp_path / "base", base.tolist()), trained(tmp_path / "near", (base + 0.01).tolist(), "precision=delayed")]
    runs.append(trained(tmp_path / "lost", [*(base[:50] + 900.0).tolist(), None], "precision=nvfp4"))
    runs.append(trained(tmp_path / "cut", base[:2].tolist(), "precision=mxfp8"))
    runs[-1].summary["halted"] = "step 2: the gradient norm is nan"
    ends = texts_beside(runs)
    assert "cut was halted at step 2" in ends and "lost has no finite loss from step 51 on" in ends and "near +0.0100" in ends
    drawn = figures._figure_of_several(runs).subfigs[0].axes
    assert drawn[1].get_ylim()[1] < 1 and "cut was halted" in "".join(t.get_text() for t in drawn[0].get_legend().get_texts())
    alone = figures._figure_of_one(runs[-1]).axes[0]
    assert "cut was halted at step 2" in alone.get_title(loc="left")
    assert "at the end" not in "".join(text.get_text() for text in alone.get_legend().get_texts())


def test_the_picture_of_a_run_is_called_as_the_run_and_not_as_its_recipe(tmp_path):
    picture = figures._figure_of_one(trained(tmp_path / "bf16-seed=7"))
    assert picture.axes[0].get_title(loc="left").strip() == "bf16-seed=7"


def test_runs_are_drawn_in_the_colour_of_their_precision(tmp_path):
    runs = grid_of_runs(tmp_path, ("linear", "linear+head"))
    runs.append(trained(tmp_path / "last", [3.0] * 400, "weights=bf16", side_by_side=True))
    drawn = figures._figure_of_several(runs)
    losses, differences = drawn.subfigs[0].axes[:2]
    curves = [line.get_color() for line in losses.lines if line.get_linestyle() != "None"]  # which circles have none of
    assert curves == [PRECISIONS[run.precision].colour for run in runs]
    assert [line.get_color() for line in differences.lines[1:]] == curves[1:], "the first is the line of zero"
    bars = [bar for panel in drawn.subfigs[1].axes for bar in panel.patches]
    assert {to_hex(bar.get_edgecolor()) for bar in bars} == {to_hex(colour) for colour in curves}
    everywhere = {to_hex(each.get_color()) for kind in (Line2D, Text) for each in drawn.findobj(kind)}
    colours = {name: to_hex(precision.colour) for name, precision in PRECISIONS.items() if name != "fp32"}  # grey, as texts are
    assert {name for name, colour in colours.items() if colour in everywhere} == {"bf16", "nvfp4"}


# ── The command line ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_line_draws_into_the_run_folder_and_prints_the_table(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert (run / "loss.png").exists() and "| run |" in capsys.readouterr().out


def test_a_link_in_place_of_a_runs_own_picture_is_replaced_and_one_that_is_named_is_followed(tmp_path):
    run, theirs = make_run(tmp_path / "run"), tmp_path / "theirs.png"
    theirs.write_bytes(before := b"written by python -m pretrain, elsewhere")
    (run / "loss.png").symlink_to(theirs)
    assert main(["report", str(run)]) == 0
    assert not (run / "loss.png").is_symlink() and theirs.read_bytes() == before
    (link := tmp_path / "link.png").symlink_to(theirs)
    assert main(["report", str(run), "--out", str(link)]) == 0
    assert link.is_symlink() and theirs.read_bytes() == (run / "loss.png").read_bytes()


def test_the_command_line_compares_runs_into_files_of_their_own(tmp_path, capsys):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", [4.1, 3.1, 2.6, 2.35])]
    assert main(["report", *map(str, runs)]) == 0
    assert (tmp_path / "comparison.png").exists() and not (runs[0] / "loss.png").exists()
    assert "+0.1000" in capsys.readouterr().out
    page, picture = tmp_path / "pages" / "mine.md", tmp_path / "mine.png"
    assert main(["report", *map(str, runs), "--out", str(picture), "--markdown", str(page), "--baseline", str(runs[1])]) == 0
    assert picture.exists() and "![curves](../mine.png)" in page.read_text()
    assert "−0.1000" in page.read_text() and "minus b" in page.read_text()


def test_importing_the_report_needs_neither_torch_nor_the_drawing_library():
    program = (
        "import sys, pretrain.compare.report; print([m for m in ('torch', 'matplotlib', 'transformers') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60).stdout
    assert printed.strip() == "[]"


@pytest.mark.parametrize("command", ["report", "matrix"])
def test_the_help_of_a_command_names_the_program_as_it_is_typed(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0 and f"usage: python -m pretrain {command}" in capsys.readouterr().out


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_traceback():
    program = [sys.executable, "-m", "pretrain", "matrix", "recipes/matrices/smoke.yaml", "--dry-run"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_without_a_known_command_all_are_listed_and_the_nearest_is_named(capsys):
    for arguments, said in (([], ""), (["reprot"], "unknown command 'reprot'; did you mean 'report'?"), (["x"], "command 'x'")):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert said in err and "report" in err and "matrix" in err
    assert main(["--help"]) == 0 and "matrix" in capsys.readouterr().out


def test_a_report_of_runs_with_names_in_any_script_is_printed_where_output_is_ascii_or_closed(tmp_path, monkeypatch):
    runs = [str(make_run(tmp_path / name)) for name in ("läuf", "бег")]
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed := io.BytesIO(), encoding="ascii"))
    assert main(["report", *runs]) == 0
    assert b"| l?uf" in printed.getvalue() and b"| ???" in printed.getvalue()
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["report", *runs]) == 0


def test_a_full_disk_under_what_is_printed_is_one_message_and_no_failed_gate(tmp_path, monkeypatch, capsys):
    runs = [str(make_run(tmp_path / name)) for name in ("one", "two")]
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["report", *runs, "--gate", "0.1"]) == 2
    said = "error: what is printed: the disk is full; free some space, then run the same command again\n"
    assert capsys.readouterr().err == said
