"""Test the commands that `pip install .` installs, and trainings without optional packages."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed import generated_packs
from pretrain import __version__
from pretrain.__main__ import COMMANDS
from tests.conftest import ROOT, run_command, write_recipe
from tests.forked_commands import forking

OPTIONAL = ("datasets", "plotly", "wandb")
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
    run_command(command, cwd=source)
    return target


def test_one_command_has_all_commands_and_runs_them_from_anywhere(
    installed: Path, small_packs: Path, tmp_path: Path
):
    def run(*arguments: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "pretrain", *arguments]
        environment = os.environ | {"PYTHONPATH": str(installed)}
        done = run_command(command, status, cwd=tmp_path, env=environment)
        return done.stderr if status else done.stdout

    usage = run("--help")
    assert "usage: python -m pretrain COMMAND" in usage
    assert all(f"\n  {name} " in usage for name in COMMANDS)
    assert "120 packs" in run("inspect", str(small_packs))
    refused = run("report", "nothing", status=2)
    assert refused.count("error: ") == 1 and "nothing" in refused
    assert (installed / "train_accelerate.py").is_file(), "`train` and a matrix start this file"
    (tmp_path / "my.yaml").write_text(
        f"name: my\nmodel: {{source: m}}\ndata: {{packs: {small_packs}}}\ntrain: {{steps: 1}}\n"
    )
    refused = run("train", "my.yaml", "--config", "nowhere", status=2)
    assert "bf16, cpu, ddp," in refused, "the installed accelerate configurations"
    assert run("--version") == f"low-precision-pretraining {__version__}\n"
    assert (installed / f"low_precision_pretraining-{__version__}.dist-info").is_dir()
    files = [path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.*")]
    expected = [file for file in files if "__pycache__" not in file.parts]
    assert [file for file in expected if not (installed / file).exists()] == []


def test_the_extras_in_messages_install_these_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name][0] for name in ("hub", "report", "wandb")]
    assert [extra.partition(">")[0] for extra in extras] == [*OPTIONAL]
    assert not [text for text in project["dependencies"] if text.startswith(OPTIONAL)]


@pytest.mark.long
def test_a_training_needs_no_optional_package(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    hidden = "".join(f"sys.modules[{name!r}] = None\n" for name in OPTIONAL)
    (tmp_path / "sitecustomize.py").write_text(f"import sys\n{hidden}")
    recipe = write_recipe(small_recipe | {"precision": "fp32"}, tmp_path)
    command = [sys.executable, "train_accelerate.py", str(recipe)]
    run_command(command, env=forking(tmp_path) | {"ACCELERATE_USE_CPU": "true"})
    assert (Path(small_recipe["run_dir"]) / "summary.json").exists()


@pytest.mark.nightly
def test_a_start_imports_no_package_that_the_run_does_not_use(tmp_path: Path) -> None:
    """The command is a real process."""
    generated_packs.write(tmp_path / "packs", 128, 512, 48)
    start = "-X importtime train_accelerate.py benchmarks/tiny.yaml --plan precision=fp32"
    command = [sys.executable, *start.split(), f"data.packs={tmp_path / 'packs'}"]
    started = run_command(command, env=os.environ | {"ACCELERATE_USE_CPU": "true"})
    lines = [line for line in started.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert {"torch", "transformers", "accelerate"} <= imported
    assert not imported & {*OPTIONAL, "transformer_engine"}
