"""Matrix files: cells, mistakes, and finished cells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from lab.experiments import matrix_file
from lab.experiments.matrix_file import load_matrix
from pretrain.launch.launcher import CONFIGURATIONS
from pretrain.settings.config import identity_of, load_recipe, resolved
from tests.conftest import ROOT
from tests.lab.made_runs import append, leave_behind

MATRICES = sorted(
    [*ROOT.glob("recipes/matrices/*.yaml"), *ROOT.glob("benchmarks/evidence/matrices/*.yaml")]
)


# ── Cells ─────────────────────────────────────────────────────────────────────────────────────────


def test_cells_are_in_the_order_of_the_file(matrix):
    cells = {
        "head": {"precision": "delayed", "fp8_config": {"scope": "linear+head"}},
        "again-seed=1": {"precision": "bf16", "name": "again", "seed": 1},
        "as_the_recipe": {},
    }
    loaded = matrix(cells=cells, baseline="again-seed=1")
    assert [cell.name for cell in loaded.cells] == ["head", "again-seed=1", "as_the_recipe"]
    head, again, same = loaded.cells
    assert loaded.baseline is again and matrix(cells=cells).baseline.name == "head"
    assert head.values == {"precision": "delayed", "fp8_config.scope": "linear+head"}
    assert load_recipe(loaded.settings.recipe, head.overrides).fp8_config.scope == "linear+head"
    assert (again.recipe.seed, same.recipe.precision) == (1, "bf16"), "the recipe's precision"
    assert identity_of(same.recipe, "") != identity_of(again.recipe, "")


def test_cells_override_the_command_line_which_overrides_the_matrix(matrix, tmp_path):
    # The training shortens the warmup to its steps.
    overrides = {"optimizer": {"clip": None}, "schedule.warmup": 9, "train.steps": 5}
    (cell,) = matrix("train.steps=7", overrides=overrides, axes={"seed": [3]}).cells
    settings = ("optimizer.clip=null", "schedule.warmup=9", "train.steps=7", "seed=3")
    assert cell.overrides == (*settings, f"run_dir={tmp_path}/runs/seed=3")
    recipe = cell.recipe
    assert (recipe.optimizer.clip, recipe.optimizer.learning_rate) == (None, 0.01)
    assert (recipe.train.steps, recipe.seed) == (7, 3)
    horizon = matrix(overrides={"train.steps": 5}, axes={"train.tokens": [512]}).cells[0]
    assert horizon.recipe.train.tokens == 512 and horizon.recipe.train.steps is None


def test_the_command_line_of_a_cell_is_read_back_to_its_recipe(matrix):
    odd = {
        "evaluate": {"samples": ["a: {b}", "no"]},
        "model.config": {"rope_theta": 1e-6},
        "data.mask_boundaries": False,
    }
    loaded = matrix(
        overrides=odd,
        cells={
            "auto": {"optimizer.betas": [0.9, 0.95], "batch.microbatch": "auto"},
            "2": {"batch.microbatch": 2, "precision": "fp32"},
        },
    )
    for cell in loaded.cells:
        recipe = load_recipe(loaded.settings.recipe, cell.overrides)
        assert resolved(recipe) | {"weights": "fp32"} == resolved(cell.recipe)
        assert recipe.model.config["rope_theta"] == 1e-6
        assert recipe.evaluate.samples == ("a: {b}", "no")


@pytest.mark.parametrize(("file", "weights"), [("cpu", "fp32"), ("bf16", "bf16_exact")])
def test_cells_have_the_default_weights_of_their_device(
    file: str, weights: str, matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_file, "count_gpus", lambda: 1)
    accelerate = str(CONFIGURATIONS / f"{file}.yaml")
    cells = {"auto": {"precision": "bf16"}, "plain": {"precision": "bf16", "weights": "bf16"}}
    auto, plain = matrix(cells=cells, accelerate=accelerate).cells
    assert (auto.recipe.weights, plain.recipe.weights) == (weights, "bf16")


# ── Mistakes ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"axis": {}}, r"m\.yaml: `axis`: unknown key"),
        ({"baseline": {"precision": "bf16"}}, r"m\.yaml: `baseline`"),
        ({"cells": {}}, r"m\.yaml: `cells`"),
        ({"cells": {"a/b": {}}}, r"m\.yaml: `cells\.a/b`"),
        ({"baseline": "fp16"}, r"m\.yaml: `baseline: fp16` is none of the cells bf16-fp32, "),
        ({"axes": {"weights": ["fp32", "fp33"]}}, r"m\.yaml, cell fp33: .*`weights`: .*'fp33'"),
        ({"overrides": {"trian.steps": 3}}, r"m\.yaml, cell bf16-fp32: .*`trian`: unknown key"),
        ({"axes": {"batch.tokens": [100]}}, r"m\.yaml, cell tokens=100: .*`batch\.tokens: 100`"),
        ({"recipe": "nowhere.yaml"}, r"m\.yaml, cell bf16-fp32: nowhere\.yaml: no such file"),
        ({"run_dir": "runs/all"}, r"cell bf16-bf16: .* the same run folder as cell bf16-fp32"),
        ({"run_dir": "runs/{name}"}, r"`run_dir`: .* contains \{name\}, but 'name' is not a known"),
        ({"cells": {"a": {"run_dir": "x"}}}, r"cell a: `run_dir`"),
        ({"accelerate": str(CONFIGURATIONS / "ddp.yaml"), "gpus": 1}, "less than the 2 processes"),
        ({"accelerate": "nowhere"}, "nowhere: there is no such Accelerate configuration"),
        ({"accelerate": "cpu", "gpus": 2}, r"m\.yaml: `gpus: 2` has no effect on a CPU"),
    ],
)
def test_a_mistake_is_reported_with_the_file_and_the_key_or_cell(
    matrix, keys: dict[str, Any], message: str
):
    with pytest.raises(InputError, match=message):
        matrix(**keys)
    with pytest.raises(InputError, match=r"`weights`.*change its values in the file"):
        matrix("weights=bf16")


@pytest.mark.parametrize("path", MATRICES, ids=lambda path: path.stem)
def test_the_shipped_matrices_load(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)  # The recipes in a matrix are relative to the repository.
    matrix = load_matrix(path, ())
    assert len(matrix.cells) > 1 and matrix.baseline in matrix.cells
    if "evidence" in path.parts:
        optimizers = {cell.recipe.optimizer.name for cell in matrix.cells}
        assert optimizers == ({"adamw", "muon"} if "muon" in path.stem else {"adamw"})


# ── Finished cells ────────────────────────────────────────────────────────────────────────────────


def test_a_cell_is_finished_if_its_folder_holds_the_finished_training(matrix):
    cell = matrix().cells[2]
    assert not cell.is_finished()
    leave_behind(cell, steps=5)
    assert not cell.is_finished() and cell.record().summary["steps"] == 5
    leave_behind(cell)
    assert cell.is_finished()


SOURCE = "data.source=c.jsonl data.tokenizer=tok data.packs=not/there data.held_out=0.1"
SOURCE = (*SOURCE.split(), "data.text='{a}/{b}'")
# Changes of a finished cell. True if the training stays the same.
CHANGES = {
    "train.steps=13": False,
    "optimizer.learning_rate=0.5": False,
    "data.source=c.parquet": False,
    "data.tokenizer=other": False,  # its EOS token ends the documents of a token .bin
    "data.text='{a}//{b}'": False,
    "data.packing=best_fit": False,
    "data.packs=moved": True,
    "evaluate.packs=3": False,
    "evaluate.every=3": True,
    "log.every=100": True,
    "checkpoint.keep=7": True,
}


@pytest.mark.parametrize("halted", [False, True], ids=["finished", "halted"])
@pytest.mark.parametrize(("change", "same"), CHANGES.items())
def test_a_folder_with_another_training_is_refused_with_the_key(
    matrix, change: str, same: bool, halted: bool
):
    leave_behind(matrix(*SOURCE).cells[0], steps=12)
    cell = matrix(*SOURCE, change).cells[0]
    assert cell.is_finished() is same
    if halted:
        (cell.run_dir / "summary.json").unlink()
        append(cell.run_dir, {"step": 12, "event": "halted", "reason": "NaN"})
    if same:
        cell.check_folder()
    else:
        key = change.partition("=")[0]
        folder = re.escape(str(cell.run_dir))
        with pytest.raises(InputError, match=f"^{folder}: .*`{key}`: .* and .*"):
            cell.check_folder()
