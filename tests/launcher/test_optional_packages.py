"""A feature that needs an optional package names the package if it is missing. Others work."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed import generated_packs
from foundation.errors import InputError
from packing.records import Records
from packing.settings import DataSettings
from packing.sources import open_source
from pretrain.__main__ import main
from tests.conftest import ROOT, run_command, write_recipe
from tests.forked_commands import forking

PACKAGES = ("datasets", "plotly", "wandb")
REMEDY = "is not installed; run `pip install {0}`, or install this project with its extra `{1}`"


def test_the_extras_in_messages_install_these_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name][0] for name in ("hub", "report", "wandb")]
    assert [extra.partition(">")[0] for extra in extras] == [*PACKAGES]
    assert not [text for text in project["dependencies"] if text.startswith(PACKAGES)]


def test_a_dataset_without_its_package_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = open_source(
        DataSettings(packs=Path("packs"), source="someone/documents", tokenizer="t"),
        Records((), ()),
    )
    for read in (lambda: source.columns, lambda: list(source.chunks({}))):
        with pytest.raises(InputError) as error:
            read()
        assert str(error.value).startswith("`data.source: someone/documents`: ")
        assert str(error.value).endswith(REMEDY.format("datasets", "hub"))


def test_a_page_without_its_package_is_refused_before_runs_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main(["report", "nowhere", "--out", "page.html"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: --out page.html: ")
    assert message.endswith(f"{REMEDY.format('plotly', 'report')}\n")


@pytest.mark.long
def test_a_training_needs_no_optional_package(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    hidden = "".join(f"sys.modules[{name!r}] = None\n" for name in PACKAGES)
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
    assert not imported & {*PACKAGES, "transformer_engine"}
