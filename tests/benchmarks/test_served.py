"""Tests of the tables of trained and served precisions."""

import math

import pytest

from benchmarks.evidence.served import (
    BEFORE_DECAY,
    LAST,
    MEAN,
    cells_of,
    figure,
    merged_table,
    options_table,
    served_table,
)

# Deviations of three seeds from their mean: the standard deviation is 0.01, and the 95 % interval
# of the mean is ± 4.3027 * 0.01 / sqrt(3) = ± 0.02484, by a table of Student's t with two degrees
# of freedom.
DEVIATIONS = (-0.01, 0.0, 0.01)


def rows(matrix, trained, served, mean, *, merged=(100,), deviations=DEVIATIONS):
    """Return lines of a result file: losses of three seeds around `mean`."""
    facts = {"matrix": matrix, "trained": trained, "served": served, "merged": [*merged]}
    return [
        {**facts, "steps": 100, "seed": seed, "loss": mean + seed + deviation}
        for seed, deviation in enumerate(deviations)
    ]


def bf16_rows(matrix="served"):
    """Return losses of BF16 trained and served: 1, 2 and 3, with a mean of 2."""
    return rows(matrix, "bf16", "bf16", 1.0, deviations=(0.0, 0.0, 0.0))


def test_an_interval_is_that_of_paired_differences():
    cells = cells_of([*bf16_rows(), *rows("served", "nvfp4", "nvfp4", 1.04)])
    table = served_table(cells_of([*bf16_rows(), *rows("served", "nvfp4", "bf16", 1.04)]))
    bf16 = cells["served", "bf16", "bf16", LAST]
    losses = cells["served", "nvfp4", "nvfp4", LAST]
    # A difference of 0.04 in percent of a mean loss of 2. The spread between seeds, which is 1,
    # cancels in the pairs.
    half = 100 * 4.3027 * 0.01 / math.sqrt(3) / 2
    assert figure(losses, bf16, bf16) == f"+2.00 ± {half:.2f} %"
    assert f"+2.00 ± {half:.2f} %" in table


@pytest.mark.parametrize("missing", ["losses", "compared", "unit"])
def test_a_seed_that_is_missing_on_one_side_is_ignored(missing):
    sides = {name: {1: 2.0, 2: 2.0, 3: 2.0} for name in ("losses", "compared", "unit")}
    sides["losses"] = {1: 2.02, 2: 2.02, 3: 2.1}
    del sides[missing][3]
    # Two seeds are too few for an interval that is worth printing.
    assert figure(**sides).startswith("+1.00")
    assert "2.1" not in figure(**sides)


def test_means_of_checkpoints_are_compared_with_their_newest():
    kinds = cells_of(
        [
            *bf16_rows(),
            *rows("served", "nvfp4", "nvfp4", 1.5),
            *rows("served", "nvfp4", "nvfp4", 1.48, merged=(100, 95, 90, 85)),
            *rows("served", "nvfp4", "nvfp4", 1.6, merged=(80,)),
            *rows("served", "nvfp4", "nvfp4", 1.5, merged=(80, 75, 70, 65)),
        ]
    )
    assert kinds["served", "nvfp4", "nvfp4", MEAN + BEFORE_DECAY][0] == pytest.approx(1.49)
    table = merged_table(kinds)
    assert "−1.00 ± 0.00 %" in table
    assert "−5.00 ± 0.00 %" in table


def test_an_option_is_compared_with_the_default_of_its_precision():
    matrix = "served_confirmation"
    table = options_table(
        cells_of(
            [
                *bf16_rows(matrix),
                *rows(matrix, "nvfp4", "bf16", 1.04),
                *rows(matrix, "nvfp4", "own", 1.06, merged=()),
                *rows(matrix, "chosen", "bf16", 1.02),
                *rows(matrix, "chosen", "own", 1.05, merged=()),
            ]
        ),
        matrix,
    )
    chosen = next(line for line in table.splitlines() if "chosen" in line)
    assert "+1.00 ± 1.24 %" in chosen
    assert "−1.00 ± 0.00 %" in chosen
    assert "−0.50 ± 0.00 %" in chosen
