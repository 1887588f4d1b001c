"""`report --watch`: the page is written again as runs go on, until all have ended."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from foundation.errors import InputError
from pretrain.__main__ import main
from pretrain.compare.comparison import RunComparison
from pretrain.compare.watch import follow, has_ended
from pretrain.metrics.run_record import read_run
from tests.pretrain.compare.made_runs import make_run


def finish(run: Path, steps: int) -> None:
    """As a run does at its end."""
    (run / "summary.json").write_text(json.dumps({"steps": steps}))


def test_the_page_is_written_when_a_run_has_gone_on_and_once_more_at_the_end(tmp_path: Path):
    run, written, said = tmp_path / "run", [], []

    def make(every: float | None) -> RunComparison:
        comparison = RunComparison.over([read_run(run)])
        written.append((every, len((run / "metrics.jsonl").read_text().splitlines())))
        return comparison

    def step_once_more() -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 5, "tokens": 20_480, "epoch": 1.25, "loss": 2.0, "step_ms": 100.0}) + "\n")

    def evaluate_before_the_first() -> None:
        run.mkdir()
        (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "event": "evaluation", "held_out_loss": 4.5}) + "\n")

    def train() -> None:
        shutil.rmtree(run)
        make_run(run)

    end = lambda: finish(run, 5)  # noqa: E731
    happening = iter([evaluate_before_the_first, train, lambda: None, lambda: finish(run, 3), step_once_more, end])
    follow([run], tmp_path / "x.html", make, 7.0, say=said.append, sleep=lambda seconds: next(happening)())
    assert written == [(7.0, 5), (7.0, 6), (None, 6)], "not where nothing has changed; the last is not read again"
    assert said[1] == f"waiting for the first step of {run}" and f"Page: {tmp_path / 'x.html'}" in said[-1]
    assert has_ended(run, read_run(run).summary)


def test_ctrl_c_ends_watching_with_a_page_that_is_not_read_again(tmp_path: Path):
    run, written = make_run(tmp_path / "run"), []

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    make = lambda every: written.append(every) or RunComparison.over([read_run(run)])  # noqa: E731
    follow([run], tmp_path / "x.html", make, 3.0, say=lambda text: None, sleep=interrupted)
    assert written == [3.0, None]


def test_of_several_runs_those_without_a_step_are_waited_for(tmp_path: Path):
    runs = [tmp_path / name for name in ("one", "two", "three")]
    make_run(runs[0])
    finish(runs[0], 4)
    said, sleeps = [], []

    def begin(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 1:
            runs[1].mkdir()
            (runs[1] / "metrics.jsonl").write_text("")
            make_run(runs[2])
        elif len(sleeps) == 2:
            shutil.rmtree(runs[1])
            make_run(runs[1])
        else:
            finish(runs[len(sleeps) - 2], 4)

    make = lambda every: RunComparison.over([read_run(run) for run in runs])  # noqa: E731
    follow(runs, tmp_path / "x.html", make, 7.0, say=said.append, sleep=begin)
    waits = [f"waiting for the first step of {which}" for which in (f"{runs[1]}, {runs[2]}", runs[1])]
    assert [line for line in said if line.startswith("waiting")] == waits and len(sleeps) == 4


def test_the_command_follows_a_run_that_has_ended_to_its_end_at_once(tmp_path: Path, capsys):
    run, page = make_run(tmp_path / "run"), tmp_path / "page.html"
    finish(run, 4)
    os.utime(run / "summary.json", (0, 0))  # copied, in whatever order
    assert main(["report", str(run), "--watch", "5", "--out", str(page)]) == 0
    assert "step 4" in capsys.readouterr().out and page.exists()


def test_a_run_that_was_halted_has_ended_and_one_of_which_no_step_is_there_is_said(tmp_path: Path):
    run = make_run(tmp_path / "run", (4.0, None))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert not has_ended(run, read_run(run).summary)
    lines[1]["halted"] = "the loss is nan"
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert has_ended(run, read_run(run).summary)
    (run / "metrics.jsonl").write_text(json.dumps(lines[2]) + "\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl: holds no step yet; wait for the run's first"):
        read_run(run)
