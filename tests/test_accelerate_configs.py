"""The shipped Accelerate configurations: Accelerate reads them and starts the promised topology."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import launch_command_parser

from pretrain.launch.environment import with_precision
from pretrain.precision.settings import PRECISIONS, LowPrecisionSettings
from pretrain.settings.config import load_recipe
from tests.conftest import ROOT, Trainer, write_recipe
from tests.ranks import environment_under

CONFIGS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted(ROOT.glob("accelerate_configs/*.yaml"))
}


def precision_of(config: dict[str, Any]) -> str:
    mixed_precision = str(config["mixed_precision"])
    if mixed_precision == "no":
        return "fp32"
    if mixed_precision == "bf16":
        return "bf16"
    return config["fp8_config"]["recipe"]


PRECISION_OF = {name: precision_of(config) for name, config in CONFIGS.items()}
TOPOLOGIES = {"ddp", "fsdp2", "hsdp", "zero", "machines"}


@pytest.fixture(autouse=True)
def with_fp8_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an FP8 library, accelerate refuses to launch."""
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: True)


def test_every_precision_and_every_topology_is_shipped():
    prefixes = {name.partition("_")[0] for name in CONFIGS}
    assert TOPOLOGIES - {"machines"} <= CONFIGS.keys()
    alone = {name for name in CONFIGS if name.partition("_")[0] in prefixes - TOPOLOGIES}
    assert sorted(PRECISION_OF[name] for name in alone) == sorted(PRECISIONS)
    in_fp8 = {name for name in CONFIGS if PRECISIONS[PRECISION_OF[name]].quantized}
    assert all(name.endswith(PRECISION_OF[name]) for name in in_fp8)


@pytest.mark.parametrize("name", CONFIGS)
def test_accelerate_knows_every_key_and_the_file_selects_its_precision(
    name: str, train_here: Trainer
):
    """Resolves the precision as the launcher does before it looks at the device."""
    path = str(ROOT / "accelerate_configs" / f"{name}.yaml")
    config = load_config_from_file(path)
    assert isinstance(config, ClusterConfig)
    assert config.num_processes >= 1
    assert not config.dynamo_config, "the launcher compiles by itself"
    options = {action.dest for action in launch_command_parser()._actions}
    # accelerate reads this key from the file only.
    options.add("fsdp_ignored_modules")
    assert set(CONFIGS[name].get("fsdp_config", {})) <= options
    several = name.startswith(tuple(TOPOLOGIES))
    more = ["--num_machines", "1", "--num_processes", "2"] if several else []
    environment = environment_under(["--config_file", path, *more])
    assert "ACCELERATE_MIXED_PRECISION" in environment
    recipe = load_recipe(write_recipe(train_here.recipe, train_here.folder))
    recipe = with_precision(recipe, environment)
    precision = PRECISION_OF[name]
    assert recipe.precision == precision
    removed = ("ACCELERATE_FP8", "ACCELERATE_MIXED_PRECISION")
    assert [key for key in environment if key.startswith(removed)] == []
    backend = CONFIGS[name].get("fp8_config", {}).get("backend", "TE")
    expected = LowPrecisionSettings(backend=backend).resolved(precision)
    assert recipe.fp8_config.model_dump() == expected.model_dump()


@pytest.mark.multi
@pytest.mark.parametrize(
    "name", ["ddp_fp8_delayed", pytest.param("fsdp2_mxfp8", marks=pytest.mark.nightly)]
)
def test_a_file_trains_with_the_precision_and_topology_of_its_name(
    name: str, low_precision_recipe: dict, train_here: Trainer
):
    """Runs emulated in two processes on the CPU. Golden runs cover the other topologies."""
    recipe = low_precision_recipe | {"batch": {"tokens": 512, "microbatch": 1}, "evaluate": {}}
    del recipe["precision"]
    short = ("train.steps=2", "checkpoint.at_end=false")
    audit = train_here(*short, recipe=recipe, topology=name, launch=()).done().audit()
    assert audit["precision"] == PRECISION_OF[name]
    assert audit["confirmed_in_step"] == 2
    products = {product["name"]: product["effective"] for product in audit["products"]}
    products.pop("lm_head")
    assert {*products.values()} == {PRECISION_OF[name]}
