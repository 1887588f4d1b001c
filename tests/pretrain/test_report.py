from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from packing.errors import InputError
from pretrain.curves import difference, moving_mean, plot_losses
from pretrain.report import check_comparable, comparison_table, main, summary_table
from pretrain.run_files import read_metrics, read_run

IDENTITY = {"data_fingerprint": "ab12", "seed": 42, "tokens_per_step": 1024}


def make_run(path: Path, losses=(4.0, 3.0, 2.5, 2.25), *, identity=IDENTITY, held_out: bool = True, rate=1e-3) -> Path:
    path.mkdir(parents=True)
    records = [
        {"step": step, "tokens": 1024 * step, "epoch": step / 4, "loss": loss, "learning_rate": rate, "gradient_norm": 1.0}
        | {"step_ms": 100.0, "data_wait_ms": 1.0, "tokens_per_second": 10_240.0, "memory_gib": 0.5, "recompiles": 0}
        for step, loss in enumerate(losses, start=1)
    ]
    if held_out:
        records.append({"step": len(losses), "event": "evaluation", "held_out_loss": 2.4, "held_out_perplexity": 11.02})
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = {
        "name": path.name,
        "seed": 42,
        "weights": "fp32",
        "batch": {"tokens": 1024},
        "model": {"config": {"model_type": "qwen3"}},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    if identity:
        (path / "summary.json").write_text(json.dumps(identity))
    return path


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


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


@pytest.mark.parametrize("key", IDENTITY)
def test_runs_that_differ_in_data_order_or_batch_are_refused_and_the_difference_is_named(key, tmp_path, capsys):
    ours = make_run(tmp_path / "ours")
    theirs = make_run(tmp_path / "theirs", identity=IDENTITY | {key: "other"})
    assert main([str(ours), str(theirs)]) == 2
    message = capsys.readouterr().err
    assert f"`{key}`: {IDENTITY[key]} and other" in message and "ours" in message and "theirs" in message
    assert not (tmp_path / "comparison.png").exists()


def test_a_run_whose_data_is_not_known_is_reported_alone_and_compared_with_none(tmp_path):
    unknown, known = make_run(tmp_path / "unknown", identity=None), make_run(tmp_path / "known")
    check_comparable([read_run(unknown)])
    for pair in ([unknown, known], [known, unknown]):
        with pytest.raises(InputError, match=r"unknown: its files do not say its `data_fingerprint`"):
            check_comparable([read_run(path) for path in pair])


def test_a_run_that_is_still_going_is_compared_by_the_fingerprint_in_its_environment(tmp_path):
    going = make_run(tmp_path / "going", identity=None)
    (going / "environment.json").write_text(json.dumps({"data_fingerprint": "ab12"}))
    check_comparable([read_run(going), read_run(make_run(tmp_path / "done"))])


def test_figures_come_from_the_metrics_even_where_an_older_summary_says_otherwise(tmp_path):
    run = read_run(make_run(tmp_path / "run", identity=IDENTITY | {"steps": 2, "loss": 9.0}))
    assert run.summary["steps"] == 4 and run.summary["loss"] == 2.25 and run.data_fingerprint == "ab12"


def test_the_table_shows_each_runs_figures_and_a_dash_for_what_is_not_known(tmp_path):
    table = summary_table([read_run(make_run(tmp_path / "a")), read_run(make_run(tmp_path / "b", held_out=False))])
    _header, _rule, a, b = cells(table)
    assert a == ["a", "4", "4.10k", "2.9375", "2.4000", "11.02", "10.2k", "–", "512 MiB", "1.0 %"]
    assert b == ["b", "4", "4.10k", "2.9375", "–", "–", "10.2k", "–", "512 MiB", "1.0 %"]
    assert len({len(line) for line in table.splitlines()}) == 1


def test_the_paired_difference_uses_the_steps_that_both_runs_have_and_only_finite_losses(tmp_path):
    first = read_run(make_run(tmp_path / "first", [4.0, 3.0, None, 2.0, 2.0]))
    second = read_run(make_run(tmp_path / "second", [4.5, 3.1, 2.5, 2.3]))
    steps, differences = difference(first, second)
    assert steps.tolist() == [1, 2, 4] and differences == pytest.approx([0.5, 0.1, 0.3])
    row = cells(comparison_table([first, second]))[-1]
    assert row == ["second", "+0.3000", "0.2000", "3", "–", "–", "1"]


@given(losses=st.lists(st.floats(-1e3, 1e3) | st.just(float("nan")), max_size=50), window=st.integers(1, 60))
def test_the_moving_mean_is_the_mean_of_the_finite_values_around(losses, window):
    values = np.array(losses, dtype=np.float64)
    got = moving_mean(values, window)
    for i in range(len(values)):
        around = values[max(0, i - (window - 1) // 2) : i + window // 2 + 1]
        around = around[np.isfinite(around)]
        assert np.isnan(got[i]) if not len(around) else got[i] == pytest.approx(around.mean(), abs=1e-8)


@pytest.mark.parametrize(
    "losses",
    [[3.0], [3.0, 2.0], [None, None, None], [2.0] * 300, [11.0, None, *np.linspace(8, 2, 500).tolist()]],
    ids=["one step", "two steps", "no finite loss", "a flat line", "a gap"],
)
def test_any_run_can_be_drawn(losses, tmp_path):
    run = read_run(make_run(tmp_path / "run", losses, held_out=len(losses) > 1))
    plot_losses([run], tmp_path / "new" / "loss.png")
    picture = imread(tmp_path / "new" / "loss.png")
    assert picture.shape[:2] == (975, 1350) and picture.std() > 0.05
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["loss.png"]


def test_a_later_run_with_a_higher_learning_rate_stays_in_the_picture(tmp_path):
    runs = [read_run(make_run(tmp_path / name, rate=rate)) for name, rate in (("low", 1e-3), ("high", 4e-3))]
    plot_losses(runs, tmp_path / "comparison.png")
    picture = imread(tmp_path / "comparison.png")[..., :3]
    rates = picture[int(0.8 * len(picture)) :]  # the panel at the bottom
    orange = np.array([0xD5, 0x5E, 0x00]) / 255  # the second run's colour
    assert (np.abs(rates - orange).max(axis=-1) < 0.02).any()


def test_the_command_line_draws_into_the_run_folder_and_prints_the_table(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert (run / "loss.png").exists() and "| run |" in capsys.readouterr().out


def test_the_command_line_compares_runs_into_a_picture_of_its_own(tmp_path, capsys):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", [4.1, 3.1, 2.6, 2.35])]
    assert main([*map(str, runs)]) == 0
    assert (tmp_path / "comparison.png").exists() and not (runs[0] / "loss.png").exists()
    assert "+0.1000" in capsys.readouterr().out
    assert main([*map(str, runs), "--out", str(tmp_path / "mine.png")]) == 0
    assert (tmp_path / "mine.png").exists()


def test_importing_the_report_needs_neither_torch_nor_the_drawing_library():
    program = "import sys, pretrain.report; print([m for m in ('torch', 'matplotlib', 'transformers') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout.strip() == "[]"
