"""Tables in Markdown, which are also aligned as plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

UNKNOWN = "–"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """A table of `rows` of text under `header`: the first `names` columns left-aligned, figures to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < names else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 2) if i < names else "-" * (w + 1) + ":" for i, w in enumerate(widths))
    return "\n".join([line(header), f"|{rule}|", *map(line, rows)])


def shown(value: Any, form: Callable[[Any], str]) -> str:
    """`value` as `form` writes it; a dash for what is not known."""
    return UNKNOWN if value is None else form(value)
