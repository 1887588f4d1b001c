"""`python -m pretrain report`: tables and files."""

from __future__ import annotations

from lab.compare.report import Report
from pretrain.__main__ import main
from pretrain.metrics.run_record import read_run
from tests.lab.made_runs import make_run, rows_of, trained


def tables(runs: list, *vary: str) -> str:
    return "\n\n".join(Report.over(runs, vary).tables())


def test_tables_show_the_results_and_a_dash_for_unknown_values(tmp_path):
    runs = [
        trained(tmp_path / "a"),
        trained(tmp_path / "b", [4.0, 3.5, 2.5, 2.0], "precision=delayed", held_out=False),
    ]
    rows = rows_of(tables(runs))
    a = rows["a"][1]
    b = rows["b"][1]
    assert rows["b"][0][:3] == ["1", "3.0000", "+0.0625"], "training losses"
    assert a[:9] == ["bf16", "fp32", "torch", "4", "16.4k", "2.9375", "–", "2.4000", "10,240"]
    assert b[:9] == ["delayed", "fp32", "torch", "4", "16.4k", "3.0000", "+0.06250", "–", "10,240"]
    assert a[9:14] == ["–", "50.0 %", "512 MiB", "1.2 %", "1.0 %"] and b[9] == "1.00"


def test_emulated_shared_and_outdated_values_are_marked(tmp_path):
    runs = [
        trained(tmp_path / "alone", audit={"backend": "emulation"}),
        trained(tmp_path / "shared", side_by_side=True),
    ]
    early = make_run(tmp_path / "early", held_out=False)
    text = (early / "metrics.jsonl").read_text()
    evaluation = '{"step": 2, "event": "evaluation", "held_out_loss": 2.5}\n'
    (early / "metrics.jsonl").write_text(text.replace('{"step": 4', evaluation + '{"step": 4'))
    rows = rows_of(tables([*runs, read_run(early)]))
    assert "10,240 (emulated)" in rows["alone"][1] and "10,240" not in rows["shared"][1]
    assert "2.5000 (step 2)" in rows["early"][1]
    fell_back = trained(
        tmp_path / "fell",
        (4.0, 3.0),
        "precision=nvfp4",
        audit={"backend": "torch", "effective": "bf16"},
    )
    assert "nvfp4 (ran bf16)" in rows_of(tables([fell_back]))["fell"][0]


def test_the_command_prints_tables_and_writes_only_the_page(tmp_path, capsys):
    runs = [str(make_run(tmp_path / "a")), str(make_run(tmp_path / "b", [4.1, 3.1, 2.6, 2.35]))]
    assert main(["report", *runs]) == 0
    assert "+0.10000" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "recipe.yaml"]
    page = tmp_path / "out" / "mine.html"
    log = tmp_path / "a.log"
    log.touch()
    assert main(["report", runs[1], *runs, str(log), "--out", str(page)]) == 0
    assert "minus b" in page.read_text() and "minus b" in capsys.readouterr().out


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    make_run(tmp_path / "rates" / "1e-3")
    assert main(["report", str(tmp_path / "rates")]) == 2
    assert "rates is not a run folder" in capsys.readouterr().err
