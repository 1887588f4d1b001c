"""Why a process ended."""

from __future__ import annotations

from collections.abc import Iterable


def reason_in(output: Iterable[str]) -> str:
    """The line of a process's output that says why it ended: our own message, or an error; 400 characters at most."""
    lines = [line.strip() for line in output if line.strip()]
    own = [line for line in lines if line.startswith(("error: ", "halted: "))]
    errors = [line for line in lines if "Error" in line]
    return next(iter([*own[-1:], *errors[-1:], *lines[-1:]]), "it said nothing")[:400]
