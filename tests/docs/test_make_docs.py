"""`make docs` writes pages from the settings classes and the recipes. Every key is documented."""

from __future__ import annotations

import json
import re

from docs import evidence_picture, gpus_page, recipe_schema, recipes_page, settings_page
from pretrain.settings.config import flatten, load_recipe, resolved
from tests.conftest import ROOT


def test_make_docs_changes_nothing() -> None:
    settings = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    recipes = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    gpus = (ROOT / "docs/gpus.md").read_text(encoding="utf-8")
    schema = (ROOT / recipe_schema.FILE).read_text(encoding="utf-8")
    assert settings == settings_page.page()
    assert recipes == recipes_page.page()
    assert gpus == gpus_page.page()
    assert json.loads(schema) == recipe_schema.recipe_schema()


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


def test_the_picture_of_the_evidence_has_every_row_of_the_table() -> None:
    page = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"(?m)^\| above BF16 \|.*\n\|[-:| ]*\n((?:\|.*\n)*)", page)
    rows = evidence_picture.rows_of_the_page()
    assert [row.label for row in rows] == [
        line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()
    ]
    larger = evidence_picture.rows_of_answers()
    assert [row.label for row in larger].count("FP8, delayed scaling") == 2
    assert evidence_picture.draw([*rows, *larger]).axes
