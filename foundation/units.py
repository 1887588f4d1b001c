"""Figures as people read them: 47.5k, 1.72 B, 1 h 52 m; and tables of them, on a terminal and in Markdown alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

TERA = 1e12
GIB = 2**30  # bytes


def count(value: float) -> str:
    """Three significant digits with a suffix: 950, 47.5k, 364 M, 1.72 B."""
    if not math.isfinite(value):
        return str(value)
    for size, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, "k")):
        # Half a unit of the last shown digit below the size already rounds up to it: 999.6e3 is `1.00 M`, never `1000k`.
        if abs(value) >= size * (1 - 0.5e-3):
            return three_digits(value / size) + suffix
    return three_digits(value) if value % 1 else f"{value:.0f}"


def three_digits(value: float) -> str:
    """0.412, 1.72, 47.5, 364: three digits that say something, without an exponent."""
    size = abs(value)
    decimals = 3 if size < 0.9995 else 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:.{decimals}f}"


def duration(seconds: float) -> str:
    """The two units that matter: 0.42 s, 38 s, 4 m 05 s, 1 h 52 m, 3 d 04 h."""
    if seconds < 9.95:
        return f"{seconds:.2g} s" if seconds < 0.995 else f"{seconds:.1f} s"
    for size, large, small, step in (
        (86_400, "d", "h", 3600),
        (3600, "h", "m", 60),
        (60, "m", "s", 1),
    ):
        rounded = round(seconds / step) * step
        if rounded >= size:
            return f"{rounded // size} {large} {rounded % size // step:02d} {small}"
    return f"{round(seconds)} s"


def memory(gib: float) -> str:
    """80.9 GiB, or MiB below one GiB."""
    return f"{gib:.1f} GiB" if gib >= 0.9995 else f"{gib * 1024:.0f} MiB"


def percent(share: float) -> str:
    """A share of one as 49.6 %."""
    return f"{share * 100:.1f} %"


def operations(value: float) -> str:
    """Floating-point operations to four digits: 10.58 GFLOP, 1.387 PFLOP."""
    prefixes = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
    rounded = float(f"{value:.4g}")  # first, so that 999,960 is 1 MFLOP and not 1000 kFLOP
    scale = min(len(prefixes) - 1, int(math.log10(max(rounded, 1.0)) // 3))
    return f"{rounded / 1000**scale:.4g} {prefixes[scale]}FLOP"


def plural(number: int, noun: str) -> str:
    """1 pack, 2 packs, 1,024 batches."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


UNKNOWN = "–"  # in place of what is not known


def cell(text: str) -> str:
    """`text` as a cell of a table in Markdown, which a `|` or a line feed would end: the one is escaped, the other a space."""
    return " ".join(text.split("\n")).replace("|", "\\|")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """A table in Markdown, also aligned as plain text: the first `names` columns to the left, figures to the right."""
    header, *rows = (list(map(cell, row)) for row in (header, *rows))
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(values: Sequence[str]) -> str:
        padded = [
            v.ljust(w) if i < names else v.rjust(w)
            for i, (v, w) in enumerate(zip(values, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = "|".join(
        "-" * (w + 2) if i < names else "-" * (w + 1) + ":" for i, w in enumerate(widths)
    )
    return "\n".join([line(header), f"|{rule}|", *map(line, rows)])


def or_dash(value: Any, form: Callable[[Any], str] = str) -> str:
    """`value` as `form` writes it; a dash for what is not known."""
    return UNKNOWN if value is None else form(value)
