"""The one exception that a user's input can cause, and how what was given stands in its message."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def permissions_named() -> Iterator[None]:
    """A block in which a file or folder that this user may not use, or whose name is too long, is an InputError: even to ask
    whether it exists can fail, for any path that a user names."""
    try:
        yield
    except OSError as error:
        too_long = error.errno == errno.ENAMETOOLONG
        if error.filename is None or not (too_long or isinstance(error, PermissionError)):
            raise
        remedy = "shorten it" if too_long else "have this user allowed to use it and the folders above"
        raise InputError(f"{error.filename}: {error.strerror}; {remedy}, or name another") from error
