"""A start does not import packages that only other runs use. The command is a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.speed import generated_packs
from tests.conftest import ROOT

# Packages of this project that most runs do not use.
UNUSED = ("datasets", "plotly", "transformer_engine", "wandb")


def test_a_start_imports_no_package_that_the_run_does_not_use(tmp_path: Path) -> None:
    packs = tmp_path / "packs"
    generated_packs.write(packs, 128, 512, 48)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
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
    assert not imported & set(UNUSED)
