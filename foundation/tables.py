"""Tables as text, on a terminal and in Markdown alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

UNKNOWN = "–"  # in place of what is not known


def cell(text: str) -> str:
    """`text` as a cell of a table in Markdown, which a `|` or a line feed would end: the one is escaped, the other a space."""
    return " ".join(text.split("\n")).replace("|", "\\|")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """A table in Markdown, also aligned as plain text: the first `names` columns to the left, figures to the right."""
    header, *rows = (list(map(cell, row)) for row in (header, *rows))
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(values: Sequence[str]) -> str:
        padded = [v.ljust(w) if i < names else v.rjust(w) for i, (v, w) in enumerate(zip(values, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 2) if i < names else "-" * (w + 1) + ":" for i, w in enumerate(widths))
    return "\n".join([line(header), f"|{rule}|", *map(line, rows)])


def or_dash(value: Any, form: Callable[[Any], str] = str) -> str:
    """`value` as `form` writes it; a dash for what is not known."""
    return UNKNOWN if value is None else form(value)
