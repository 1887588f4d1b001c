"""Tables as Markdown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foundation.tables import markdown, or_dash

HEADER = ("on", "speed by", "tokens/s")
CELLS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]))


def test_names_stand_to_the_left_and_figures_to_the_right():
    table = markdown(HEADER, [["1 x H100", "assumed", "50,605"], ["8 x B200", or_dash(None), "897,138"]], names=2)
    assert table.splitlines() == [
        "| on       | speed by | tokens/s |",
        "|----------|----------|---------:|",
        "| 1 x H100 | assumed  |   50,605 |",
        "| 8 x B200 | –        |  897,138 |",
    ]


@given(st.lists(CELLS, min_size=3, max_size=3))
def test_whatever_stands_in_a_cell_a_row_has_as_many_cells_as_its_header(cells: list[str]):
    *_, row = markdown(HEADER, [cells]).split("\n")
    assert row.replace("\\|", "").count("|") == len(HEADER) + 1
