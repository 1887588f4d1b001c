"""The one exception that a user's input can cause."""

from __future__ import annotations


class InputError(Exception):
    """Something the user gave cannot be used.

    The command lines print its message alone (the file or key, what is wrong, what to do) and exit with status 2. Any other
    exception, except OSError, is a bug of ours and keeps its traceback.
    """

    kind, status = "error", 2  # how the command line says it, and ends
