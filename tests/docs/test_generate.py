"""`make docs` has written the generated pages, tables and pictures, and recipes and keys exist."""

from __future__ import annotations

import re

import pytest

from docs import evidence_page, generate, settings_page
from docs.recipes_page import FOLDER, top_comment
from foundation.settings import flatten
from pretrain.metrics.flops import ModelFlops
from pretrain.model.configuration import load_config
from pretrain.model.huggingface import build_on_meta
from pretrain.settings.config import load_recipe, resolved
from pretrain.settings.recipe import Recipe
from tests.conftest import ROOT

KEYS = {key for key, *_ in settings_page.rows(Recipe)}
# Billions of parameters, computed from the shapes in the source documents.
SIZES = {
    "gpt2_fineweb_edu": 0.124,
    "gpt2_slimpajama": 1.27,
    "llama2_slimpajama": 1.294,
    "llama3_1_5b_slimpajama": 1.545,
    "llama3_2_2b_slimpajama": 2.224,
    "qwen3_slimpajama": 1.830,
}


def test_nothing_generated_is_stale() -> None:
    stale = [
        path.relative_to(ROOT).as_posix()
        for path, text in generate.outputs()
        if path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "make docs"


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


def test_keys_that_coming_from_names_exist() -> None:
    page = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
    rows = [line.rstrip(" |") for line in page.splitlines() if line.startswith("| ")]
    ours = " ".join(row.split(" | ")[-1] for row in rows if " | " in row)
    sections = "|".join(Recipe.model_fields)
    named = set(re.findall(rf"`((?:{sections})\.[\w.]+)(?=[`:=])", ours))
    assert len(named) > 40 and named <= KEYS | {"fp8_config.keep_bf16_layers"}


def test_each_other_name_of_a_key_has_an_existing_key_or_a_sentence() -> None:
    keys = KEYS | {"data.validation.source"} | Recipe.model_fields.keys()
    for name, meant in Recipe.OTHER_NAMES.items():
        assert name == name.lower()
        assert meant in keys or " " in meant, name


def test_the_comment_of_each_recipe_names_its_source() -> None:
    for path in FOLDER.glob("*.yaml"):
        assert any(line.startswith("Source: ") for line in top_comment(path)), path


@pytest.mark.parametrize("name", SIZES)
def test_a_model_from_scratch_has_the_size_of_its_document(name: str) -> None:
    flops = ModelFlops.of(build_on_meta(load_config(load_recipe(FOLDER / f"{name}.yaml").model)))
    assert flops.parameters / 1e9 == pytest.approx(SIZES[name], rel=0.005)
    assert flops.shape.vocabulary % 128 == 0, "an FP8 head needs this"
