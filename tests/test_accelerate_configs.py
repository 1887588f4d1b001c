"""The shipped Accelerate configurations: Accelerate reads them and starts the promised topology."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import launch_command_parser

from pretrain.launch.environment import with_precision
from pretrain.precision.settings import PRECISIONS, LowPrecisionSettings
from pretrain.settings.config import load_recipe
from tests.conftest import ROOT, Finished
from tests.ranks import environment_under

CONFIGS = sorted(ROOT.glob("accelerate_configs/*.yaml"))

RECIPE = {"name": "small", "model": {"source": "m"}, "data": {"packs": "p"}, "train": {"steps": 1}}
# Prefixes of the names of files for several processes.
TOPOLOGIES = ("ddp", "fsdp2", "hsdp", "zero", "machines")


def config_path(name: str) -> Path:
    return ROOT / "accelerate_configs" / f"{name}.yaml"


def precision_of(path: Path) -> str:
    config = yaml.safe_load(path.read_text())
    unquantized = {"no": "fp32", "bf16": "bf16"}
    return unquantized.get(str(config["mixed_precision"])) or config["fp8_config"]["recipe"]


ONE_DEVICE = {
    path.stem: precision_of(path) for path in CONFIGS if not path.stem.startswith(TOPOLOGIES)
}
SEVERAL_IN_FP8 = {
    path.stem: precision_of(path)
    for path in CONFIGS
    if path.stem.startswith(TOPOLOGIES) and "fp8" in path.stem
}


def test_every_precision_and_every_topology_is_shipped():
    assert {path.stem for path in CONFIGS} >= {"ddp", "fsdp2", "hsdp", "zero"}
    assert sorted(ONE_DEVICE.values()) == sorted(PRECISIONS)
    assert all(
        name.endswith(precision)
        for name, precision in ONE_DEVICE.items()
        if PRECISIONS[precision].quantized
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_knows_every_key_of_the_file(path: Path):
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    assert config.num_processes >= 1
    assert not config.dynamo_config, "the launcher compiles by itself"
    options = {action.dest for action in launch_command_parser()._actions}
    # accelerate reads this key from the file only.
    options.add("fsdp_ignored_modules")
    assert set(yaml.safe_load(path.read_text()).get("fsdp_config", {})) <= options


@pytest.mark.parametrize(("name", "precision"), (ONE_DEVICE | SEVERAL_IN_FP8).items())
def test_a_file_selects_its_precision_and_its_variables_are_removed(
    name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Resolves the precision as the launcher does before it looks at the device."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    # Without an FP8 library, accelerate refuses to launch.
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: True)
    several = ["--num_machines", "1", "--num_processes", "2"] if name in SEVERAL_IN_FP8 else []
    environment = environment_under(["--config_file", str(config_path(name)), *several])
    assert "ACCELERATE_MIXED_PRECISION" in environment
    recipe = with_precision(load_recipe(tmp_path / "recipe.yaml"), environment)
    assert recipe.precision == precision
    assert [
        key
        for key in environment
        if key.startswith("ACCELERATE_FP8") or key == "ACCELERATE_MIXED_PRECISION"
    ] == []
    backend = (
        yaml.safe_load(config_path(name).read_text()).get("fp8_config", {}).get("backend", "TE")
    )
    assert (
        recipe.fp8_config.model_dump()
        == LowPrecisionSettings(backend=backend).resolved(precision).model_dump()
    )


@pytest.mark.multi
@pytest.mark.parametrize(
    "name", ["ddp_fp8_delayed", pytest.param("fsdp2_mxfp8", marks=pytest.mark.nightly)]
)
def test_a_file_trains_with_the_precision_and_topology_of_its_name(
    name: str,
    low_precision_recipe: dict[str, Any],
    start_as_ranks: Callable[..., Finished],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Runs emulated in two processes on the CPU. Golden runs cover the other topologies."""
    # Without an FP8 library, accelerate refuses to launch.
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: True)
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    recipe = low_precision_recipe | {
        "model": {"config": low_precision_recipe["model"]["config"] | sizes},
        "batch": {"tokens": 4 * 128, "microbatch": 1},
        "train": {"steps": 2},
        "checkpoint": {"at_end": False},
    }
    del recipe["precision"], recipe["evaluate"]
    finished = start_as_ranks(recipe, tmp_path, launch=["--config_file", str(config_path(name))])
    assert finished.status == 0, finished
    audit = finished.audit()
    assert audit["precision"] == SEVERAL_IN_FP8[name]
    assert audit["confirmed_in_step"] == 2
    effective = {
        product["effective"] for product in audit["products"] if product["name"] != "lm_head"
    }
    assert effective == {SEVERAL_IN_FP8[name]}
