"""Files of the user are not overwritten by a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.errors import InputError
from pretrain.compare.output_files import WRITTEN_BY, check_replaceable


def test_an_absent_an_empty_and_a_written_file_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "report").write_bytes(b"x" * 10**6 + WRITTEN_BY.encode())
    for name in ("absent", "empty", "report"):
        check_replaceable(tmp_path / name)


def test_a_foreign_file_and_a_folder_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_bytes(b"years of work")
    for name in ("thesis", "."):
        with pytest.raises(InputError, match=f"--out {tmp_path / name}"):
            check_replaceable(tmp_path / name)
