"""docs/coming_from.md names keys, files and commands that exist, and what it says of other libraries is so in those installed."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from accelerate.utils import TERecipeKwargs
from transformers import SchedulerType, TrainingArguments

from docs.settings_page import rows
from pretrain.__main__ import COMMANDS
from pretrain.settings.recipe import Recipe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
OURS = [line.rstrip(" |").split(" | ")[-1] for line in PAGE.splitlines() if line.startswith("| ") and " | " in line]


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def theirs(title: str) -> set[str]:
    """The names in backticks in the first column of a section's table, without values."""
    first = [line.split(" | ")[0] for line in section(title).splitlines() if line.startswith("| ")]
    return set(re.findall(r"`([a-z_0-9]+)(?=[:=`])", " ".join(first)))


def test_every_key_that_is_named_is_a_key():
    sections = Recipe.model_fields.keys()
    known = {key for key, *_ in rows(Recipe)} | {"fp8_config.keep_bf16_layers"}
    named = set(re.findall(rf"`((?:{'|'.join(sections)})\.[\w.]+)(?=[`:=])", " ".join(OURS)))
    assert len(named) > 40 and named <= known, named - known


def test_every_file_and_command_that_is_named_exists():
    named = set(re.findall(r"((?:recipes|accelerate_configs)/[\w/]+\.yaml)", " ".join(OURS)))
    assert len(named) > 8 and all((ROOT / path).is_file() for path in named)
    assert set(re.findall(r"python -m pretrain (\w+)", PAGE)) <= COMMANDS.keys()


def test_what_is_said_of_the_trainer_and_of_accelerate_are_their_names():
    arguments = {field.name for field in fields(TrainingArguments)} | {kind.value for kind in SchedulerType}
    others = {"input_ids", "labels", "min_lr_rate", "lr_scheduler_kwargs"}
    assert theirs("Hugging Face Trainer") - others <= arguments, theirs("Hugging Face Trainer") - others - arguments
    fp8 = {field.name for field in fields(TERecipeKwargs)} | {"backend", "convert_model", "gradient_accumulation_steps"}
    assert theirs("accelerate's FP8") - {"fp8_config"} <= fp8, theirs("accelerate's FP8") - fp8
