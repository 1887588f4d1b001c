"""`make docs` writes pages from the settings classes and the recipes. Every key is documented."""

from __future__ import annotations

import json
import re

import pytest
from PIL import Image

from benchmarks.machine import with_tables
from docs import evidence_page, gpus_page, recipe_schema, recipes_page, settings_page, studies_page
from foundation.settings import flatten
from pretrain.settings.config import load_recipe, resolved
from tests.conftest import ROOT


def test_make_docs_changes_nothing() -> None:
    settings = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    recipes = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    gpus = gpus_page.PAGE.read_text(encoding="utf-8")
    schema = (ROOT / recipe_schema.FILE).read_text(encoding="utf-8")
    assert settings == settings_page.page()
    assert recipes == recipes_page.page()
    assert gpus == with_tables(gpus_page.PAGE, "gpus", gpus_page.table())
    assert json.loads(schema) == recipe_schema.recipe_schema()


def test_figures_of_losses_are_those_of_the_result_files() -> None:
    rows = evidence_page.measured_rows()
    page = evidence_page.PAGE
    table = with_tables(page, "evidence", evidence_page.evidence_table(rows))
    assert page.read_text(encoding="utf-8") == table
    with Image.open(evidence_page.PICTURE) as picture:
        assert picture.info["Description"] == evidence_page.description(rows)
    for study_page, text in studies_page.pages().items():
        assert study_page.read_text(encoding="utf-8") == text


def test_quantiles_of_the_intervals_of_the_evidence_are_those_of_student_s_t() -> None:
    # Tables of Student's t: 2 and 4 degrees of freedom at 95 and 99 %.
    for freedom, error, quantile in ((2, 0.05, 4.303), (2, 0.01, 9.925), (4, 0.01, 4.604)):
        assert evidence_page.t_quantile(freedom, error) == pytest.approx(quantile, rel=1e-3)


def test_every_key_of_a_recipe_has_a_line_with_a_meaning() -> None:
    page = settings_page.page()
    lines = re.findall(r"^\| `([\w.]+)`( = .+?)? \| (.*) \|$", page, re.MULTILINE)
    recipe = flatten(resolved(load_recipe(ROOT / "recipes/smoke.yaml")))
    keys = {key for key in recipe if not key.startswith("model.config.")} | {"model.config"}
    assert keys <= {line[0] for line in lines}
    meanings = {key: re.sub(r"^\*.*?\* ?", "", text) for key, _, text in lines}
    assert [key for key, meaning in meanings.items() if not meaning.strip()] == []
    assert "typing." not in page and "<class" not in page


def test_the_page_of_settings_shows_keys_with_defaults_or_types() -> None:
    page = settings_page.page()
    for start in (
        "| `optimizer.clip` = `1.0` | Maximum",
        "| `train.steps` | *integer.* Number",
        "| `name` | *text, required.* Name",
        "| `checkpoint.best` = `false` | Also",
        "| `loss.penalty` | *`non_max_sum`, `neg_entropy`.* Penalty",
        "| `fp8_config.margin` = `0` (delayed) | Number",
    ):
        assert f"\n{start}" in page
