"""What all result files have: their command, without options of the interpreter, and a folder, wherever they are to lie."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.machine import measured_on, write


def test_the_head_of_a_result_file_says_when_and_on_what(tmp_path: Path) -> None:
    write(tmp_path / "new" / "result.json", {**measured_on(), "results": []})
    found = json.loads((tmp_path / "new" / "result.json").read_text())
    assert list(found) == ["command", "date", "environment", "processor", "results"]
    assert found["environment"]["packages"]["torch"] and found["processor"] and found["date"].startswith("20")
    assert measured_on({"asked for": "elsewhere"})["environment"] == {"asked for": "elsewhere"}
