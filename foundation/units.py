"""Format numbers for users, such as 47.5k, 1.72 B and 1 h 52 m, and tables in Markdown."""

from __future__ import annotations

import math
import re
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

TERA = 1e12
# Bytes in a GiB.
GIB = 2**30
# Text for an unknown value.
UNKNOWN = "–"
# Largest width of `tables`, in characters.
WIDTH = 100


def count(value: float) -> str:
    """Format a count with three significant digits and a suffix: 950, 47.5k, 364 M, 1.72 B."""
    for size, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, "k")):
        # With three digits, a value just below `size` is rounded up to `size`. So 999.6e3 is
        # formatted as `1.00 M`, and not as `1000k`.
        if abs(value) >= size * (1 - 0.5e-3):
            return three_digits(value / size) + suffix
    return three_digits(value) if value % 1 else f"{value:.0f}"


def three_digits(value: float) -> str:
    """Format a value with three significant digits and no exponent: 0.412, 1.72, 47.5, 364."""
    # At each of these values, rounding to three digits adds a digit before the decimal point.
    decimals = 3 - bisect_right((0.9995, 9.995, 99.95), abs(value))
    return f"{value:.{decimals}f}"


def duration(seconds: float) -> str:
    """Format a duration with at most two units: 0.42 s, 38 s, 4 m 05 s, 1 h 52 m, 3 d 04 h."""
    if seconds < 0.995:
        return f"{seconds:.2g} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
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
    """Format a memory size in GiB as 80.9 GiB, or in MiB below one GiB."""
    return f"{gib:.1f} GiB" if gib >= 0.9995 else f"{gib * 1024:.0f} MiB"


def bytes_text(size: float) -> str:
    """Format a memory size in bytes, like `memory`."""
    return memory(size / GIB)


def percent(share: float) -> str:
    """Format a share between 0 and 1 as 49.6 %."""
    return f"{share * 100:.1f} %"


def operations(value: float) -> str:
    """Format a number of floating-point operations with four digits: 10.58 GFLOP, 1.387 PFLOP."""
    prefixes = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
    scale = int(math.log10(max(value, 1.0)) // 3)
    return f"{value / 1000**scale:.4g} {prefixes[scale]}FLOP"


def plural(number: int, noun: str) -> str:
    """Format a number with its noun: 1 pack, 2 packs, 1,024 batches."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending if number != 1 else ''}"


def signed(nats: float, digits: int = 4) -> str:
    """Format a loss difference with its sign: +0.0004 or −0.0004.

    The minus sign is U+2212, which is as wide as the plus sign.
    """
    # Adding 0.0 turns -0.0 into 0.0.
    rounded = round(nats, digits) + 0.0
    return f"{rounded:+.{digits}f}".replace("-", "−")


def cell(text: str) -> str:
    """Return `text` as a cell of a Markdown table: escape `|`, and replace line feeds by spaces."""
    return " ".join(text.split("\n")).replace("|", "\\|")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """Return a Markdown table that is also aligned as plain text.

    The first `names` columns are aligned to the left, the other columns to the right.
    """
    table = [[cell(text) for text in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        padded = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        for column in range(names):
            padded[column] = row[column].ljust(widths[column])
        lines.append(f"| {' | '.join(padded)} |")
    rules = ["-" * (width + 2) for width in widths[:names]]
    rules += ["-" * (width + 1) + ":" for width in widths[names:]]
    lines.insert(1, f"|{'|'.join(rules)}|")
    return "\n".join(lines)


def tables(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a sentence with the values that are equal in all rows, and tables of other columns.

    Columns that do not fit into WIDTH are in another table, which also begins with the first
    column. With a single row, no value is in the sentence. With several rows, a column that has
    only unknown values is omitted.
    """
    first_column, *columns = zip(header, *rows, strict=True)
    equal = []
    parts = [[first_column]]
    for column in columns:
        title, *values = column
        if len(rows) > 1 and len({*values}) == 1:
            if values[0] != UNKNOWN:
                equal.append(f"{title} {values[0]}")
            continue
        if table([*parts[-1], column]).index("\n") > WIDTH:
            parts.append([first_column])
        parts[-1].append(column)
    shared = [wrap(f"Equal in all rows: {', '.join(equal)}.")] if equal else []
    return "\n\n".join([*shared, *map(table, parts)])


def wrap(text: str) -> str:
    """Return `text` in lines of at most WIDTH characters. The lines after the first are indented.

    A number and its unit stay in one line, and so do paths and other words.
    """
    joined = re.sub(r"(?<=\d) (?=%|[GM]iB)", "\xa0", text)
    lines = textwrap.fill(
        joined, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\xa0", " ")


def table(columns: Sequence[Sequence[str]]) -> str:
    """Return the Markdown table of columns. The first element of a column is its title."""
    header, *rows = zip(*columns, strict=True)
    return markdown(header, rows)


def with_bar(value: float | None, bar: float | None, form: str) -> str:
    """Format a value and the half-width of its error, for example "66,135 ± 7 %".

    Return a dash if the value is not known.

    bar: the half-width as a fraction. None if the value is exact.
    form: the format of the value, such as ",.0f".
    """
    if value is None:
        return UNKNOWN
    return f"{value:{form}}" if bar is None else f"{value:{form}} ± {100 * bar:.0f} %"


def or_dash(value: Any, form: Callable[[Any], str] = str) -> str:
    """Format a value with the function `form`. Return a dash if the value is None."""
    return UNKNOWN if value is None else form(value)
