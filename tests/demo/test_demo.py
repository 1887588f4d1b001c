"""`make demo` passes on exit codes and interrupts of its commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from demo.__main__ import run


def test_run_raises_the_exit_code_and_waits_after_ctrl_c(tmp_path: Path):
    with pytest.raises(subprocess.CalledProcessError) as failure:
        run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert failure.value.returncode == 137
    code = (
        "import os, signal, sys; "
        "signal.signal(2, lambda *_: open(sys.argv[1], 'w').close()); "
        "os.kill(os.getppid(), 2)"
    )
    with pytest.raises(KeyboardInterrupt):
        run([sys.executable, "-c", f"{code}; os.kill(os.getpid(), 2)", str(tmp_path / "saved")])
    assert (tmp_path / "saved").exists()
