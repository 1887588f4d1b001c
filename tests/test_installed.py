"""Test the commands that `pip install .` installs, outside of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain import __version__
from pretrain.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
PACKAGES = ("foundation", "packing", "pretrain", "lab", "accelerate_configs")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder into which pip installed a copy of the sources, without dependencies."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("installed")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "train_accelerate.py"):
        shutil.copy(ROOT / name, source)
    pip = "-m pip --disable-pip-version-check --quiet install --no-deps --no-index"
    options = ["--no-build-isolation", "--no-compile", "--target", str(target), "."]
    command = [sys.executable, *pip.split(), *options]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def test_one_command_has_all_commands_and_runs_them_from_anywhere(
    installed: Path, small_packs: Path, tmp_path: Path
):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pretrain", *arguments]
        environment = os.environ | {"PYTHONPATH": str(installed)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    usage = run("--help")
    assert usage.returncode == 0
    assert "usage: python -m pretrain COMMAND" in usage.stdout
    assert all(f"\n  {name} " in usage.stdout for name in COMMANDS)
    inspected = run("inspect", str(small_packs))
    assert inspected.returncode == 0, inspected.stderr
    assert "120 packs" in inspected.stdout, inspected.stderr
    refused = run("report", "nothing")
    assert refused.returncode == 2
    assert refused.stderr.count("error: ") == 1
    assert "nothing" in refused.stderr
    assert (installed / "train_accelerate.py").is_file(), "`train` and a matrix start this file"
    (tmp_path / "my.yaml").write_text(
        f"name: my\nmodel: {{source: m}}\ndata: {{packs: {small_packs}}}\ntrain: {{steps: 1}}\n"
    )
    refused = run("train", "my.yaml", "--config", "nowhere")
    assert "bf16, cpu, ddp," in refused.stderr, "the installed accelerate configurations"
    assert run("--version").stdout == f"low-precision-pretraining {__version__}\n"
    assert (installed / f"low_precision_pretraining-{__version__}.dist-info").is_dir()
    files = [path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.*")]
    expected = [file for file in files if "__pycache__" not in file.parts]
    assert [file for file in expected if not (installed / file).exists()] == []
