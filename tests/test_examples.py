"""Each script and each notebook in examples/ runs on a CPU, without the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.is_file())


def code_of(path: Path) -> str:
    """Return the code of a script, or the cells of a notebook with code, in order."""
    if path.suffix == ".py":
        return path.read_text(encoding="utf-8")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    return "\n".join("".join(cell["source"]) for cell in cells)


def run(code: str, folder: Path) -> str:
    script = folder / "example.py"
    script.write_text(code, encoding="utf-8")
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=folder,
        env=os.environ | offline | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


RESULTS = {
    "first_run.ipynb": "first-current-fp32 loss",
    "hf_trainer.py": "e4m3 tensor-scaled",
    "is_my_fp8_real.py": "with_pretrain: 45 products, 0 in FP8, 42 only with values of FP8",
    "minimal.py": "step 19  loss 0.",
}


@pytest.mark.long
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_prints_its_result(path: Path, tmp_path: Path):
    assert RESULTS[path.name] in run(code_of(path), tmp_path)
