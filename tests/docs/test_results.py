"""The figures of the docs are those of the result files."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.evidence.tables import (
    ANSWER,
    PAGE,
    SCALES,
    Endpoint,
    Scale,
    answer_table,
    holm,
    page,
    served_loss,
    share,
)
from benchmarks.machine import with_tables
from tests.conftest import ROOT

RESULTS = ROOT / "benchmarks/results"
INDEX = (RESULTS / "INDEX.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in INDEX.splitlines()
    if line.startswith("| [")
]
FILES = {re.search(r"\((.*)\)", row[0])[1]: row for row in ROWS}


def test_the_index_names_every_file_once_and_a_page_that_links_to_it():
    files = {
        path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file()
    } - {"INDEX.md"}
    assert FILES.keys() == files and len(ROWS) == len(files)
    for name, (_, content, page_link, _) in FILES.items():
        page_path = RESULTS / re.search(r"\((.*)\)", page_link)[1]
        text = page_path.read_text(encoding="utf-8")
        is_linked = name in text or (name.endswith(".jsonl") and "results/INDEX.md" in text)
        assert content and is_linked, name


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
def test_the_index_has_the_commit_of_a_file(name: str):
    content = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    git = (content.get("environment") or {}).get("git") or {"commit": content.get("commit")}
    commit = (git["commit"] or "not recorded")[: 8 if git["commit"] else None]
    assert FILES[name][3] == commit + (" (dirty)" if git.get("dirty") else "")


def test_the_tables_of_the_evidence_are_those_of_its_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    scales = {name: Scale.read(name) for name in SCALES}
    remedy = "python -m benchmarks.evidence.tables"
    assert PAGE.read_text(encoding="utf-8") == page(scales), remedy
    text = ANSWER.read_text(encoding="utf-8")
    assert text == with_tables(ANSWER, "evidence", answer_table(scales)), remedy


def test_the_figures_of_the_recommendations_are_those_of_the_tables():
    text = ANSWER.read_text(encoding="utf-8")
    section = text.partition("## What to use when")[2].partition("\n## ")[0]
    tables = text.partition("<!-- /evidence -->")[0] + (ROOT / "docs/experts.md").read_text("utf-8")
    losses = re.findall(r"[+−]\d\.\d\d ± \d\.\d\d %", section)
    assert len(losses) >= 8 and [loss for loss in losses if loss not in tables] == []
    results = (ROOT / "docs/results.md").read_text("utf-8")
    speeds = re.findall(r"\d+,\d{3}", section)
    assert len(speeds) >= 5 and [speed for speed in speeds if speed not in results] == []


def test_readmes_losses_are_those_of_the_evidence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    readme = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .partition("## Which precision")[2]
        .partition("\n## ")[0]
    )
    served = Endpoint.of(
        {name: Scale.read(name) for name in ("14m", "35m", "35m_once", "111m", "14m_lr2")},
        served_loss,
    )
    for row, cell in {
        "`weights=bf16_exact` | 78": "delayed",
        "+head": "delayed_head",
        "mxfp8": "mxfp8",
        "nvfp4": "nvfp4_kept",
    }.items():
        (line,) = [line for line in readme.splitlines() if line.startswith("|") and row in line]
        # The row for new data, if there is one.
        for scale in ("14m", "35m_once" if cell == "delayed" else "35m", "111m"):
            if difference := served.differences.get((scale, f"{cell}_branch")):
                assert f"{share(difference)}, {served.verdict(scale, f'{cell}_branch')}" in line


def test_holms_correction_counts_the_smallest_most_often():
    p_values = {("14m", "a"): 0.01, ("14m", "b"): 0.04, ("14m", "c"): 0.03, ("14m", "d"): 0.6}
    assert list(holm(p_values).items()) == [
        (("14m", "a"), 0.04),
        (("14m", "c"), 0.09),
        (("14m", "b"), 0.09),
        (("14m", "d"), 0.6),
    ]


def test_readmes_speeds_are_those_of_the_result_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files, table = re.search(r"\*\*Speed\.\*\*(.*?)\n(\|.*?)\n\n", text, re.DOTALL).groups()
    _, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    ]
    (file,) = re.findall(r"results/[\w/]+\.json", files)
    assert len(rows) >= 4
    for way, _, shown in rows:
        # A row may name its own file.
        (row_file,) = re.findall(r"results/[\w/]+\.json", way) or [file]
        ways = json.loads((ROOT / "benchmarks" / row_file).read_text(encoding="utf-8"))["ways"]
        speeds = {
            f"{result['tokens_per_second']['median']:,.0f}"
            for result in ways.values()
            if result["status"] == "ok"
        }
        assert set() < set(re.findall(r"\d+,\d{3}", shown)) <= speeds
