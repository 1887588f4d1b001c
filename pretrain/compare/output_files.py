"""Check that a report or a picture does not overwrite a file that the user made."""

from __future__ import annotations

from pathlib import Path

from foundation.errors import InputError

# Text that identifies a file of this program. Commands write it into every page and picture whose
# path the user chooses.
WRITTEN_BY = "written by python -m pretrain"


def check_replaceable(path: Path, named: str = "--out") -> None:
    """Raise InputError unless `path` may be overwritten by a page or a picture.

    A path may be overwritten if it does not exist, if it is an empty file, or if it is a file that
    contains WRITTEN_BY. The message begins with `named`, the option that sets `path`.
    """
    if not path.exists():
        return
    content = path.read_bytes() if path.is_file() else b"a folder"
    if content and WRITTEN_BY.encode() not in content:
        raise InputError(
            f"{named} {path}: this path exists and was not written by this program; either move it "
            "away, or choose another path"
        )
