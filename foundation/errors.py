"""The exception for mistakes in a user's input."""

from __future__ import annotations


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
