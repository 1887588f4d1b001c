"""What all result files have: their command, without options of the interpreter, and a folder, wherever they are to lie."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine import measured_on, write
from tests.conftest import ROOT
from tests.pretrain.compare.made_runs import make_run


@pytest.mark.parametrize("options", [[], ["-W", "error::UserWarning", "-u"]], ids=["plain", "options of the interpreter"])
def test_a_result_file_names_its_command_and_its_folder_is_made(options: list[str], tmp_path: Path) -> None:
    audit = {"precision": "bf16", "effective": "bf16", "backend": "torch", "computed_by": "torch"}
    run, out = make_run(tmp_path / "a run", (4.0, 3.0), audit=audit), tmp_path / "not" / "there" / "kept.json"
    (run / "environment.json").write_text("{}")
    subprocess.run([sys.executable, *options, "-m", "benchmarks.collect_runs", str(run), "--out", str(out)], cwd=ROOT, check=True)
    assert json.loads(out.read_text())["command"] == f"python -m benchmarks.collect_runs '{run}' --out {out}"


def test_the_head_of_a_result_file_says_when_and_on_what(tmp_path: Path) -> None:
    write(tmp_path / "new" / "result.json", {**measured_on(), "results": []})
    found = json.loads((tmp_path / "new" / "result.json").read_text())
    assert list(found) == ["command", "date", "environment", "processor", "results"]
    assert found["environment"]["packages"]["torch"] and found["processor"] and found["date"].startswith("20")
    assert measured_on({"asked for": "elsewhere"})["environment"] == {"asked for": "elsewhere"}
