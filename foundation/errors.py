"""The one exception that a user's input can cause, and how what was given stands in its message."""

from __future__ import annotations


class InputError(Exception):
    """Something the user gave cannot be used.

    The command lines print its message alone (the file or key, what is wrong, what to do) and exit with status 2. Anything else
    that escapes, but for what a disk refuses, is a bug of ours and keeps its traceback.
    """


def shown(value: object) -> str:
    """`value` for a message: its first 200 characters."""
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
