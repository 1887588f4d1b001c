"""Figures as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.units import count, duration, memory, operations, three_digits


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.00k"),
        (47523, "47.5k"),
        (999_999, "1.00 M"),
        (364e6, "364 M"),
        (1.72e9, "1.72 B"),
        (0.5, "0.500"),
    ],
)
def test_counts_have_three_digits(value, shown):
    assert count(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *[(0, "0 s"), (0.42, "0.42 s"), (0.996, "1.0 s"), (3.2, "3.2 s"), (9.96, "10 s"), (59.7, "1 m 00 s"), (245, "4 m 05 s")],
        *[(3599.6, "1 h 00 m"), (6720, "1 h 52 m"), (86399, "1 d 00 h"), (3 * 86400 + 4 * 3600, "3 d 04 h")],
    ],
)
def test_durations_have_the_two_units_that_matter(seconds, shown):
    assert duration(seconds) == shown


@given(value=st.floats(1e-3, 999.4))
def test_three_digits_are_within_half_a_unit_of_the_last(value):
    assert abs(float(three_digits(value)) - value) <= max(0.0005, value * 0.00501) and len(three_digits(value)) <= 5


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *[(0, "0 FLOP"), (999.94, "999.9 FLOP"), (999.96, "1 kFLOP"), (999_940, "999.9 kFLOP"), (999_960, "1 MFLOP")],
        *[(1.058e10, "10.58 GFLOP"), (9.9999e14, "1 PFLOP"), (1.387e15, "1.387 PFLOP"), (8.4e22, "84 ZFLOP")],
    ],
)
def test_operations_have_four_digits_and_never_a_thousand_of_a_unit(value, shown):
    assert operations(value) == shown
    assert [operations(1000.0**scale).split()[0] for scale in range(9)] == ["1"] * 9


def test_memory_changes_its_unit_below_a_gib():
    assert (memory(80.94), memory(1.0), memory(0.5)) == ("80.9 GiB", "1.0 GiB", "512 MiB")
