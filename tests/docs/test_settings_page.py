"""docs/settings.md follows from the settings classes, which document every key."""

from __future__ import annotations

import re

from docs import settings_page as page
from pretrain.settings.config import flatten, load_recipe, resolved
from tests.conftest import ROOT


def test_the_settings_page_is_current():
    assert (ROOT / "docs/settings.md").read_text(encoding="utf-8") == page.page(), "make docs"


def test_every_key_of_a_recipe_has_a_line_with_a_meaning():
    lines = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.*?) \| (.*) \|$", page.page(), re.MULTILINE)
    recipe = flatten(resolved(load_recipe(ROOT / "recipes/smoke.yaml")))
    keys = {key for key in recipe if not key.startswith("model.config.")} | {"model.config"}
    assert keys <= {line[0] for line in lines}
    assert [key for key, _, _, meaning in lines if not meaning.strip()] == []
    assert [key for key, kind, _, _ in lines if "typing." in kind or "<class" in kind] == []
