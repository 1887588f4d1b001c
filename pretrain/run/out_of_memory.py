"""Recognise errors of memory that runs out, and report them with the settings that take less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from foundation.errors import InputError
from foundation.reading import one_line
from pretrain.plan.memory import TAKES_LESS

# Parts of messages. Libraries that allocate by themselves, and torch on a host, raise errors of
# other classes.
_MESSAGES = ("out of memory", "_ALLOC_FAILED", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error` or one of its causes reports that a device or the host is full."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if any(part in str(error) for part in _MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def explaining_errors() -> Iterator[None]:
    """Raise InputError with the settings that take less memory if memory runs out in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"out of memory: {one_line(error)}. What takes less: {TAKES_LESS}; `--plan` says how "
            "much. Checkpoints are untouched: the same command with one of these goes on, with "
            "--accept-changes where `weights` or `optimizer` differ"
        ) from None
