"""docs/coming_from.md names keys, files and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

from docs.settings_page import rows
from pretrain.__main__ import COMMANDS
from pretrain.settings.recipe import Recipe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
OURS = [line.rstrip(" |").split(" | ")[-1] for line in PAGE.splitlines() if line.startswith("| ") and " | " in line]


def test_every_key_that_is_named_is_a_key():
    sections = Recipe.model_fields.keys()
    known = {key for key, *_ in rows(Recipe)} | {"fp8_config.keep_bf16_layers"}
    named = set(re.findall(rf"`((?:{'|'.join(sections)})\.[\w.]+)(?=[`:=])", " ".join(OURS)))
    assert len(named) > 40 and named <= known, named - known


def test_every_file_and_command_that_is_named_exists():
    named = set(re.findall(r"((?:recipes|accelerate_configs)/[\w/]+\.yaml)", " ".join(OURS)))
    assert len(named) > 8 and all((ROOT / path).is_file() for path in named)
    assert set(re.findall(r"python -m pretrain (\w+)", PAGE)) <= COMMANDS.keys()
