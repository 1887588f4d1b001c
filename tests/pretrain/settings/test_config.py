"""Recipes: loading, overrides, run folders, and the identity of a training."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
import yaml

from foundation.errors import InputError
from packing.store import all_sources
from pretrain.settings import commands
from pretrain.settings.config import identity_of, load_recipe, resolved, run_dir_of, with_weights
from pretrain.settings.recipe import Recipe

RECIPES = Path(__file__).parents[3] / "recipes"
SMALLEST = {
    "name": "small",
    "model": {"source": "somewhere"},
    "data": {"packs": "packs"},
    "train": {"steps": 10},
}


def write(tmp_path: Path, values: dict | str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path


def test_overrides_precede_the_file_and_the_file_precedes_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, {**SMALLEST, "weights": "bf16", "batch": {"tokens": 4096}})
    overrides = "train.tokens=5 batch.tokens=4 batch.tokens=8_192 train.epochs=2 data.text=1"
    recipe = load_recipe(path, overrides.split())
    assert (recipe.weights, recipe.batch.tokens, recipe.data.text) == ("bf16", 8192, "1")
    assert recipe.optimizer.clip == 1.0
    # Setting one horizon drops the others.
    assert (recipe.train.steps, recipe.train.epochs) == (None, 2.0)


def test_the_config_of_an_earlier_run_may_have_keys_that_recipes_no_longer_have(
    tmp_path: Path,
) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST))
    config = resolved(recipe)
    config["log"] |= {"gap": None, "gradient_statistics": None}
    config["health"] |= {"on_gap": "warn", "gap_threshold": 0.25}
    assert load_recipe(write(tmp_path, config)) == recipe
    with pytest.raises(InputError, match=r"`log\.gap`: unknown key; remove it, also from"):
        load_recipe(write(tmp_path, SMALLEST | {"log": {"gap": 100}}))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("seed: no", "seed"),
        ("optimizer: {betas: [0.9, yes]}", "optimizer.betas"),
        ("precision: [{until: on, use: mxfp8}, {use: bf16}]", "precision.0.until"),
        ("evaluate: {every: on}", "evaluate.every"),
        ("train: {steps: 1:30}", "train.steps"),
        ("train: {steps: 0o17}", "train.steps"),
        ("train: {steps: .inf}", "train.steps"),
        ("optimizer: {eps: .nan}", "optimizer.eps"),
        ("optimizer: {clip: 2026-11-28}", "optimizer.clip"),
        ("name: no", "name"),
        ("name: 12", "name"),
        ("name: null", "name"),
        ("data: {packs: p, subset: 20231101}", "data.subset"),
    ],
)
def test_words_of_yaml_that_mean_something_else_are_refused(
    tmp_path: Path, text: str, key: str
) -> None:
    sections = {name: value for name, value in SMALLEST.items() if not text.startswith(name)}
    path = write(tmp_path, f"{text}\n{yaml.safe_dump(sections)}")
    with pytest.raises(InputError, match=rf"`{key}`"):
        load_recipe(path)


def test_dates_and_numbers_that_begin_with_zero_are_texts(tmp_path: Path) -> None:
    """They are written with quotation marks, as another program may read them."""
    sections = {"name": "2026-11-28", "data": {"packs": "p", "subset": "007"}}
    text = yaml.safe_dump(SMALLEST | sections).replace("'", "")
    recipe = load_recipe(write(tmp_path, text))
    assert (recipe.name, recipe.data.subset) == ("2026-11-28", "007")
    assert load_recipe(write(tmp_path, resolved(recipe))) == recipe


def test_a_recipe_overrides_its_base_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    shape = {"config": {"model_type": "qwen3", "hidden_size": 64}}
    root = {**SMALLEST, "model": shape, "optimizer": {"clip": 2.0, "eps": 1e-6}}
    root |= {"schedule": {"warmup": 8}}
    middle = {"base": "bases/root.yaml", "name": "middle", "train": {"tokens": 5e6}}
    middle |= {"optimizer": {"clip": 3.0}}
    last = {"base": "middle.yaml", "model": {"config": {"model_type": "gpt2"}}}
    last |= {"schedule": {"warmup": 4}}
    (tmp_path / "bases/root.yaml").write_text(yaml.safe_dump(root))
    (tmp_path / "middle.yaml").write_text(yaml.safe_dump(middle))
    recipe = load_recipe(write(tmp_path, last), ["optimizer.eps=1e-7"])
    assert (recipe.name, recipe.optimizer.clip, recipe.optimizer.eps) == ("middle", 3.0, 1e-7)
    # The model is replaced, not merged: other architectures have other keys.
    assert recipe.model.config == {"model_type": "gpt2"}
    # A horizon drops the base's horizon.
    assert (recipe.train.steps, recipe.train.tokens) == (None, 5_000_000)
    assert recipe.schedule.warmup == 4 and "base" not in resolved(recipe)


TEXT = {"packs": "p", "tokenizer": "t", "text": "TT {text}"}
CHAT = {"packs": "p", "tokenizer": "t", "messages": "m", "chat_template": "{{ x }}", "subset": "en"}
WEIGHTED = [{"source": "a", "weight": 0.5}, {"source": "b", "weight": 0.5, "text": "{text}"}]


def parts_of(recipe: Recipe) -> list[dict]:
    return [part.model_dump() for part in all_sources(recipe.data)]


@pytest.mark.parametrize(
    "data",
    [
        {"packs": "p"},
        TEXT | {"sources": WEIGHTED},
        TEXT | {"source": "a", "subset": "en", "validation": {"split": "test"}},
        CHAT | {"sources": WEIGHTED, "validation": {"source": "w", "messages": ["q", "r"]}},
        TEXT | {"sources": [{"name": "there", "weight": 0.4}, {"source": "a", "weight": 0.6}]},
        TEXT | {"source": "a", "streaming": {"disk_gb": 1}, "validation": {"source": "v"}},
    ],
    ids=str,
)
def test_a_runs_config_is_a_recipe_of_the_same_training(data: dict, tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, {**SMALLEST, "data": data}))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(resolved(recipe)))
    again = load_recipe(tmp_path / "config.yaml")
    assert resolved(again) == resolved(recipe) and parts_of(again) == parts_of(recipe)
    derived = load_recipe(
        write(tmp_path, {"base": "config.yaml", "name": "other", "data": {"packs": "elsewhere"}}),
        ["seed=2"],
    )
    assert resolved(derived)["data"] == resolved(recipe)["data"] | {"packs": "elsewhere"}


@pytest.mark.parametrize(
    ("template", "folder"),
    [
        ("out/{name}_{precision}_{weights}_{seed}", "out/small_bf16_fp32_42"),
        ("{optimizer.learning_rate}-{optimizer.betas}", "3e-05-0.9,0.95"),
        ("{model.source}/{data.mask_boundaries}-{evaluate.every}", "Qwen_Qwen3-1.7B/true-null"),
        ("{data.packs}", "_packs"),
    ],
)
def test_the_run_folder_is_named_from_the_recipe(
    template: str, folder: str, tmp_path: Path
) -> None:
    settings = ["optimizer.learning_rate=3e-5", "model={source: Qwen/Qwen3-1.7B}"]
    settings += ["data.packs=../packs", "precision=bf16", "weights=fp32"]
    recipe = load_recipe(write(tmp_path, SMALLEST), [*settings, f"run_dir={template}"])
    assert run_dir_of(recipe) == Path(folder)


@pytest.mark.parametrize(
    ("settings", "on_gpu", "weights"),
    [
        ("precision=bf16", True, "bf16_exact"),
        ("precision=delayed", True, "bf16_exact"),
        ("precision=fp32", True, "fp32"),
        ("precision=delayed", False, "fp32"),
        ("precision=bf16 weights=bf16", True, "bf16"),
        ("precision=bf16 weights=bf16_exact", False, "bf16_exact"),
    ],
)
def test_new_weights_are_exact_bf16_on_a_gpu(
    settings: str, on_gpu: bool, weights: str, tmp_path: Path
) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST), [*settings.split(), f"run_dir={tmp_path}/run"])
    assert with_weights(recipe, on_gpu=on_gpu).weights == weights


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("recorded", ["fp32", "bf16", "bf16_exact"])
def test_a_run_keeps_the_weights_of_its_folder(recorded: str, on_gpu: bool, tmp_path: Path) -> None:
    """The folder may be given, be resumed, have a name with the weights, or be stored elsewhere."""
    run = tmp_path / f"small-{recorded}"
    checkpoint = run / "checkpoints/step-00000004"
    checkpoint.mkdir(parents=True)
    (run / "config.yaml").write_text(f"weights: {recorded}\n")
    address = f"memory://{tmp_path.name}/{recorded}"
    with fsspec.open(f"{address}/config.yaml", "w") as file:
        file.write(f"weights: {recorded}\n")

    def weights(run_dir: Path | str, *more: str, resume: object = "auto") -> str:
        overrides = ["precision=bf16", f"run_dir={run_dir}", *more]
        recipe = load_recipe(write(tmp_path, SMALLEST), overrides)
        return with_weights(recipe, on_gpu=on_gpu, resume=str(resume)).weights

    assert weights(run) == weights(address) == recorded
    assert weights(tmp_path, resume=run) == weights(tmp_path, resume=checkpoint) == recorded
    assert weights(run, "weights=fp32") == "fp32"
    # A GPU resumes a folder that is named after the weights of a CPU.
    if on_gpu and recorded != "bf16":
        assert weights(f"{tmp_path}/{{name}}-{{weights}}") == recorded


@pytest.mark.parametrize(
    ("common", "same", "other"),
    [
        (
            "",
            "batch.microbatch=4 run_dir=elsewhere model.compile=none deterministic=true "
            "data.packs=moved",
            "batch.tokens=4096 seed=1 optimizer.gradients=bf16 schedule.warmup=5 "
            "data.mask_boundaries=false",
        ),
        (
            "precision=delayed",
            "fp8_config.backend=emulation fp8_config.use_autocast_during_eval=true parity=on",
            "fp8_config.scope=linear+head fp8_config.margin=1 fp8_config.keep_bf16_layers.first=1 "
            "weights=bf16",
        ),
        ("precision=bf16", "fp8_config.scope=linear+head", "weights=bf16"),
    ],
)
def test_the_identity_depends_only_on_what_is_trained(
    common: str, same: str, other: str, tmp_path: Path
) -> None:
    def identity(*overrides: str, data: str = "fingerprint") -> dict:
        settings = [*common.split(), *overrides]
        return identity_of(load_recipe(write(tmp_path, SMALLEST), settings), data)

    assert all(identity(change) == identity() for change in same.split())
    assert all(identity(change) != identity() for change in other.split())
    assert identity(data="other") != identity()


def test_overrides_of_a_sweep_agent_are_read_and_name_the_run_folder(tmp_path: Path) -> None:
    """W&B's agent writes --key=value. The shipped sweep gives each trial its own folder."""
    sweep = yaml.safe_load((RECIPES / "sweeps/smoke.yaml").read_text())
    trial = ["--optimizer.learning_rate=3e-05", "--optimizer.weight_decay=0.1"]
    fixed = [text for text in sweep["command"] if "=" in text]
    parsed = commands.read("train", [str(RECIPES / "smoke.yaml"), *trial, *fixed])
    assert str(run_dir_of(load_recipe(parsed.recipe, parsed.overrides))).endswith("lr3e-05-wd0.1")
