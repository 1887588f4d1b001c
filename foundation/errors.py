"""The one exception that a user's input can cause, and how what was given stands in its message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class InputError(Exception):
    """Something the user gave cannot be used.

    The command lines print its message alone (the file or key, what is wrong, what to do) and exit with status 2. Anything else
    that escapes is a bug of ours and keeps its traceback.
    """


def shown(value: object, write: Callable[[Any], str] = str) -> str:
    """`value` for a message: its first 200 characters."""
    text = write(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
