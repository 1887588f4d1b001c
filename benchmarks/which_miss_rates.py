"""Simulate how often the intervals of `which` miss the true mean, and how soon they decide.

    python -m benchmarks.which_miss_rates --out benchmarks/results/loss/which_miss_rates.json

A series has the paired differences of twenty seeds. An interval misses if it excludes the true mean
after any number of seeds, from its minimum on. `normal_is_told` is the share of series of normal
differences with mean zero that are found equivalent after 5, 10 and 20 seeds, for several standard
deviations in units of the margin. The interval of the product is compared with alternatives that
allow for skewness:

* `wider`: its half-width times 1.5.
* `skewness`: its half-width times 1 + 2 |g| / √n, where g is the sample's skewness.
* `johnson`: Johnson's (1978) t statistic, corrected for skewness, with the product's bounds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.machine import measured_on
from foundation.files import write_json
from pretrain.compare.differences import FEWEST_SEEDS, MIXED_OVER
from pretrain.compare.verdicts import MOST_SEEDS

# Error probability of one candidate, and of each of four candidates.
ERRORS = (0.05, 0.0125)
SEEDS = np.arange(1, MOST_SEEDS + 1)
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
# Distributions with their true mean. Signs do not matter, because the interval is symmetric.
DIFFERENCES: dict[str, tuple[Draw, float]] = {
    "normal": (lambda draw, shape: draw.normal(size=shape), 0.0),
    "Student's t, 3 degrees of freedom": (lambda draw, shape: draw.standard_t(3, size=shape), 0.0),
    "exponential": (lambda draw, shape: draw.exponential(size=shape), 1.0),
    "lognormal": (lambda draw, shape: draw.lognormal(size=shape), math.exp(0.5)),
    "normal, one seed in ten 9 standard deviations off": (
        lambda draw, shape: draw.normal(size=shape) + 9 * (draw.random(shape) < 0.1),
        0.9,
    ),
    "normal, one seed in ten 100 standard deviations off": (
        lambda draw, shape: draw.normal(size=shape) + 100 * (draw.random(shape) < 0.1),
        10.0,
    ),
}
# Map an interval to: factor of the half-width, weight of the skewness in the half-width, True for
# Johnson's correction, and least number of seeds.
INTERVALS: dict[str, tuple[float, float, bool, int]] = {
    "the product's": (1.0, 0.0, False, FEWEST_SEEDS),
    "the product's, from 6 seeds on": (1.0, 0.0, False, 6),
    "wider, from 6 seeds on": (1.5, 0.0, False, 6),
    "skewness": (1.0, 2.0, False, FEWEST_SEEDS),
    "skewness, from 6 seeds on": (1.0, 2.0, False, 6),
    "johnson, from 6 seeds on": (1.0, 0.0, True, 6),
}


def half_widths(values: np.ndarray, error: float) -> np.ndarray:
    """Return `anytime_half_width` after each seed of each series, as infinity if it is None."""
    seeds = np.arange(1, values.shape[1] + 1)
    mean = np.cumsum(values, axis=1) / seeds
    squares = np.maximum(np.cumsum(values**2, axis=1) - seeds * mean**2, 0.0)
    spread = 1 + seeds * MIXED_OVER
    with np.errstate(over="ignore"):
        bound = (np.sqrt(spread) / error) ** (2 / seeds)
    is_finite = (bound < spread) & (seeds >= FEWEST_SEEDS)
    bound = np.where(is_finite, bound, 1.0)
    half = np.sqrt(squares * (bound - 1) / (seeds * (1 - bound / spread)))
    return np.where(is_finite, half, np.inf)


def skewness(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return standard deviation and skewness of each series after each seed.

    The skewness of two or fewer seeds is 0.
    """
    mean, second, third = (np.cumsum(values**power, axis=1) / SEEDS for power in (1, 2, 3))
    deviation = np.sqrt(np.maximum(second - mean**2, 1e-12) * SEEDS / np.maximum(SEEDS - 1, 1))
    cubes = (third - 3 * mean * second + 2 * mean**3) * SEEDS**2
    factor = np.maximum((SEEDS - 1) * (SEEDS - 2), 1)
    return deviation, np.where(SEEDS > 2, cubes / (factor * deviation**3), 0.0)


def miss_rate(values: np.ndarray, true: float, error: float, interval: str) -> float:
    """Return the share of series whose interval excludes the true mean at least once."""
    factor, weight, johnson, least = INTERVALS[interval]
    distance = np.cumsum(values, axis=1) / SEEDS - true
    deviation, skew = skewness(values)
    half = half_widths(values, error) * factor * (1 + weight * np.abs(skew) / np.sqrt(SEEDS))
    if johnson:
        distance = distance + skew * deviation / (6 * SEEDS) + skew * distance**2 / (3 * deviation)
    return float((np.abs(distance) > half)[:, least - 1 :].any(axis=1).mean())


def shares_within(values: np.ndarray, error: float, interval: str) -> list[float]:
    """Return the share of series whose interval is within ± 1 after at most 5, 10 and 20 seeds."""
    factor, weight, _, least = INTERVALS[interval]
    _, skew = skewness(values)
    half = half_widths(values, 2 * error) * factor
    half = half * (1 + weight * np.abs(skew) / np.sqrt(SEEDS))
    within = np.abs(np.cumsum(values, axis=1) / SEEDS) + half < 1
    shares = [within[:, least - 1 : seeds].any(axis=1).mean() for seeds in (5, 10, 20)]
    return [round(float(share), 3) for share in shares]


def figures(
    drawn: dict[str, tuple[np.ndarray, float]],
    error: float,
    interval: str,
) -> dict[str, object]:
    """Return the miss rates by distribution and the shares of equivalent series.

    The shares are only computed for intervals that are symmetric about the mean.
    """
    misses = {}
    for name, (values, true) in drawn.items():
        misses[name] = round(miss_rate(values, true, error, interval), 4)
    uses_johnson = INTERVALS[interval][2]
    if uses_johnson:
        return {"misses": misses}
    normal, _ = drawn["normal"]
    shares = {
        f"{deviation:g} margins": shares_within(deviation * normal, error, interval)
        for deviation in (0.3, 0.5, 0.7)
    }
    return {"misses": misses, "normal_is_told": shares}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--series", type=int, default=100_000, help="number of simulated series of each rate"
    )
    parser.add_argument("--out", type=Path, required=True, help="result file to write")
    options = parser.parse_args()
    draw = np.random.default_rng(0)
    shape = (options.series, MOST_SEEDS)
    drawn = {name: (make(draw, shape), true) for name, (make, true) in DIFFERENCES.items()}
    intervals = {}
    for name in INTERVALS:
        intervals[name] = {f"error {error:g}": figures(drawn, error, name) for error in ERRORS}
    report = {
        "what": "How often intervals of `which` miss the mean after any number of 3 to 20 seeds.",
        **measured_on(),
        "series": options.series,
        "intervals": intervals,
    }
    write_json(options.out, report)
    print(json.dumps(intervals, indent=1))


if __name__ == "__main__":
    main()
