"""Formatting of numbers and Markdown tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.units import (
    WIDTH,
    count,
    duration,
    markdown,
    memory,
    operations,
    tables,
    three_digits,
)

COUNTS = {0: "0", 950: "950", 999.6: "1.00k", 47523: "47.5k", 999_999: "1.00 M", 364e6: "364 M"}
SECONDS = {0: "0 s", 0.42: "0.42 s", 0.996: "1.0 s", 9.96: "10 s", 59.7: "1 m 00 s"}
MINUTES = {245: "4 m 05 s", 3599.6: "1 h 00 m", 6720: "1 h 52 m", 86399: "1 d 00 h"}
FLOPS = {0: "0 FLOP", 999.94: "999.9 FLOP", 1_234.5: "1.234 kFLOP", 1.387e15: "1.387 PFLOP"}
MEMORY = {80.94: "80.9 GiB", 1.0: "1.0 GiB", 0.5: "512 MiB"}


@pytest.mark.parametrize(
    ("format_value", "expected"),
    [
        (count, COUNTS | {0.5: "0.500"}),
        (duration, SECONDS | MINUTES | {3 * 86400 + 4 * 3600: "3 d 04 h"}),
        (operations, FLOPS),
        (memory, MEMORY),
    ],
)
def test_numbers_have_three_or_four_digits_and_a_unit(format_value, expected):
    assert {value: format_value(value) for value in expected} == expected


@given(value=st.floats(1e-3, 999.4))
def test_three_digits_are_within_half_a_unit_of_the_last(value):
    assert abs(float(three_digits(value)) - value) <= max(0.0005, value * 0.00501)
    assert len(three_digits(value)) <= 5


HEADER = ("on", "speed by", "tokens/s")
CELLS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]))


@given(st.lists(CELLS, min_size=3, max_size=3))
def test_no_text_in_a_cell_changes_the_number_of_cells(cells: list[str]):
    *_, row = markdown(HEADER, [cells]).split("\n")
    assert row.replace("\\|", "").count("|") == len(HEADER) + 1


def test_no_line_of_tables_is_wider_than_the_output():
    header = ["run", *(f"column {index}" for index in range(40))]
    rows = [[run, *["equal"] * 20, *[run] * 20] for run in ("first", "second")]
    lines = tables(header, rows).splitlines()
    assert lines[0].startswith("Equal in all rows: column 0 equal, ")
    assert max(map(len, lines)) <= WIDTH
