"""A page of the docs, of which a program writes what stands between two markers."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from foundation.errors import InputError
from foundation.files import replace_file

PAGE_WIDTH = 100


def check_place(page: Path, begin: str, end: str) -> None:
    """InputError where `page` has not one place between the markers."""
    if not page.is_file() or page.read_text().count(begin) != 1 or page.read_text().count(end) != 1:
        raise InputError(f"{page}: has no place for the table; put {begin} and {end}, each on a line, where it shall stand")


def put_between(page: Path, begin: str, end: str, parts: Sequence[str]) -> None:
    """Replace what stands between the markers of `page`."""
    before, _, rest = page.read_text().partition(begin)
    replace_file(page, (before + "\n\n".join([begin, *parts, end]) + rest.partition(end)[2]).encode())


def wrapped(said: str, width: int = PAGE_WIDTH, indent: str = "") -> str:
    """`said` in lines of a page, all but the first after `indent`."""
    return textwrap.fill(said, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
