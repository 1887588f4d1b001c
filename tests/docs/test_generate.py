"""`make docs` has written the generated pages, tables and pictures, and every key has a meaning."""

from __future__ import annotations

import re

import pytest

from docs import evidence_page, generate, settings_page
from foundation.settings import flatten
from pretrain.settings.config import load_recipe, resolved
from tests.conftest import ROOT


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
