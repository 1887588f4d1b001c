"""`python -m pretrain report`: what it writes and prints, the gate, watching, and what it refuses."""

from __future__ import annotations

import json
import re
import time

import pytest

from pretrain.__main__ import main
from pretrain.compare.report import Report
from pretrain.metrics.run_record import read_run
from tests.pretrain.compare.made_runs import make_run, noisy, note, rows_of, trained


def tables(runs: list, *vary: str) -> str:
    return "\n\n".join(Report.over(runs, vary).tables())


def test_the_tables_have_each_runs_figures_and_a_dash_for_what_is_not_known(tmp_path):
    runs = [
        trained(tmp_path / "a"),
        trained(tmp_path / "b", [4.0, 3.5, 2.5, 2.0], "precision=delayed", held_out=False),
    ]
    a, b = (rows_of(tables(runs))[name][0] for name in "ab")
    assert a[:8] == ["bf16", "fp32", "torch", "4", "16.4k", "2.9375", "2.4000", "10,240"]
    assert b[:8] == ["delayed", "fp32", "torch", "4", "16.4k", "3.0000", "–", "10,240"]
    assert a[8:13] == ["–", "50.0 %", "512 MiB", "1.2 %", "1.0 %"] and b[8] == "1.00"


def test_a_figure_that_is_not_the_runs_own_or_of_another_step_is_marked(tmp_path):
    runs = [
        trained(tmp_path / "alone", audit={"backend": "emulation"}),
        trained(tmp_path / "shared", side_by_side=True),
    ]
    early = make_run(tmp_path / "early", held_out=False)
    text = (early / "metrics.jsonl").read_text()
    (early / "metrics.jsonl").write_text(
        text.replace(
            '{"step": 4', '{"step": 2, "event": "evaluation", "held_out_loss": 2.5}\n{"step": 4'
        )
    )
    text = tables([*runs, read_run(early)])
    assert (
        "10,240 (emulated)" in rows_of(text)["alone"][0]
        and "10,240" not in rows_of(text)["shared"][0]
    )
    assert "2.5000 (step 2)" in rows_of(text)["early"][0]
    fell_back = trained(
        tmp_path / "fell",
        (4.0, 3.0),
        "precision=nvfp4",
        audit={"backend": "torch", "effective": "bf16"},
    )
    assert "nvfp4 (ran bf16)" in rows_of(tables([fell_back]))["fell"][0]


def test_the_command_line_compares_runs_into_files_of_their_own(tmp_path, capsys):
    runs = [str(make_run(tmp_path / "a")), str(make_run(tmp_path / "b", [4.1, 3.1, 2.6, 2.35]))]
    assert main(["report", *runs]) == 0
    assert "+0.10000" in capsys.readouterr().out and sorted(
        path.name for path in tmp_path.iterdir()
    ) == ["a", "b", "recipe.yaml"]
    out = tmp_path / "out"
    (tmp_path / "a.log").touch()
    assert (
        main(["report", runs[1], *runs, str(tmp_path / "a.log"), "--out", str(out / "mine.html")])
        == 0
    )
    assert "minus b" in (out / "mine.html").read_text() and "minus b" in capsys.readouterr().out


# ── The gate ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_gate_fails_with_1_where_a_loss_ends_higher_and_passes_where_it_ends_lower(
    tmp_path, capsys
):
    base, same = (
        make_run(tmp_path / "base", noisy(3.0, 1)),
        make_run(tmp_path / "same", noisy(3.002, 2), "precision=delayed"),
    )
    worse, better = (
        make_run(tmp_path / "worse", noisy(3.05, 3)),
        make_run(tmp_path / "better", noisy(2.9, 4)),
    )
    command = ["report", "--gate", "0.01"]
    assert main([*command, str(base), str(same), str(better)]) == 0
    assert capsys.readouterr().out.endswith("gate of 0.01 nats: passed\n")
    assert main([*command, str(base), str(same), str(worse)]) == 1
    assert re.search(
        r"gate: worse ends \+0\.05\d+ ± 0\.00\d+ nats from base", capsys.readouterr().out
    )


def test_what_came_to_no_end_fails_the_gate_and_is_no_baseline_of_one(tmp_path, capsys):
    base = make_run(tmp_path / "base", noisy(3.0, 1), "train.steps=400")
    short = make_run(tmp_path / "short", noisy(3.0, 1)[:100], "train.steps=400")
    halted = make_run(tmp_path / "halted", noisy(3.0, 1)[:2], "train.steps=400")
    lost = make_run(tmp_path / "lost", [*noisy(3.0, 1)[:399], None], "train.steps=400")
    note(halted, halted="step 2: the gradient norm is nan")
    for run in (short, halted, lost):
        assert main(["report", str(base), str(run), "--gate", "0.01"]) == 1
        assert f"gate: {run.name} " in capsys.readouterr().out
        assert main(["report", str(run), str(base), "--gate", "0.01"]) == 2
        assert run.name in capsys.readouterr().err
    other = make_run(tmp_path / "other", noisy(3.0, 1), "seed=7", "train.steps=400")
    assert main(["report", str(base), str(other), "--vary", "seed", "--gate", "0.01"]) == 2
    assert main(["report", str(base), f"{base}/", "--gate", "0.01"]) == 2, "beside itself"


@pytest.mark.parametrize(("seeds", "above", "status"), [(3, 0.0, 0), (3, 0.5, 1), (2, 0.0, 1)])
def test_the_gate_judges_groups_of_seeds_by_their_interval(seeds, above, status, tmp_path, capsys):
    paths = [
        make_run(
            tmp_path / f"{name}-seed{seed}",
            noisy(3.0 + more + seed / 1e4, seed),
            *settings,
            f"seed={seed}",
            held_out=False,
        )
        for name, more, settings in (("base", 0.0, ()), ("low", above, ("precision=delayed",)))
        for seed in range(seeds)
    ]
    assert main(["report", *map(str, paths), "--gate", "0.01"]) == status
    assert status == 0 or "gate: low " in capsys.readouterr().out


# ── Watching ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_is_written_as_runs_go_on_and_once_more_at_their_end(
    tmp_path, capsys, monkeypatch
):
    """A run that has not begun is waited for; every sleep a run goes on."""
    page, pages = tmp_path / "x.html", []
    one, two = make_run(tmp_path / "one"), tmp_path / "two"
    (one / "summary.json").write_text(json.dumps({"steps": 4}))

    def begin() -> None:
        assert not page.exists()
        make_run(two, (4.0, 3.0))

    def go_on() -> None:
        pages.append(page.read_text())
        other = make_run(tmp_path / "whole" / "two")
        (two / "metrics.jsonl").write_text((other / "metrics.jsonl").read_text())
        (two / "summary.json").write_text(json.dumps({"steps": 4}))

    moments = iter([begin, go_on])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(moments)())
    assert main(["report", str(one), str(two), "--out", str(page), "--watch", "7"]) == 0
    assert 'http-equiv="refresh" content="7"' in pages[0] and "http-equiv" not in page.read_text()
    assert capsys.readouterr().out.startswith("following")
