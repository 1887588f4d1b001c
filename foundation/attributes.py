"""Attributes that have other values for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def holding(owner: Any, **values: Any) -> Iterator[None]:
    """While entered, attributes of `owner` have these values; afterwards those from before."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
