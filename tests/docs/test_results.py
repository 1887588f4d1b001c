"""The index lists every result file, and rows of tables have the numbers of the files they link.

tests/docs/test_generate.py compares generated tables with their files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from benchmarks import card as gpu_card
from benchmarks.planner_rows import read_rows
from tests.conftest import ROOT

RESULTS = ROOT / "benchmarks/results"
INDEX = (RESULTS / "INDEX.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in INDEX.splitlines()
    if line.startswith("| [")
]
FILES = {re.search(r"\((.*)\)", row[0])[1]: row for row in ROWS}
# Thousands that are lengths of documents or tokens of a step.
LENGTHS = {"1,024", "2,048", "4,096", "8,192", "32,768", "131,072", "262,144", "524,288"}


def test_the_index_names_every_file_once():
    files = {
        path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file()
    } - {"INDEX.md"}
    assert FILES.keys() == files and len(ROWS) == len(files)
    assert all(content for _, content, _ in FILES.values())


def test_the_index_has_the_commit_of_each_file():
    for name in FILES:
        if name.endswith(".json"):
            content = json.loads((RESULTS / name).read_text(encoding="utf-8"))
            git = (content.get("environment") or {}).get("git") or {"commit": content.get("commit")}
            if git["commit"] is None:
                # Each topology of an equality file has an environment of its own.
                git = content["ddp"]["environment"]["git"]
            assert FILES[name][2] == git["commit"][:8] + (" (dirty)" if git.get("dirty") else "")


def numbers(value: Any) -> Iterator[float]:
    """Yield all numbers in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, (int, float)):
        yield value


def test_numbers_in_a_row_are_in_the_files_that_it_links_to():
    published = {f"{row.speed:,.0f}" for row in read_rows("published")}
    compared = 0
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        for row in page.read_text(encoding="utf-8").splitlines():
            files = re.findall(r"results/(\w+/\w+\.json)\)", row) if row.startswith("|") else []
            contents = [json.loads((RESULTS / name).read_text("utf-8")) for name in files]
            recorded = published | {f"{number:,.0f}" for number in numbers(contents)} | LENGTHS
            stated = set(re.findall(r"\d+(?:,\d{3})+", row)) if files else set()
            assert stated <= recorded, f"{page.name}: {row}"
            compared += len(stated - LENGTHS)
    assert compared > 60


def test_published_cards_are_complete_and_unchanged():
    for path in RESULTS.glob("cards/*.json"):
        content = gpu_card.read(path)
        assert {"ways", "losses", "bits", "left_out", "code"} <= content.keys()
        for name in content["ways"]:
            assert gpu_card.failures(name, content) == []
