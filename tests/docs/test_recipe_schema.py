"""recipes/schema.json follows from the settings classes, and accepts what the launcher accepts."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from docs.recipe_schema import FILE, MODELINE
from docs.recipes_page import FOLDER
from foundation.errors import InputError
from foundation.reading import load_yaml, parse_yaml
from pretrain.settings.config import load_recipe, resolved
from tests.conftest import ROOT

SCHEMA = json.loads((ROOT / FILE).read_text(encoding="utf-8"))
RECIPES = sorted(FOLDER.glob("*.yaml"))
TYPES = {
    **{"null": (type(None),), "boolean": (bool,), "string": (str,), "array": (list,)},
    **{"integer": (int, float), "number": (int, float), "object": (dict,)},
}
LIMITS = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "minLength": lambda value, limit: len(value) >= limit,
    "minItems": lambda value, limit: len(value) >= limit,
    "maxItems": lambda value, limit: len(value) <= limit,
    "pattern": lambda value, pattern: re.search(pattern, value),
    "const": lambda value, expected: value == expected,
    # As in JSON, 1 equals 1.0, but not true.
    "enum": lambda value, members: (
        (value, type(value) is bool) in [(member, type(member) is bool) for member in members]
    ),
    "$ref": lambda value, name: accepts(SCHEMA["$defs"][name.split("/")[-1]], value),
    "oneOf": lambda value, members: sum(accepts(member, value) for member in members) == 1,
    "anyOf": lambda value, members: any(accepts(member, value) for member in members),
    "type": lambda value, names: any(
        has_type(value, name) for name in ([names] if isinstance(names, str) else names)
    ),
}
OTHER_KEYWORDS = {
    *("$schema", "$defs", "title", "description", "default", "format"),
    *("items", "properties", "additionalProperties", "required"),
}


def has_type(value: Any, name: str) -> bool:
    return type(value) in TYPES[name] and (name != "integer" or value == int(value))


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """Return whether a value is valid. Knows every keyword in recipes/schema.json."""
    assert schema.keys() <= LIMITS.keys() | OTHER_KEYWORDS
    # The type is checked first, because limits hold for one type.
    keywords = sorted(LIMITS.keys() & schema.keys(), key=lambda key: key != "type")
    if not all(LIMITS[key](value, schema[key]) for key in keywords):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(accepts(schema["items"], item) for item in value)
    if isinstance(value, dict) and schema.get("additionalProperties") is False:
        known = schema["properties"]
        has_required = set(schema.get("required", ())) <= value.keys() <= known.keys()
        return has_required and all(accepts(known[key], item) for key, item in value.items())
    return True


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_the_schema_and_matches_it(path: Path):
    assert path.read_text(encoding="utf-8").startswith(f"{MODELINE}\n")
    assert accepts(SCHEMA, load_yaml(path))
    assert accepts(SCHEMA, resolved(load_recipe(path))), "config.yaml of a run"


SECTIONS = """\
name: odd
model: {config: {model_type: qwen3, any: [thing]}}
data: {packs: packs/odd}
train: {steps: 10}
"""


ACCEPTED = [
    "train: {tokens: 1e9}",
    "train: {tokens: 2.5e9}",
    "train: {steps: 1_000}",
    "train: {steps: '1_000'}",
    "optimizer: {learning_rate: '1e-4', clip: null}",
    "optimizer: {betas: [0, .95], eps: 1E-8}",
    "batch: {tokens: 2e6, microbatch: auto}",
    "batch: {microbatch: auto}",
    "batch: {microbatch: 8.0}",
    "model: {source: gpt2, gradient_checkpointing: 2, fused: on}",
    "model: {source: ~/gpt2@main, fused: off, from_scratch: yes}",
    "checkpoint: {best: 'on', at_end: no, every: null}",
    "parity: off",
    "precision: [{until: 0.8, use: nvfp4}, {until: 9e2, use: delayed}, {use: bf16}]",
    "precision: null",
    "fp8_config: {keep_bf16: ['layers.0.*'], keep_bf16_layers: {last: 2}, margin: 1}",
    "run_dir: ~/runs/{name}-{optimizer.learning_rate}",
    "data: {source: web.jsonl, tokenizer: t, validation: {split: test}, streaming: true}",
    "data: {source: web.jsonl, tokenizer: t, streaming: {disk_gb: 20, window: 64e6}}",
    "data: {messages: [problem, '{solution}\\n'], chat_template: chatml}",
    "data: {sources: [{source: a, weight: 0.7}, {source: b, weight: 1}], tokenizer: t}",
]
REFUSED = [
    "learning_rate: 1e-4",
    "optimizer: {lr: 1e-4}",
    "optimizer: {betas: [0.9]}",
    "optimizer: {learning_rate: -1}",
    "train: {steps: many}",
    "train: {steps: 2.5}",
    "precision: fp8",
    "precision: [{until: 0.8}, {use: bf16}]",
    "batch: {microbatch: auto:16}",
    "parity: maybe",
    "data: {sources: [{source: a}]}",
    "log: {trackers: wandb}",
    "name: 7",
    "name: off",
    "seed: no",
    "evaluate: {every: on}",
    "optimizer: {betas: [no, 0.9]}",
    "train: {steps: 1:30}",
]


@pytest.mark.parametrize("text", [*ACCEPTED, *REFUSED])
def test_the_schema_accepts_what_the_launcher_accepts(text: str, tmp_path: Path):
    (tmp_path / "below.yaml").write_text(SECTIONS)
    (tmp_path / "odd.yaml").write_text(f"base: below.yaml\n{text}")
    refusal = pytest.raises(InputError) if text in REFUSED else nullcontext()
    with refusal:
        load_recipe(tmp_path / "odd.yaml")
    assert accepts(SCHEMA, {"base": "below.yaml", **parse_yaml(text)}) == (text in ACCEPTED)


# A YAML 1.2 parser, as in editors, reads these values of a YAML file as text. The command line may
# complete an empty section.
@pytest.mark.parametrize(
    "values",
    [
        {"train": {"steps": "1_000"}},
        {"model": {"from_scratch": "yes", "fused": "on"}},
        {"parity": "Off"},
        {"optimizer": {"learning_rate": "1_0.5e-5"}},
        {"name": "part", "model": {"source": "gpt2"}, "evaluate": None},
    ],
)
def test_the_schema_accepts_what_editors_read_as_text(values: dict[str, Any]):
    assert accepts(SCHEMA, values)
