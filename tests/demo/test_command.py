"""Commands that the demo runs: exit codes pass through, and Ctrl-C waits for whoever is still saving."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from demo.command import CommandFailed, run, shown

# A launcher that goes at once on Ctrl-C, as accelerate does, over a trainer whose save takes longer than the launcher lives.
TRAINER = """
import os, signal, sys, time
from pathlib import Path
folder, launcher = Path(sys.argv[1]), os.getppid()
def save(*_):
    while os.getppid() == launcher:
        time.sleep(0.01)
    (folder / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGINT, save)
os.close(os.open(folder / "ready", os.O_WRONLY))
while True:
    signal.pause()
"""
LAUNCHER = "import subprocess, sys; subprocess.Popen([sys.executable, *sys.argv[1:]]).wait()"


def test_a_command_is_shown_as_one_would_type_it():
    assert (
        shown(["python", "-m", "pretrain", "sample", "class "], {"OMP_NUM_THREADS": "2"})
        == "OMP_NUM_THREADS=2 python -m pretrain sample 'class '"
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
        import signal, sys
        from demo.command import run

        install = signal.signal

        def install_and_tell(*arguments):
            signal.signal = install
            previous = install(*arguments)
            open({str(tmp_path / "waiting")!r}, "w").close()
            return previous

        signal.signal = install_and_tell
        try:
            run([sys.executable, "-c", {LAUNCHER!r}, "-c", {TRAINER!r}, {str(tmp_path)!r}])
        except KeyboardInterrupt:
            sys.exit(130)
    """
    for name in ("ready", "waiting"):
        os.mkfifo(tmp_path / name)
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], start_new_session=True)
    for name in ("ready", "waiting"):  # waits until the trainer, and who waits for it, have opened them
        (tmp_path / name).read_bytes()
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: every process of the group gets it
    assert process.wait() == 130
    assert (tmp_path / "saved").exists()
