"""Protect files of the user from being overwritten by a report or a picture."""

from __future__ import annotations

from pathlib import Path

from foundation.errors import InputError

# Stands in every page and picture that a command writes to a path of the user's choice.
WRITTEN_BY = "written by python -m pretrain"


def check_replaceable(path: Path, named: str = "--out") -> None:
    """Raise InputError if `path` is a folder or a file that no command of ours has written.

    `named` is the option that asks for `path`. An empty file may be replaced.
    """
    if not path.exists():
        return
    content = path.read_bytes() if path.is_file() else b"a folder"
    if content and WRITTEN_BY.encode() not in content:
        raise InputError(
            f"{named} {path}: exists and was not written by this program; move it away, "
            "or give another name"
        )
