"""The one exception that a user's input can cause."""


class InputError(Exception):
    """Something the user gave cannot be used.

    The message names the file or key, what is wrong with it and what to do; the command lines print it alone, without a
    traceback, and exit with status 2. Anything else that escapes is a bug of ours and keeps its traceback.
    """
