"""A search in phases over runs that are already finished, without training."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pretrain.__main__ import main
from pretrain.compare.matrix_file import read_settings
from pretrain.compare.phases import Measured, PhasesSettings, Search
from tests.conftest import ROOT
from tests.pretrain.compare.made_runs import leave_behind, note

BATCH = {"name": "batch", "axes": {"batch.microbatch": [1, 8]}}
LOSS = {"name": "loss", "cells": [{"loss.chunk": 256}]}
LAST = {"name": "last", "cells": [{"batch.microbatch": 4, "model.gradient_checkpointing": "full"}]}


@pytest.fixture
def phases_file(small_recipe: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(small_recipe))

    def write(*phases: dict[str, Any], **keys: Any) -> Path:
        values = {
            "name": "tune",
            "recipe": str(tmp_path / "recipe.yaml"),
            "run_dir": f"{tmp_path}/{{name}}",
        }
        values |= {
            "accelerate": str(ROOT / "accelerate_configs" / "cpu.yaml"),
            "phases": list(phases),
        } | keys
        (path := tmp_path / "phases.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        return path

    return write


def search_of(path: Path, *overrides: str) -> Search:
    """Return the search of a phases file, which has not started."""
    return Search(path, read_settings(PhasesSettings, path, {}), overrides)


def test_a_mistake_in_the_last_phase_is_refused_before_any_run(phases_file, capsys):
    path = phases_file(LOSS, {"name": "short", "axes": {"train.step": [12, 4]}})
    for options in ([], ["--dry-run"]):
        assert main(["phases", str(path), *options]) == 2
        assert re.search(r"phase short, cell step=12: .*`train\.step`", capsys.readouterr().err)
    assert not (path.parent / "tune").exists()


@pytest.fixture
def finish(phases_file: Callable[..., Path], tmp_path: Path) -> Callable[..., None]:
    """Return a function that writes a finished run of a phase.

    Its arguments are the number of the phase, the cell, its speed, and the best cells of the phases
    before.
    """

    def leave(number: int, name: str, speed: float, *before: str, **last_step: Any) -> None:
        search = search_of(tmp_path / "phases.yaml")
        matrices = search.check()
        for earlier, best in enumerate(before):
            search.chosen += [
                Measured("", cell, {}, "") for cell in matrices[earlier].cells if cell.name == best
            ]
        phase = search.settings.phases[number - 1]
        [run] = [cell for cell in search.matrix(phase, search.values).cells if cell.name == name]
        leave_behind(run, tokens_per_second=speed)
        if last_step:
            note(run.run_dir, **last_step)

    return leave


def lines_of(out: str) -> dict[str, list[str]]:
    """Return the rows of the last table by cell."""
    table = out[out.rindex("| phase |") :]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()[2:]
        if line.startswith("|")
    ]
    return {row[1]: row for row in rows}


def test_phases_build_on_the_best_cell_until_one_gains_nothing(
    phases_file, finish, capsys, tmp_path
):
    path = phases_file(BATCH, LAST, LOSS, {"name": "never", "axes": {"loss.chunk": [7]}})
    finish(1, "microbatch=1", 100.0)
    finish(1, "microbatch=8", 200.0)
    finish(2, "microbatch=4-gradient_checkpointing=full", 300.0, "microbatch=8")
    finish(3, "chunk=256", 301.0, "microbatch=8", "microbatch=4-gradient_checkpointing=full")
    assert main(["phases", str(path)]) == 0
    out = capsys.readouterr().out
    rows = lines_of(out)
    best = rows["microbatch=4-gradient_checkpointing=full"]
    assert rows["microbatch=8"][2] == "200" and best[2] == "300"
    assert best[-1] == "**best**"
    assert "the gain of the fastest cell of phase loss is +0.3%" in out
    _, _, arguments = out.partition("train_accelerate.py ")
    expected = f"{tmp_path}/recipe.yaml batch.microbatch=4 model.gradient_checkpointing=full\n"
    assert arguments.startswith(expected), (
        "the last phase's microbatch replaces the first's, and a phase without a gain adds nothing"
    )
    assert "**best**" in (tmp_path / "tune" / "phases.md").read_text()


@pytest.mark.parametrize(
    ("last_step", "reason"),
    [
        ({"loss": None}, "no finite loss from step 12 on"),
        ({"skipped": True}, "a step was skipped"),
        ({"halted": "the gradient norm is nan. The weights are"}, "was halted at step 12"),
    ],
)
def test_an_unstable_cell_is_never_the_best(last_step, reason, phases_file, finish, capsys):
    path = phases_file(BATCH)
    finish(1, "microbatch=1", 100.0)
    finish(1, "microbatch=8", 900.0, **last_step)
    assert main(["phases", str(path)]) == 0
    rows = lines_of(capsys.readouterr().out)
    assert rows["microbatch=1"][-1] == "**best**" and reason in rows["microbatch=8"][-1]


def test_the_command_keeps_the_overrides_of_the_command_line(phases_file):
    search = search_of(phases_file(BATCH), "seed=7", "optimizer.betas=[0.9,0.9]")
    [matrix] = search.check()
    search.chosen = [Measured("batch", matrix.cells[0], {}, "")]
    command = search.report("").splitlines()[-1]
    assert "seed=7 'optimizer.betas=[0.9,0.9]' batch.microbatch=1" in command


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("recipes/phases/*.yaml")), ids=lambda path: path.stem
)
def test_the_shipped_phases_load(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    assert len(search_of(path).check()) >= 3
