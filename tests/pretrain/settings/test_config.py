"""Recipes: what is read, what overrides what, and that every mistake names its file, its key and a remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from packing.store import text_parts
from pretrain.settings.config import flatten, identity_of, layered, load_recipe, resolved, run_dir_of
from pretrain.settings.recipe import Recipe

SMALLEST = {"name": "small", "model": {"source": "somewhere"}, "data": {"packs": "packs"}, "train": {"steps": 10}}


def write(tmp_path: Path, values: dict | str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path


def test_overrides_beat_the_file_and_the_file_beats_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, {**SMALLEST, "weights": "bf16", "batch": {"tokens": 4096}})
    recipe = load_recipe(path, ["batch.tokens=8192", "optimizer.learning_rate=1e-4", "seed=7"])
    assert (recipe.weights, recipe.batch.tokens, recipe.optimizer.learning_rate, recipe.seed) == ("bf16", 8192, 1e-4, 7)
    assert recipe.optimizer.clip == 1.0


def test_counts_may_be_written_as_floats_and_with_underscores(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, {**SMALLEST, "train": {"tokens": "364e6"}})).train.tokens == 364_000_000
    assert load_recipe(write(tmp_path, SMALLEST), ["batch.tokens=131_072"]).batch.tokens == 131_072


def test_a_horizon_on_the_command_line_replaces_the_files(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST), ["train.epochs=2"])
    assert (recipe.train.steps, recipe.train.epochs) == (None, 2.0)


def test_a_recipe_builds_on_another_key_by_key_and_goes_before_it(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    shape = {"config": {"model_type": "qwen3", "hidden_size": 64}}
    root = {**SMALLEST, "model": shape, "optimizer": {"clip": 2.0, "eps": 1e-6}, "schedule": {"warmup": 8}}
    (tmp_path / "bases/root.yaml").write_text(yaml.safe_dump(root))
    middle = {"base": "bases/root.yaml", "name": "middle", "train": {"tokens": 5e6}, "optimizer": {"clip": 3.0}}
    (tmp_path / "middle.yaml").write_text(yaml.safe_dump(middle))
    path = write(tmp_path, {"base": "middle.yaml", "model": {"config": {"model_type": "gpt2"}}, "schedule": {"warmup": 4}})
    recipe = load_recipe(path, ["optimizer.eps=1e-7"])
    assert (recipe.name, recipe.optimizer.clip, recipe.optimizer.eps) == ("middle", 3.0, 1e-7)
    assert recipe.model.config == {"model_type": "gpt2"}, "as a whole: other architectures have other keys"
    assert (recipe.train.steps, recipe.train.tokens) == (None, 5_000_000), "a horizon replaces the base's"
    assert recipe.schedule.warmup == 4
    assert recipe.data.packs == Path("packs") and "base" not in resolved(recipe)


def test_a_models_config_takes_numbers_with_an_exponent_that_yaml_reads_as_text(tmp_path: Path) -> None:
    shape = "{model_type: llama, rope_parameters: {rope_theta: 1e6}, hidden_act: silu, name: e5, hex: 0x1e5, list: LIST}"
    shape = shape.replace("LIST", "[1E+2, 2, 1.0e6, .5e1, 1_0.5e1]")
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: x\nmodel: {{config: {shape}}}\ndata: {{packs: p}}\ntrain: {{steps: 1}}\n")
    config = load_recipe(path, ["model.config.rms_norm_eps=1e-6"]).model.config
    assert config["rope_parameters"] == {"rope_theta": 1e6} and config["rms_norm_eps"] == 1e-6
    assert config["list"] == [100.0, 2, 1e6, 5.0, 105.0] and (config["name"], config["hidden_act"], config["hex"]) == (
        "e5",
        "silu",
        0x1E5,
    )
    with pytest.raises(InputError, match=r"model\.config.*infinity"):
        load_recipe(path, ["model.config.rms_norm_eps=1e999"])


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("other.yaml", "`base`: {here}/other.yaml is no file; the path is taken from this file on"),
        ("recipe.yaml", "`base`: recipe.yaml builds on this file itself"),
        (["a", "b"], "`base` is ['a', 'b']; it should be the path of a recipe, from this file on"),
    ],
)
def test_a_base_that_cannot_be_built_on_is_refused(base: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as mistake:
        load_recipe(write(tmp_path, {**SMALLEST, "base": base}))
    assert message.format(here=tmp_path) in str(mistake.value)


def test_the_resolved_recipe_reads_back_equal(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, {**SMALLEST, "model": {"source": "m", "gradient_checkpointing": 2}}), ["train.tokens=3e6"]
    )
    assert load_recipe(write(tmp_path, resolved(recipe))) == recipe


TEXT = {"packs": "p", "tokenizer": "t", "text": "TT {text}"}
CHAT = {"packs": "p", "tokenizer": "t", "messages": "m", "chat_template": "{{ x }}", "subset": "en"}
WEIGHTED = [{"source": "a", "weight": 0.5}, {"source": "b", "weight": 0.5, "text": "{text}"}]


def parts_of(recipe: Recipe) -> list[dict]:
    return [part.model_dump() for part in text_parts(recipe.data).values()]


@pytest.mark.parametrize(
    "data",
    [
        TEXT | {"sources": WEIGHTED},
        TEXT | {"source": "a", "validation": {"source": "v"}},
        TEXT | {"source": "a", "split": "train", "subset": "en", "validation": {"split": "test"}},
        CHAT | {"sources": WEIGHTED, "validation": {"source": "w", "prompt": "q", "response": "r"}},
        CHAT | {"source": "a", "validation": {"source": "v", "chat_template": None}},
        {
            "packs": "p",
            "text": "{x}",
            "tokenizer": "t",
            "sources": [{"name": "there", "weight": 0.4}, {"source": "a", "weight": 0.6}],
        },
        TEXT | {"source": "a", "streaming": {"disk_gb": 1}, "validation": {"source": "v", "text": "text"}},
    ],
    ids=str,
)
def test_a_runs_config_as_a_recipe_or_as_a_base_has_the_sources_of_the_run(data: dict, tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, {**SMALLEST, "data": data}))
    said = resolved(recipe)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(said))
    again = load_recipe(tmp_path / "config.yaml")
    assert resolved(again) == said and parts_of(again) == parts_of(recipe)
    onto = load_recipe(write(tmp_path, {"base": "config.yaml", "name": "other", "data": {"packs": "elsewhere"}}), ["seed=2"])
    assert resolved(onto)["data"] == said["data"] | {"packs": "elsewhere"}


def test_sources_on_the_command_line_take_what_they_leave_open_from_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, {**SMALLEST, "data": TEXT | {"source": "a"}})
    recipe = load_recipe(path, ["data.source=null", "data.sources=[{source: b, weight: 0.5}, {source: c, weight: 0.5, text: c}]"])
    assert [part["text"] for part in parts_of(recipe)] == ["TT {text}", "c"]
    assert [each["text"] for each in resolved(recipe)["data"]["sources"]] == ["TT {text}", "c"]
    validated = load_recipe(path, ["data.validation.source=v"])
    assert resolved(validated)["data"]["validation"]["text"] == "TT {text}"


@pytest.mark.parametrize(
    ("changes", "overrides", "said"),
    [
        ({"data": {"packs": "p", "lenght": 512}}, [], ["recipe.yaml", "`data.lenght`", "`data.length`"]),
        ({"wieghts": "bf16"}, [], ["recipe.yaml", "`wieghts`", "`weights`"]),
        ({}, ["optimizer.learning_rat=1"], ["command line", "`optimizer.learning_rate`"]),
        ({}, ["trian.steps=1"], ["command line, over ", "`train`"]),
        ({}, ["model.confg.hidden_size=1"], ["command line, over ", "`model.config`"]),
        ({"data": {"packs": "p", "sources": [{"source": "s", "name": "a/b", "weight": 1}]}}, [], ["it should match pattern"]),
        ({"data": {"packs": "p", "length": -1}}, [], ["`data.length` is -1", "greater than 0"]),
        ({"train": {"steps": 5, "tokens": 5}}, [], ["`train`", "exactly one"]),
        ({"train": {}}, [], ["`train`", "exactly one"]),
        ({"weights": "bf17"}, [], ["`weights` is 'bf17'", "'fp32'"]),
        ({"batch": {"microbatch": "many"}}, [], ["`batch.microbatch` is 'many'", "'auto'"]),
        ({"model": {"source": "m", "gradient_checkpointing": 0}}, [], ["`model.gradient_checkpointing`"]),
        ({"data": {"packs": "p", "source": "s"}}, [], ["`data`", "`tokenizer` is not"]),
        ({"model": {}}, [], ["`model`", "`source`", "model_type"]),
        ({"seed": True}, [], ["`seed`", "whole number"]),
        ({}, ["optimizer.learning_rate=true"], ["command line", "`optimizer.learning_rate`: a number is wanted, not true or"]),
        ({"optimizer": {"clip": False}}, [], ["recipe.yaml: `optimizer.clip`: a number is wanted"]),
        ({}, ["optimizer.clip="], ["command line: `optimizer.clip=` is empty; write `optimizer.clip=null` for none"]),
        ({}, ["data.packs="], ["command line: `data.packs=` is empty; write a value"]),
        ({}, ["model.config.rms_norm_eps=-0.5"], ["`model.config`: `rms_norm_eps: -0.5` is below zero", "1e-6 is usual"]),
        ({}, ["model.config.layer_norm_epsilon=-1e-5"], ["`layer_norm_epsilon: -1e-05` is below zero"]),
        ({}, ["model.config.intermediate_size=0"], ["`intermediate_size: 0` leaves the MLPs", "set it to 1 or more"]),
        ({}, ["fp8_config.margin=19"], ["`fp8_config.margin`: 19 halvings of the scale leave no value", "18 the most"]),
        ({}, ["fp8_config.amax_history_len=1e12"], ["`fp8_config.amax_history_len`: 1,000,000,000,000 microb", "1,048,576 the"]),
        ({"data": {"packs": False}}, [], ["`data.packs` is False; it should be a path, as text"]),
        ({"model": None}, [], ["recipe.yaml: `model` is null; it should be a mapping of keys to values"]),
        ({}, ["optimizer=5"], ["command line", "`optimizer` is 5; it should be a mapping of keys to values"]),
        ({}, ["optimizer.clip=0"], ["`optimizer.clip`: 0 is no norm to clip at; for no clipping set it to null"]),
        ({}, ["seed=010"], ["command line", "`seed=010`", "base 8"]),
        ({}, ["weights"], ["command line", "key=value"]),
        ({}, ["name.first=x"], ["command line", "`name`"]),
    ],
)
def test_every_mistake_names_its_place_its_key_and_a_remedy(
    tmp_path: Path, changes: dict, overrides: list[str], said: list[str]
) -> None:
    with pytest.raises(InputError) as error:
        load_recipe(write(tmp_path, {**SMALLEST, **changes}), overrides)
    assert all(text in str(error.value) for text in said), str(error.value)


def test_a_key_of_a_section_that_a_file_says_is_none_can_be_set(tmp_path: Path) -> None:
    said = yaml.safe_dump(resolved(load_recipe(write(tmp_path, {**SMALLEST, "data": {"packs": "p"}}))))
    assert "validation: null" in said
    recipe = load_recipe(write(tmp_path, said), ["data.source=s", "data.tokenizer=t", "data.validation.source=v"])
    assert str(recipe.data.validation.source) == "v"


def test_values_at_the_edge_of_what_makes_sense_are_taken(tmp_path: Path) -> None:
    edge = ["optimizer.learning_rate=10", "fp8_config.margin=18", "fp8_config.amax_history_len=1_048_576"]
    experts = ["model.config={model_type: qwen3_moe, intermediate_size: 0, moe_intermediate_size: 32, rms_norm_eps: 0}"]
    assert load_recipe(write(tmp_path, SMALLEST), [*edge, *experts]).fp8_config.margin == 18
    assert load_recipe(write(tmp_path, SMALLEST), ["model.config={}"]).model.config == {}


def test_a_home_folder_is_written_out_wherever_a_recipe_names_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that config.yaml means the same files to whoever reads it."""
    monkeypatch.setenv("HOME", "/home/me")
    data = {"packs": "~/packs", "tokenizer": "~/tok.json", "sources": [{"source": "~/a", "weight": 1}]}
    data["validation"] = {"source": "~/v"}
    train = {"steps": 1, "begin_with": "~/runs/other/checkpoints/step-00000001"}
    recipe = load_recipe(write(tmp_path, SMALLEST | {"data": data, "train": train, "run_dir": "~/runs/{name}"}))
    assert run_dir_of(recipe) == Path("/home/me/runs/small")
    assert "~" not in yaml.safe_dump(resolved(recipe))
    given = load_recipe(
        write(tmp_path, SMALLEST), ["model.source=~/m", "data.packs=~/p", "data.source=~/a", "data.tokenizer=~/t"]
    )
    assert (given.model.source, given.data.packs) == ("/home/me/m", Path("/home/me/p"))
    assert (given.data.source, given.data.tokenizer) == ("/home/me/a", "/home/me/t")


def test_several_mistakes_are_all_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        load_recipe(write(tmp_path, {"nam": "x", "model": {"sauce": "m"}, "data": {"packs": "p"}}))
    assert len(str(error.value).splitlines()) >= 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=5", "weights=bf16", "seed=6"], "`seed` is given twice, as 5 and as 6; leave one of the two out"),
        (["name=a", "name =a"], "`name` is given twice, as a and as a; leave one of the two out"),
        (["train.steps=5", "train.tokens=1e6"], "sets `train.steps` and `train.tokens`, of which a run has one; leave the other"),
    ],
)
def test_a_key_that_a_command_line_gives_twice_is_refused(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^command line: {re.escape(message)}"):
        load_recipe(write(tmp_path, SMALLEST), overrides)


def test_of_settings_in_layers_those_go_that_later_ones_replace() -> None:
    shared = ["train.steps=5", "seed=5", "weights=bf16"]
    found = layered([*shared, "seed=6", "train.tokens=1e6", "train.steps=null"])
    assert found == ("weights=bf16", "seed=6", "train.tokens=1e6", "train.steps=null")


def test_unreadable_and_twice_keyed_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "smoke.yaml").write_text("")
    with pytest.raises(InputError, match=r"smoke\.yml: no such file; did you mean .*smoke\.yaml"):
        load_recipe(tmp_path / "smoke.yml")
    with pytest.raises(InputError, match="`seed` stands twice"):
        load_recipe(write(tmp_path, "name: a\nseed: 1\nseed: 2\n"))
    with pytest.raises(InputError, match="not valid YAML"):
        load_recipe(write(tmp_path, "name: [a\n"))
    with pytest.raises(InputError, match="a mapping"):
        load_recipe(write(tmp_path, "- a\n"))


def test_the_run_folder_is_named_from_the_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST), ["precision=bf16", "run_dir=out/{name}_{precision}_{weights}_{seed}"])
    assert run_dir_of(recipe) == Path("out/small_bf16_fp32_42")
    odd = {
        "{optimizer.learning_rate}-{optimizer.betas}": "3e-05-0.9,0.95",
        "{model.source}/{data.mask_boundaries}-{evaluate.every}": "Qwen_Qwen3-1.7B/true-null",
        "{data.packs}": "_packs",
    }
    settings = [
        "optimizer.learning_rate=3e-5",
        "model={source: Qwen/Qwen3-1.7B}",
        "data.packs=../packs",
    ]
    recipe = load_recipe(write(tmp_path, SMALLEST), settings)
    for template, expected in odd.items():
        assert run_dir_of(recipe.model_copy(update={"run_dir": template})) == Path(expected)
    with pytest.raises(InputError, match="`run_dir`"):
        run_dir_of(recipe.model_copy(update={"run_dir": "{nme}"}))


@given(st.recursive(st.integers(), lambda inner: st.dictionaries(st.text("abc", min_size=1), inner, min_size=1), max_leaves=8))
def test_flattening_keeps_every_leaf_under_its_path(values: object) -> None:
    if not isinstance(values, dict):
        return
    for key, leaf in flatten(values).items():
        below: object = values
        for part in key.split("."):
            below = below[part]
        assert below == leaf


def test_every_recipe_setting_has_a_default_that_passes_its_own_rules() -> None:
    assert Recipe.model_validate(SMALLEST).batch.tokens % Recipe.model_validate(SMALLEST).data.length == 0


def test_the_identity_changes_with_the_training_and_not_with_how_it_is_run(tmp_path: Path) -> None:
    def identity(*overrides: str) -> dict:
        return identity_of(load_recipe(write(tmp_path, SMALLEST), overrides), "fingerprint")

    same = [
        "batch.microbatch=4",
        "run_dir=elsewhere",
        "model.compile=none",
        "deterministic=true",
        "checkpoint.every=7",
        "log.every=5",
        "data.packs=moved",
    ]
    other = [
        "batch.tokens=4096",
        "seed=1",
        "optimizer.eps=1e-6",
        "optimizer.gradients=bf16",
        "schedule.warmup=5",
        "weights=bf16",
        "data.mask_boundaries=false",
    ]
    assert all(identity(change) == identity() for change in same)
    assert all(identity(change) != identity() for change in other)
    assert identity_of(load_recipe(write(tmp_path, SMALLEST)), "other data") != identity()


def test_text_on_the_command_line_is_text_and_not_yaml(tmp_path: Path) -> None:
    def text(override: str) -> str:
        return load_recipe(
            write(tmp_path, {**SMALLEST, "data": {"packs": "p", "source": "s", "tokenizer": "t"}}), [override]
        ).data.text

    assert text("data.text=1") == "1"


def test_how_a_low_precision_computes_is_identity_and_on_what_it_does_is_not(tmp_path: Path) -> None:
    def identity(*overrides: str) -> dict:
        return identity_of(load_recipe(write(tmp_path, SMALLEST), overrides), "fingerprint")

    delayed = identity("precision=delayed")
    for change in ("backend=emulation", "on_unsupported=emulate", "use_autocast_during_eval=true"):
        assert identity("precision=delayed", f"fp8_config.{change}") == delayed
    for change in ("scope=linear+head", "margin=1", "keep_bf16_layers.first=1"):
        assert identity("precision=delayed", f"fp8_config.{change}") != delayed
    assert identity("precision=current") != delayed
    assert identity("precision=delayed", "parity=on", "log.fp8_statistics=null") == delayed


def test_settings_that_only_low_precision_has_are_no_part_of_another_training(tmp_path: Path) -> None:
    def identity(*overrides: str) -> dict:
        return identity_of(load_recipe(write(tmp_path, SMALLEST), overrides), "fingerprint")

    assert identity("precision=bf16", "fp8_config.scope=linear+head") == identity("precision=bf16")
    assert not [key for key in identity("precision=bf16") if key.startswith("fp8_config")]


@pytest.mark.parametrize(
    ("text", "values"),
    [("log.trackers=wandb", ("jsonl", "wandb")), ("log.trackers=[wandb, trackio]", ("jsonl", "wandb", "trackio"))],
)
def test_one_value_is_a_list_of_one(text: str, values: tuple[str, ...], tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST), [text, "evaluate.samples=Hello"])
    assert recipe.log.trackers == values and recipe.evaluate.samples == ("Hello",)
