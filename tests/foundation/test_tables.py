"""Tables as Markdown, and as paragraphs where a terminal is too narrow for them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from foundation.tables import fitted, markdown, on_screen

HEADER = ("on", "speed by", "tokens/s")
ROWS = (["1 x H100", "30 to 50 % of the bf16 peak, assumed", "50,605"], ["8 x B200", "–", "897,138"])


def test_a_table_that_fits_is_markdown_and_one_that_does_not_is_a_paragraph_a_row():
    table = markdown(HEADER, ROWS, names=2)
    assert fitted(HEADER, ROWS, len(table.splitlines()[0]), names=2) == table
    lines = fitted(HEADER, ROWS, 40, names=2).splitlines()
    assert lines[0] == "1 x H100" and lines[-1] == "  tokens/s  897,138" and max(map(len, lines)) <= 40
    assert lines[1:3] == ["  speed by  30 to 50 % of the bf16 peak,", "            assumed"]
    assert fitted(HEADER, [["1 x H100", "", "50,605"]], 20) == "1 x H100\n  tokens/s  50,605", "what is empty has no line"


def test_what_is_printed_fits_the_terminal_and_is_whole_elsewhere(monkeypatch):
    table = markdown(HEADER, ROWS)
    assert on_screen(HEADER, ROWS) == table
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    for columns in (40, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert on_screen(HEADER, ROWS) == fitted(HEADER, ROWS, columns)
    monkeypatch.setattr(sys, "stdout", None)
    assert on_screen(HEADER, ROWS) == table


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"])), min_size=3, max_size=3))
def test_whatever_stands_in_a_cell_a_row_has_as_many_cells_as_its_header(cells: list[str]):
    *_, row = markdown(HEADER, [cells]).split("\n")
    assert row.replace("\\|", "").count("|") == len(HEADER) + 1
