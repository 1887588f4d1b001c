"""docs/coming_from.md names keys that exist."""

from __future__ import annotations

import re

from docs.settings_page import rows
from pretrain.settings.recipe import Recipe
from tests.conftest import ROOT

PAGE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
OURS = [
    line.rstrip(" |").split(" | ")[-1]
    for line in PAGE.splitlines()
    if line.startswith("| ") and " | " in line
]


def test_every_named_key_exists():
    sections = Recipe.model_fields.keys()
    keys = {key for key, *_ in rows(Recipe)} | {"fp8_config.keep_bf16_layers"}
    named = set(re.findall(rf"`((?:{'|'.join(sections)})\.[\w.]+)(?=[`:=])", " ".join(OURS)))
    assert len(named) > 40 and named <= keys, named - keys


def test_each_other_name_has_an_existing_key_or_a_sentence():
    keys = (
        {key for key, *_ in rows(Recipe)} | {"data.validation.source"} | Recipe.model_fields.keys()
    )
    for name, meant in Recipe.OTHER_NAMES.items():
        assert name == name.lower()
        assert meant in keys or " " in meant, name
