"""docs/recipes.md is what the recipes say, and every recipe can be planned without a hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import recipes_page as page
from pretrain.__main__ import main
from pretrain.compare.matrix_file import load_matrix
from pretrain.run import catalogue as made
from pretrain.run.catalogue import FOLDER, ListedRecipe, catalogue, files

ROOT = Path(__file__).parents[2]
RECIPES = files([FOLDER])
# What these go on from is the end of another recipe.
CONTINUED = {"comparison": "runs/comparison/base/final", "evidence_continued": "runs/evidence_111m/bf16-seed=1/final"}
# Billions of parameters, by the arithmetic of the documents' own shapes.
SIZES = {"gpt2_fineweb_edu": 0.124, "gpt2_slimpajama": 1.27, "llama2_slimpajama": 1.294, "llama3_1_5b_slimpajama": 1.545}
SIZES |= {
    "llama3_2_2b_slimpajama": 2.224,
    "qwen3_slimpajama": 1.830,
    "llama3_2_1b_openmath": 1.236,
    "llama3_2_3b_openmath": 3.213,
}
SIZES |= {"llama3_1_8b_openmath": 8.030, "qwen2_5_14b_openmath": 14.77, "small_malaysian_lm": 1.72}


@pytest.fixture(scope="module")
def recipes() -> dict[str, ListedRecipe]:
    """All shipped recipes by name, planned once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        return {each.recipe.name: each for each in catalogue(RECIPES)}


def test_the_page_of_recipes_is_current(recipes, monkeypatch):
    monkeypatch.setattr(page, "catalogue", lambda paths: list(recipes.values()))
    assert (ROOT / "docs/recipes.md").read_text(encoding="utf-8") == page.page(), "make docs"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_planned_without_a_hub_packs_and_tokenizer(path, recipes):
    each = recipes[path.stem]
    assert each.source != made.UNKNOWN, "its head says where its figures are from: `# Source: ...`"
    if path.stem in CONTINUED:
        assert CONTINUED[path.stem] in each.obstacle, "its model is what another recipe trains"
        return
    plan = each.estimate.plan
    assert each.obstacle == "" and plan.memory.total(1) <= plan.devices.memory
    assert plan.flops.shape.vocabulary % 128 == 0, "what an FP8 head needs"
    if path.stem in SIZES:
        assert plan.flops.parameters / 1e9 == pytest.approx(SIZES[path.stem], rel=0.005)


def test_the_horizons_are_those_of_the_documents_put_right(recipes):
    steps = {name: each.estimate.plan.steps for name, each in recipes.items() if each.estimate}
    assert (steps["gpt2_fineweb_edu"], steps["qwen3_slimpajama"]) == (1760, 7630)
    gpt2 = recipes["gpt2_openwebtext"].recipe
    assert gpt2.batch.tokens // gpt2.data.length == 512 and gpt2.schedule.warmup < steps["gpt2_openwebtext"]
    phases = (FOLDER / "phases/qwen3_slimpajama.yaml").read_text()
    assert "batch.tokens: 3145728, batch.microbatch: 96" in phases and 96 * 2 * 8 * 2048 == 3145728
    assert "batch.tokens: 4194304, batch.microbatch: 128" in phases and 128 * 2 * 8 * 2048 == 4194304


def test_a_matrix_of_the_penaltys_weight_has_a_cell_for_each():
    runs = load_matrix(FOLDER / "matrices/penalty_weight_fineweb_edu.yaml").runs
    assert [run.recipe.loss.penalty_weight for run in runs] == [0.0, 0.005, 0.01, 0.02, 0.05]
    assert {(run.recipe.loss.penalty, run.recipe.precision) for run in runs} == {("non_max_sum", "delayed")}


def test_the_command_lists_the_recipes_that_are_named(capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert main(["recipes", str(FOLDER / "gpt2_slimpajama.yaml")]) == 0
    said = capsys.readouterr().out
    assert "| gpt2_slimpajama | gpt2, 1.27 B      | 6.00 B |" in said and "1 x H200" in said and "Training Guide" in said
    assert main(["recipes", str(FOLDER / "comparison.yaml")]) == 0
    assert "`python -m pretrain plan recipes/comparison.yaml` reads it" in capsys.readouterr().out
    with monkeypatch.context() as narrow:
        narrow.setattr("sys.stdout.isatty", lambda: True)
        narrow.setenv("COLUMNS", "80")
        assert main(["recipes", str(FOLDER / "gpt2_slimpajama.yaml")]) == 0
        assert capsys.readouterr().out.startswith("gpt2_slimpajama\n  model, parameters ")
    assert main(["recipes", "nowhere"]) == 2
    assert "nowhere: no recipe is there" in capsys.readouterr().err
