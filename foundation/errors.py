"""The exception for mistakes in a user's input, and functions that raise it."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

# Representations of values that may be large, or nested deeper than Python's recursion limit.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100


class InputError(Exception):
    """Error in something that the user supplied: a setting, a file, a command line or a machine.

    The message names the file or the key, the mistake, and a remedy. A command prints the message
    without a traceback and exits with `status`. An OSError is reported in the same way. Any
    other exception is a bug of this project and keeps its traceback.
    """

    # Word that is printed before the message.
    kind = "error"
    # Exit status of the command.
    status = 2


def require_package(name: str, extra: str, feature: str) -> None:
    """Raise InputError if the optional package `name` is not installed.

    extra: the extra of this project in pyproject.toml that contains the package.
    feature: the feature that needs the package. The message begins with it.
    """
    if find_spec(name) is None:
        raise InputError(
            f"{feature} needs the package {name}, which is not installed; run `pip install "
            f"{name}`, or install this project with its extra `{extra}`"
        )


def shown(value: Any) -> str:
    """Return the representation of a user's value for a message, cut to 200 characters."""
    return f"{_SHORT.repr(value):.200}"


def one_line(error: BaseException, *, named: bool = False) -> str:
    """Return an error's message on one line, cut to 300 characters.

    If the message is empty, return the name of the error's type. With `named`, put the name of the
    type before the message.
    """
    kind = type(error).__name__
    text = " ".join(str(error).split())[:300]
    if not text:
        return kind
    return f"{kind}: {text}" if named else text


@contextmanager
def as_input_error(
    kinds: tuple[type[Exception], ...], what: str, remedy: str = ""
) -> Iterator[None]:
    """Re-raise exceptions of `kinds` in the caller's `with` statement as InputError.

    The message is `what`, then the original error on one line, then `remedy` if it is not empty.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, OSError) and error.filename and str(error.filename) in what:
            # `what` already names the file, so use the message without the file's name.
            reason = error.strerror
        else:
            # Messages of these types are unclear without the name of the type. The message of a
            # KeyError, for example, is only the key.
            unclear = isinstance(error, (LookupError, AttributeError, AssertionError))
            reason = one_line(error, named=unclear).rstrip(". ")
        raise InputError(f"{what}: {reason}{remedy and f'; {remedy}'}") from None
