"""Tokenizer workers end with their parent, import only this package, and report their death."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from foundation.errors import InputError
from packing import workers
from packing.prepare import prepare
from packing.settings import DataSettings
from packing.store import open_packs
from packing.workers import start_worker
from tests.conftest import ROOT


def is_running(process: str) -> bool:
    """Return True if the process exists and is not a zombie, which has no command line."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return bool(Path("/proc", process, "cmdline").read_bytes())
    return False


def test_a_killed_preparation_continues_with_the_same_packs(
    settings: DataSettings, tmp_path: Path
) -> None:
    prepare(settings, progress=False)
    expected = open_packs(settings, "train").fingerprint
    shutil.rmtree(settings.packs)
    code = """
import json, sys, time
from packing import sources, token_log
from packing.prepare import DataSettings, prepare
sources.CHUNK_BYTES = 20_000
token_log._COMMIT_SECONDS = 0
append = token_log.TokenLog.append
token_log.TokenLog.append = lambda *a: (append(*a), time.sleep(0.2))
prepare(DataSettings(**json.loads(sys.argv[1])), progress=False)
"""
    run = subprocess.Popen([sys.executable, "-c", code, settings.model_dump_json()])
    partial = tmp_path / ".packs.tokens" / "progress.json"
    deadline = time.monotonic() + 60

    def place() -> int:
        return json.loads(partial.read_text())["place"].get("at", 0) if partial.exists() else 0

    while place() < 60_000 and time.monotonic() < deadline:
        time.sleep(0.02)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    run.send_signal(signal.SIGKILL)
    run.wait()
    while any(map(is_running, children)):
        assert time.monotonic() < deadline, "a worker has outlived its parent"
        time.sleep(0.02)
    assert children and place() >= 60_000 and not settings.packs.exists()
    with open(partial.with_name("tokens.bin"), "ab") as file:
        file.write(b"written, but not recorded in progress.json")
    prepare(settings, progress=False)
    assert open_packs(settings, "train").fingerprint == expected and not partial.parent.exists()


def test_workers_import_neither_the_callers_script_nor_the_current_folder(
    settings: DataSettings, tmp_path: Path
) -> None:
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    for name in ("tokenizers", "pickle"):
        code = f"open('{name} of the current folder', 'w')\nraise SystemExit(1)"
        (tmp_path / f"{name}.py").write_text(code)
    script.write_text(
        "import sys, json\nprint('started', flush=True)\n"
        "from packing.prepare import prepare, DataSettings\n"
        "prepare(DataSettings(**json.loads(sys.argv[1])), progress=False)\n"
    )
    command = [sys.executable, script, settings.model_dump_json()]
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    run = subprocess.run(command, **options, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.count("started") == 1, run.stderr
    assert not list(tmp_path.glob("* of the current folder"))


def test_workers_that_die_at_start_are_reported(
    settings: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers may die if memory runs out. In this test their interpreter ends at once."""
    monkeypatch.setattr(workers, "start_worker", start_worker)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(InputError, match=r"process died while it read .*corpus.jsonl:1 or"):
        prepare(settings, progress=False)
