"""The exception for mistakes in a user's input."""

from __future__ import annotations

from importlib.util import find_spec


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
