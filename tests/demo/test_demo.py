"""`make demo` passes on exit codes and interrupts of its commands."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from demo.__main__ import compare, idle_cores, run
from packing.pack_maker import usable_cores


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


def test_a_signal_to_the_demo_ends_its_command(tmp_path: Path):
    code = "import os, time; os.kill(os.getppid(), {}); time.sleep(60)"
    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(SystemExit) as end:
            run([sys.executable, "-c", code.format(int(number))])
        assert end.value.code == 128 + number


def test_commands_get_a_thread_for_each_idle_core_or_the_users_number(tmp_path: Path, monkeypatch):
    code = "import os, sys; open(sys.argv[1], 'w').write(os.environ['OMP_NUM_THREADS'])"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run([sys.executable, "-c", code, str(tmp_path / "idle")])
    assert int((tmp_path / "idle").read_text()) == idle_cores() <= usable_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    run([sys.executable, "-c", code, str(tmp_path / "set")])
    assert (tmp_path / "set").read_text() == "99"


def test_a_failed_comparison_leaves_no_report_so_it_is_repeated(tmp_path: Path):
    report = tmp_path / "report.html"
    report.touch()
    with pytest.raises(subprocess.CalledProcessError):
        compare(str(tmp_path / "missing.yaml"), report)
    assert not report.exists()
