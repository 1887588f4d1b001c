"""A start imports only packages that the run uses. The command is a real process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

# transformers imports these packages if they are installed. The tests install them in a folder.
INSTALLED = ("scipy", "torchao", "torchvision")
# Packages of this project that most runs do not use.
UNUSED = ("datasets", "matplotlib", "pandas", "plotly", "transformer_engine", "wandb")


def test_a_start_imports_no_package_that_the_run_does_not_use(tmp_path: Path) -> None:
    for name in INSTALLED:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("__version__ = '9.0'")
        (tmp_path / f"{name}-9.0.dist-info").mkdir()
        (tmp_path / f"{name}-9.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 9.0")
    packs = tmp_path / "packs"
    make = "benchmarks.throughput_packs --recipe benchmarks/tiny.yaml --packs 48 --out"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "ACCELERATE_USE_CPU": "true"}
    subprocess.run([sys.executable, "-m", *make.split(), str(packs)], cwd=ROOT, check=True)
    start = "-X importtime train_accelerate.py benchmarks/tiny.yaml --plan precision=fp32"
    started = subprocess.run(
        [sys.executable, *start.split(), f"data.packs={packs}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert started.returncode == 0, started.stderr
    lines = [line for line in started.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert {"torch", "transformers", "accelerate"} <= imported
    assert not imported & {*INSTALLED, *UNUSED}
