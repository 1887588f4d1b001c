"""`report --watch`: the page is written again as runs go on, until all have ended."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from pretrain.__main__ import main
from pretrain.compare.watch import follow, has_ended
from tests.pretrain.compare.made_runs import make_run


def test_the_page_is_written_when_a_run_has_gone_on_and_once_more_at_the_end(tmp_path: Path):
    run, written, said = tmp_path / "run", [], []

    def make(every: float | None) -> SimpleNamespace:
        written.append((every, len((run / "metrics.jsonl").read_text().splitlines())))
        return SimpleNamespace(standings=[], answer=lambda: "the answer")

    def step_once_more() -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 5}) + "\n")

    happening = iter([lambda: make_run(run), lambda: None, step_once_more, lambda: (run / "summary.json").write_text("{}")])
    follow([run], tmp_path / "x.html", make, 7.0, say=said.append, sleep=lambda seconds: next(happening)())
    assert written == [(7.0, 5), (7.0, 6), (None, 6)], "not where nothing has changed; the last is not read again"
    assert said[1] == f"waiting for the first step of {run}" and "the answer" in said[-1]
    assert has_ended(run)


def test_ctrl_c_ends_watching_with_a_page_that_is_not_read_again(tmp_path: Path):
    run, written = make_run(tmp_path / "run"), []

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    make = lambda every: written.append(every) or SimpleNamespace(standings=[], answer=str)  # noqa: E731
    follow([run], tmp_path / "x.html", make, 3.0, say=lambda text: None, sleep=interrupted)
    assert written == [3.0, None]


def test_the_command_follows_a_run_that_has_ended_to_its_end_at_once(tmp_path: Path, capsys):
    run, page = make_run(tmp_path / "run"), tmp_path / "page.html"
    (run / "summary.json").write_text("{}")
    assert main(["report", str(run), "--watch", "5", "--out", str(page)]) == 0
    assert "step 4" in capsys.readouterr().out and page.exists()
