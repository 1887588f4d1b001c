"""Temporarily override attributes of an object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def overridden(owner: Any, **values: Any) -> Iterator[None]:
    """Context manager that sets attributes of `owner` to `values`, and restores them afterwards."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
