"""The shipped recipes, matrices and configurations fit on the cards that their comments name."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedModel

from foundation.units import GIB
from lab.experiments.matrix_file import load_matrix
from lab.speed.targets import devices_called, plan_on
from pretrain.launch.environment import with_precision
from pretrain.plan.plan import Training
from pretrain.precision.schedule import PrecisionSchedule
from pretrain.precision.selection import select_precision
from pretrain.run.job import training_elsewhere
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe
from tests.conftest import ROOT
from tests.docs.test_commands import COMMENTED, commands_of, environment_of

# Cards of files that name none, and of those that name others. A file without a model for a GPU is
# trained on a CPU.
USUAL = "H100"
ON = {
    **dict.fromkeys(["smoke", "tinyshakespeare", "mxfp4", "cpu"], None),
    **dict.fromkeys(["llama3_1_8b_openmath", "qwen2_5_14b_openmath"], "H200"),
    **dict.fromkeys(["nvfp4", "mxfp8", "ddp_mxfp8", "fsdp2_mxfp8"], "B200"),
    **dict.fromkeys(["b200_speed", "qwen3_slimpajama_speed", "openmath"], "B200"),
    **dict.fromkeys(["small_malaysian_lm", "small_malaysian_lm_scopes"], "B200"),
}
# Experiments of the documents ("tiers") that comments describe: the recipe, the devices, settings.
TIERS = [
    ("qwen3_slimpajama", "8xB200", "batch.tokens=1310720 batch.microbatch=20"),
    ("llama2_slimpajama", "2xB200", "batch.tokens=786432 batch.microbatch=24"),
    ("llama2_slimpajama", "8xB200", "batch.tokens=1572864 batch.microbatch=24"),
    ("llama2_slimpajama", "8xB200", "batch.tokens=3145728 batch.microbatch=24"),
    ("gpt2_slimpajama", "2xRTX A6000", ""),
    ("llama3_1_5b_slimpajama", "2xRTX A6000", ""),
]
LLAMA = yaml.safe_load((ROOT / "benchmarks/llama_3_1_8b.yaml").read_text())["model"]["config"]
# Configurations of models on the hub, as far as the memory depends on them.
CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": LLAMA,
    "meta-llama/Llama-3.2-3B": LLAMA
    | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28}
    | {"num_attention_heads": 24, "tie_word_embeddings": True},
    "meta-llama/Llama-3.2-1B": LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"head_dim": 64, "tie_word_embeddings": True},
} | {
    source: yaml.safe_load((ROOT / f"benchmarks/{name}.yaml").read_text())["model"]["config"]
    for source, name in (
        ("Qwen/Qwen2.5-14B", "qwen2_5_14b"),
        ("Qwen/Qwen3-1.7B-Base", "qwen3_1_7b"),
    )
}

PLANNED: dict[str, tuple[Training, PreTrainedModel]] = {}


def check_fit(recipe: Recipe, on: str, topology: str | None = None) -> None:
    """Assert that a recipe fits on devices, with memory to spare."""
    if config := CONFIGS.get(recipe.model.source or ""):
        model = recipe.model.model_copy(update={"source": None, "config": config})
        recipe = recipe.model_copy(update={"model": model})
    if recipe.train.epochs:
        # The number of packs is not known.
        train = recipe.train.model_copy(update={"epochs": None, "steps": 1000})
        recipe = recipe.model_copy(update={"train": train})
    # Building a model takes most of the time.
    key = f"{recipe.model} {recipe.optimizer.name}"
    if key not in PLANNED:
        PLANNED[key] = training_elsewhere(recipe, [], None)
    training, shapes = PLANNED[key]
    active = select_precision(str(recipe.precision), recipe.fp8_config, lambda _: None)
    schedule = PrecisionSchedule([(None, active)], training.steps)
    training = replace(training, recipe=recipe, schedule=schedule)
    plan = plan_on(devices_called(on), training, shapes, topology)
    needed = plan.takes(plan.expected_microbatch)
    assert needed <= plan.devices.memory, f"{needed / GIB:.1f} GiB do not fit"


def topology_of(configuration: dict[str, Any]) -> str | None:
    """Return the topology of an Accelerate configuration, as `--config` of `plan` names it."""
    if configuration["distributed_type"] == "FSDP":
        gathers_often = configuration["fsdp_config"]["fsdp_reshard_after_forward"]
        return "fsdp2" if gathers_often else "zero"
    return "ddp" if configuration.get("num_processes", 1) > 1 else None


def check_command(words: Sequence[str], card: str) -> None:
    """Plan the training that `accelerate launch` starts."""
    file = words[words.index("--config_file") + 1]
    configuration = yaml.safe_load((ROOT / file).read_text())
    processes = configuration.get("num_processes", 1)
    if "--num_processes" in words:
        processes = int(words[words.index("--num_processes") + 1])
    path, *overrides = words[words.index("train_accelerate.py") + 1 :]
    machines = configuration.get("num_machines", 1)
    recipe = with_precision(load_recipe(ROOT / path, overrides), environment_of(file, overrides))
    # Only the memory of one device is checked, so one machine stands for all.
    check_fit(recipe, f"{processes // machines}x{card}", topology_of(configuration))


@pytest.mark.parametrize("path", COMMENTED, ids=lambda path: path.stem)
def test_the_trainings_in_a_comment_fit_on_its_card(path: Path) -> None:
    card = ON.get(path.stem, USUAL)
    if path.parent.name == "matrices":
        matrix = load_matrix(path)
        settings = [cell.recipe for cell in matrix.cells]
        for recipe in [] if matrix.on_cpu else settings:
            topology = "ddp" if matrix.processes > 1 else None
            check_fit(recipe, f"{matrix.processes}x{card}", topology)
        return
    for command in commands_of(path) if card else ():
        words = shlex.split(command)
        if words[0] == "accelerate" and "fp8_config.on_unsupported=emulate" not in words:
            check_command(words, card)


@pytest.mark.parametrize(("name", "on", "settings"), TIERS)
def test_the_experiments_in_a_comment_fit_on_its_cards(name: str, on: str, settings: str) -> None:
    overrides = ["precision=bf16", "train.steps=1000", "schedule.warmup=100", *settings.split()]
    check_fit(load_recipe(ROOT / f"recipes/{name}.yaml", overrides), on, "ddp")
