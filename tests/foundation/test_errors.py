"""A folder that the user may not enter is one message of whatever command comes upon it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foundation.errors import InputError, permissions_named

ROOT = Path(__file__).parents[2]
RIGHTS = "-dac_override,-dac_read_search"  # by which root enters every folder


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root may enter every folder")
@pytest.mark.parametrize("command", [["packing", "inspect"], ["pretrain", "inspect"]])
def test_a_folder_that_may_not_be_entered_is_one_message_of_every_command(command: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0)
    given_up = ["setpriv", f"--bounding-set={RIGHTS}", f"--inh-caps={RIGHTS}"] if os.geteuid() == 0 else []
    asked = [*given_up, sys.executable, "-m", *command, str(folder / "x.yaml")]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if given_up and done.stderr.startswith("setpriv"):
        pytest.skip("root keeps its rights here")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"error: {folder / 'x.yaml'}") and "Permission denied; have this user allowed" in done.stderr


def test_a_permission_that_names_no_file_keeps_its_traceback() -> None:
    with pytest.raises(PermissionError), permissions_named():
        raise PermissionError(1, "Operation not permitted")
    with pytest.raises(InputError, match=r"^here: Permission denied; have this user allowed"), permissions_named():
        raise PermissionError(13, "Permission denied", "here")
    with pytest.raises(InputError, match=r"xxx: File name too long; shorten it, or name another$"), permissions_named():
        Path("x" * 300).exists()
