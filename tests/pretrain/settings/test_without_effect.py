"""What is said of keys that are set in vain, and that nothing is said of any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from pretrain.compare.matrix_file import load_matrix
from pretrain.settings.config import layered, load_recipe, resolved
from pretrain.settings.launch_environment import with_precision
from pretrain.settings.recipe import WITHOUT_EFFECT, Recipe

ROOT = Path(__file__).parents[3]
SMALLEST = {"name": "small", "model": {"source": "somewhere"}, "data": {"packs": "packs"}, "train": {"steps": 1000}}
DRAWN = ["model.source=null", "model.config={model_type: llama}"]

# Of each key: settings under which it is idle, the end of what is then said, and settings under which the same value acts.
IN_VAIN: dict[str, tuple[list[str], str, list[str]]] = {
    "schedule.decay=0.4": (["schedule.kind=cosine"], "it is for `schedule.kind: wsd`, and it is cosine", []),
    "schedule.min_lr_ratio=0.1": (["schedule.kind=constant"], "it is where a decay ends, and `schedule.kind: constant` has", []),
    "loss.chunk=512": (["loss.kind=reference"], "it is for `loss.kind: chunked`, and it is reference", []),
    "model.config.dtype=bfloat16": ([], "it is what transformers would load weights in; here `weights` says", ["weights=bf16"]),
    "model.config.torch_dtype=torch.float16": (
        [],
        "and it is fp32: set `weights: bf16` or",
        ["model.config.torch_dtype=float32"],
    ),
    "model.config._attn_implementation=eager": ([], "`model.attention` says how", ["model.config._attn_implementation=null"]),
    "fp8_config.backend=emulation": ([], "this is bf16, as the recipe names no `precision`", ["precision=delayed"]),
    "fp8_config.scope=linear+head": ([], "it is for FP8 and FP4, and this is bf16", ["precision=bf16"]),
    "fp8_config.keep_bf16_layers.first=1": ([], "as the recipe names no `precision`; name the one that", ["precision=mxfp8"]),
    "fp8_config.keep_bf16=[down_proj]": ([], "this is bf16", ["precision=[{until: 0.5, use: delayed}, {use: bf16}]"]),
    "evaluate.sample_tokens=9": ([], "it is of `evaluate.samples`, and there are none", ["evaluate.samples=[Once]"]),
    "evaluate.temperature=0": ([], "it is of `evaluate.samples`, and there are none", ["evaluate.samples=[Once]"]),
    "evaluate.top_p=0.5": ([], "it is of `evaluate.samples`, and there are none", ["evaluate.samples=[]"]),
    "health.max_rollbacks=7": (
        ["health.on_nan=skip"],
        "it is for `rollback`, which neither `health.on_nan`",
        ["health.on_nan=rollback"],
    ),
    "log.project=mine": (["log.trackers=[tensorboard]"], "it is for hosted trackers", ["log.trackers=[trackio]"]),
    "log.entity=team": ([], "it is for W&B, which `log.trackers` does not name", ["log.trackers=[wandb]"]),
    "log.tags=[a]": (["log.trackers=[tensorboard]"], "it is for W&B and MLflow", ["log.trackers=[mlflow]"]),
}


def found(tmp_path: Path, settings: list[str], values: dict[str, Any] = SMALLEST, mixed_precision: str = "bf16") -> list[str]:
    """What is said of a recipe with `settings`, launched by an accelerate configuration of that precision."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return with_precision(load_recipe(path, layered(settings)), {"ACCELERATE_MIXED_PRECISION": mixed_precision}).without_effect


def key_of(setting: str) -> str:
    """The key of the table that a setting is of: the longest that it begins with."""
    return max((key for key in WITHOUT_EFFECT if setting.startswith((f"{key}=", f"{key}."))), key=len)


def test_every_key_of_the_table_exists_and_has_an_example_here() -> None:
    assert sorted(WITHOUT_EFFECT) == sorted(map(key_of, IN_VAIN))
    for key in WITHOUT_EFFECT:
        section, name, *inside = key.split(".")
        assert name in Recipe.model_fields[section].annotation.model_fields
        assert all(hasattr(LlamaConfig(), each) for each in inside), key


@pytest.mark.parametrize("setting", IN_VAIN)
def test_a_key_that_is_set_in_vain_is_named_and_else_it_is_not(setting: str, tmp_path: Path) -> None:
    idle, reason, acts = IN_VAIN[setting]
    (line,) = found(tmp_path, [setting, *idle])
    assert line.startswith(f"`{key_of(setting)}: ") and " has no effect: it " in line and reason in line
    assert found(tmp_path, [setting, *acts]) == [], "the same value where it acts"
    assert found(tmp_path, [*DRAWN, *idle]) == [], "a default is never named"


def test_the_value_stands_in_the_line_as_yaml_has_it(tmp_path: Path) -> None:
    said = found(tmp_path, ["log.tags=[a]", "fp8_config.keep_bf16_layers.last=2"])
    assert [line.partition(" has")[0] for line in said] == [
        '`fp8_config.keep_bf16_layers: {"first": 0, "last": 2}`',
        '`log.tags: ["a"]`',
    ]


def test_a_configs_dtype_that_the_weights_have_is_passed_over(tmp_path: Path) -> None:
    for agreeing in (["bfloat16", "weights=bf16_exact"], ["torch.float32"], ["auto"]):
        assert found(tmp_path, [f"model.config.dtype={agreeing[0]}", *agreeing[1:]]) == []


def test_what_an_accelerate_configuration_says_of_fp8_is_not_the_recipes(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(SMALLEST))
    fp8 = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_RECIPE": "delayed", "ACCELERATE_FP8_SCOPE": "linear+head"}
    for settings in ([], ["precision=bf16"]):
        assert with_precision(load_recipe(path, settings), dict(fp8)).without_effect == []


def test_a_runs_own_config_says_nothing_that_its_recipe_did_not(tmp_path: Path) -> None:
    """It holds every key, and a precision by name."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(SMALLEST))
    run = resolved(with_precision(load_recipe(path), {"ACCELERATE_MIXED_PRECISION": "bf16"}))
    assert found(tmp_path, [], run) == found(tmp_path, ["fp8_config.scope=linear+head", "evaluate.top_p=0.5"], run) == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("mixed_precision", ["bf16", "no"])
def test_a_shipped_recipe_sets_nothing_in_vain(path: Path, mixed_precision: str) -> None:
    assert with_precision(load_recipe(path), {"ACCELERATE_MIXED_PRECISION": mixed_precision}).without_effect == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/matrices/*.yaml")), ids=lambda path: path.stem)
def test_overrides_that_cells_of_a_matrix_share_are_not_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shared = ["fp8_config.scope=linear+head"] if path.stem in ("comparison", "smoke", "seeds") else []
    said = {line for run in load_matrix(path, shared).runs for line in run.recipe.without_effect}
    base = {line for line in said if line.startswith("`schedule.decay")}  # of a base whose kind of schedule a matrix changes
    assert said == base
