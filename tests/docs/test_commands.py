"""Settings and commands that recipes' comments and docs/coming_from.md print are accepted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from docs.recipes_page import FOLDER
from pretrain.plan.checks import check_launch
from pretrain.settings.config import load_recipe
from pretrain.settings.launch import with_precision
from pretrain.settings.recipe import Recipe
from tests.conftest import ROOT

SETTING = rf"(?:{'|'.join(Recipe.model_fields)})[\w.]*=[^\s`]+"
FILE = r"(?:recipes|accelerate_configs|benchmarks)/[\w/]+\.yaml"


def comment_of(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("#") for line in lines if line.startswith("#")]


def printed_commands(lines: Sequence[str]) -> list[str]:
    """Return each indented line, joined over its backslashes, and each quoted list of settings."""
    indented = "\n".join(line for line in lines if line.startswith("   "))
    commands = re.sub(r"\\\n\s*", " ", indented).splitlines()
    return [*commands, *quoted_settings(" ".join(lines))]


def quoted_settings(text: str) -> list[str]:
    return re.findall(rf"`((?:{SETTING}\s*)+)`", text)


def environment_of(command: str) -> dict[str, str]:
    """Return accelerate's variables for the configuration file of `command`.

    Without one, those for FP8 if the command sets fp8_config, or else for BF16.
    """
    named = re.search(r"--config_file (\S+)", command)
    if not named:
        return {"ACCELERATE_MIXED_PRECISION": "fp8" if "fp8_config." in command else "bf16"}
    config = yaml.safe_load((ROOT / named[1]).read_text(encoding="utf-8"))
    environment = {"ACCELERATE_MIXED_PRECISION": str(config["mixed_precision"])}
    if "fp8_config" in config:
        environment["ACCELERATE_FP8_RECIPE"] = config["fp8_config"]["recipe"]
    return environment


def check(command: str, recipe: Path, *before: str) -> None:
    overrides = [*before, *re.findall(SETTING, command)]
    check_launch(with_precision(load_recipe(recipe, overrides), environment_of(command)), None)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_commands_in_a_recipes_comment_are_accepted(path: Path) -> None:
    lines = comment_of(path)
    for name in re.findall(FILE, " ".join(lines)):
        assert (ROOT / name).is_file()
    commands = printed_commands(lines)
    assert any("accelerate launch" in command for command in commands)
    for command in commands:
        check(command, path)


def test_the_recipe_and_the_settings_of_the_first_run_are_accepted(tmp_path: Path) -> None:
    page = (ROOT / "docs/first_run.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(# my\.yaml\n.*?)```", page, re.DOTALL)
    recipe = tmp_path / "my.yaml"
    recipe.write_text(text, encoding="utf-8")
    (command,) = re.findall(r"accelerate launch .*", page)
    check(command, recipe)
    rows = [line for line in page.splitlines() if line.startswith("|") and quoted_settings(line)]
    assert len(rows) >= 4
    for row in rows:
        # A row names another accelerate file, or uses that of the command.
        (config,) = re.findall(FILE, row) or re.findall(FILE, command)
        for settings in quoted_settings(row):
            check(f"--config_file {config} {settings}", recipe)


def test_settings_in_coming_from_are_accepted_by_a_guides_recipe() -> None:
    """The recipe has the horizon of the guide. A short run would need a shorter warmup."""
    page = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
    guides = page.partition("## The guides behind the recipes")[2].partition("\n## ")[0]
    commands = quoted_settings(guides)
    assert len(commands) >= 2
    for command in commands:
        check(command, FOLDER / "qwen3_slimpajama.yaml", "train.tokens=81.727e9")
