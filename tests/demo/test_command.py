"""Commands that the demo runs: exit codes pass through, and Ctrl-C waits for whoever is still saving."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from demo.command import CommandFailed, run, shown

# A launcher that goes at once on Ctrl-C, as accelerate does, over a trainer that takes its time to save.
TRAINER = """
import signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def save(*_):
    time.sleep(1.0)
    (folder / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGINT, save)
(folder / "ready").touch()
time.sleep(60)
"""
LAUNCHER = "import subprocess, sys; subprocess.Popen([sys.executable, *sys.argv[1:]]).wait()"


def test_a_command_is_shown_as_one_would_type_it():
    assert (
        shown(["python", "-m", "demo.sample", "class "], {"OMP_NUM_THREADS": "2"})
        == "OMP_NUM_THREADS=2 python -m demo.sample 'class '"
    )


def test_a_command_is_printed_and_sees_the_settings(capfd: pytest.CaptureFixture[str]):
    run([sys.executable, "-c", "import os; print(os.environ['COLOUR'])"], {"COLOUR": "green"})
    output = capfd.readouterr().out
    assert output.startswith("$ COLOUR=green ") and output.endswith("green\n")


@pytest.mark.parametrize(("code", "expected"), [("sys.exit(2)", 2), ("os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_of_a_failed_command_passes_through(code: str, expected: int):
    with pytest.raises(CommandFailed) as failure:
        run([sys.executable, "-c", f"import os, sys; {code}"])
    assert failure.value.exit_code == expected


def test_ctrl_c_waits_for_the_trainer_that_the_launcher_left_behind(tmp_path: Path):
    program = f"""
        import sys
        from demo.command import run
        try:
            run([sys.executable, "-c", {LAUNCHER!r}, "-c", {TRAINER!r}, {str(tmp_path)!r}])
        except KeyboardInterrupt:
            sys.exit(130)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], start_new_session=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: every process of the group gets it
    assert process.wait(timeout=30) == 130
    assert (tmp_path / "saved").exists()
