"""Train one recipe in one, two and three processes on the CPU, and resume it with another number.

All of them have the same loss curve. tests/golden tests the bits of every topology, and
tests/launcher/test_resume.py resumes two processes by two.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packing import arrow
from packing.arrow import Pack
from pretrain.__main__ import main
from tests.conftest import PACK_LENGTH, VOCABULARY, Finished
from tests.golden.runs import tensors_of
from tests.launcher.conftest import with_experts

pytestmark = pytest.mark.multi

MUON = ("optimizer.name=muon", "log.fp8_statistics=2")
LOW = (
    "precision=current",
    "fp8_config.on_unsupported=emulate",
    "weights=bf16_exact",
    "train.steps=4",
    "checkpoint.every=2",
)
# A model with a gated delta rule in its first layer, and attention in the second.
HYBRID = (
    "model.config.model_type=qwen3_5_text",
    "model.config.layer_types=[linear_attention, full_attention]",
    "model.config.linear_num_key_heads=16",
    "model.config.linear_num_value_heads=16",
    "model.config.linear_key_head_dim=4",
    "model.config.linear_value_head_dim=4",
)
SERVED = ("parity=on", "evaluate.served=current", "evaluate.merge=2")
EXACT_CURVE = dict.fromkeys(("loss", "gradient_norm", "held_out_loss", "tokens"), 1e-5)
# Gradients that are summed in another order differ by 1e-7, and then by a bit of BF16.
MUON_CURVE = {"loss": 1e-4, "held_out_loss": 1e-4, "muon_update_rms": 1e-2}
LOW_CURVE = dict.fromkeys(("loss", "router_loss", "held_out_loss", "served_loss"), 2e-3)

# The topology of two ranks, settings, and the tolerances of figures. Current scaling has scales per
# microbatch, and two processes have the microbatches of one.
AS_ONE: dict[str, tuple[str, tuple[str, ...], dict[str, float]]] = {
    "copies": ("ddp", (), EXACT_CURVE),
    "shards": ("fsdp2", (), EXACT_CURVE),
    "Muon's copies of shards": ("zero", MUON, MUON_CURVE),
    "Muon's shards": ("fsdp2", MUON, MUON_CURVE),
    "Muon's codes": ("fsdp2", (*MUON, *LOW), {"loss": 1e-3}),
    "experts": ("fsdp2", (*LOW, *SERVED), LOW_CURVE),
    "a hybrid's shards": ("fsdp2", (*HYBRID, *LOW), {"loss": 1e-3}),
}


@pytest.fixture(scope="session")
def recipe_in(recipe_for: Callable) -> Callable[[Path], dict[str, Any]]:
    """Function that returns a recipe of 8 steps and two layers, with checkpoints after 4 and 8.

    FSDP2 shards the layers separately.
    """

    def recipe(run_dir: Path) -> dict[str, Any]:
        small = recipe_for(run_dir) | {"train": {"steps": 8}, "parity": "off"}
        small["model"]["config"]["num_hidden_layers"] = 2
        return small

    return recipe


@pytest.fixture(scope="module")
def trained(
    start_here: Callable, start_as_ranks: Callable, recipe_in: Callable, tmp_path_factory: Any
) -> Callable[..., Finished]:
    """Function that trains with settings once. With `topology`, two ranks train."""
    folder = tmp_path_factory.mktemp("processes")
    made: dict[Any, Finished] = {}

    def train(
        topology: str | None = None, settings: tuple[str, ...] = (), *, experts: bool = False
    ) -> Finished:
        key = topology, settings, experts
        if key not in made:
            recipe = recipe_in(folder / f"run-{len(made)}")
            if experts:
                recipe["model"]["config"] = with_experts(recipe["model"]["config"])
            if topology:
                launch = launch_of(topology)
                made[key] = start_as_ranks(recipe, folder, *settings, launch=launch)
            else:
                made[key] = start_here(recipe, folder, *settings)
            assert made[key].status == 0, made[key].output
        return made[key]

    return train


def launch_of(topology: str) -> list[str]:
    config = f"accelerate_configs/{topology}.yaml"
    return ["--config_file", config, "--mixed_precision", "no"]


def figures(run: Finished, key: str) -> list[float]:
    return [record[key] for record in run.records() if key in record]


def assert_same_curve(run: Finished, other: Finished, tolerances: dict[str, float]) -> None:
    for key, tolerance in tolerances.items():
        assert figures(other, key), key
        assert figures(run, key) == pytest.approx(figures(other, key), rel=tolerance), key


@pytest.mark.parametrize("name", AS_ONE)
def test_two_processes_train_as_one(name: str, trained: Callable[..., Finished]) -> None:
    topology, settings, tolerances = AS_ONE[name]
    experts = name == "experts"
    two = trained(topology, settings, experts=experts)
    assert_same_curve(two, trained(None, settings, experts=experts), tolerances)
    if experts:
        products = [row for row in two.audit()["products"] if ".experts." in row["name"]]
        assert {row["effective"] for row in products} == {"current"}


@pytest.mark.parametrize("topology", ["ddp", "fsdp2"])
def test_two_processes_pass_parity_and_export_their_weights(
    topology: str, trained: Callable[..., Finished], tmp_path: Path
) -> None:
    two = trained(topology, ("parity=on", "train.steps=2"))
    assert two.audit()["parity"]["failures"] == []
    assert main(["export", str(two.run_dir), "--out", str(tmp_path / "out")]) == 0
    exported = tensors_of(tmp_path / "out")
    final = tensors_of(two.run_dir / "final")
    assert exported.keys() == final.keys()
    assert all(torch.equal(exported[name], final[name]) for name in final)
    lines = re.findall(r"rank \d waits for all 2 ranks at 127\.0\.0\.1:\d+$", two.out, re.MULTILINE)
    assert sorted(line[:6] for line in lines) == ["rank 0", "rank 1"]


# The second run has 3 processes for 8 microbatches of one pack, so one of them is empty.
@pytest.mark.parametrize(("topology", "processes"), [("fsdp2", 1), (None, 3)])
def test_another_number_of_processes_resumes_a_run(
    topology: str | None,
    processes: int,
    trained: Callable[..., Finished],
    start_here: Callable,
    start_as_ranks: Callable,
    recipe_in: Callable,
    tmp_path: Path,
) -> None:
    run = trained(topology)
    copy = shutil.copytree(run.run_dir, tmp_path / "copy")
    shutil.rmtree(copy / "final")
    shutil.rmtree(copy / "checkpoints" / "step-00000008")
    recipe = recipe_in(copy)
    if processes == 1:
        resumed = start_here(recipe, tmp_path)
    else:
        options = {"launch": launch_of("ddp"), "processes": processes}
        resumed = start_as_ranks(recipe, tmp_path, "batch.microbatch=1", **options)
    assert resumed.status == 0, resumed.output
    assert resumed.losses()[:4] == run.losses()[:4], resumed.output
    assert_same_curve(resumed, trained(), EXACT_CURVE)


def packs_of_two_tokens() -> list[Pack]:
    """Return packs whose documents have the same two tokens.

    Products of two values in MXFP8 fit into BF16, and so do sums of equal products.
    """
    tokens = np.tile(np.array([3, 5], dtype=np.uint32), PACK_LENGTH // 2)
    return [Pack(tokens, np.full(PACK_LENGTH // 2, 2, dtype=np.int32))] * 8


def packs_of_one_label() -> list[Pack]:
    """Return packs of which one has labels. A product in BF16 returns BF16 values."""
    draw = np.random.default_rng(0)
    lengths = np.array([PACK_LENGTH], dtype=np.int32)
    return [
        Pack(
            draw.integers(VOCABULARY, size=PACK_LENGTH, dtype=np.uint32),
            lengths,
            np.full(PACK_LENGTH, number == 0),
        )
        for number in range(8)
    ]


@pytest.mark.parametrize(
    ("packs", "settings"),
    [
        (packs_of_two_tokens, ("precision=mxfp8", "fp8_config.on_unsupported=emulate")),
        (packs_of_one_label, ("precision=bf16", "batch.microbatch=1")),
    ],
)
def test_gradients_that_fit_into_bf16_are_not_taken_for_rounded_ones(
    packs: Callable[[], list[Pack]],
    settings: tuple[str, ...],
    start_as_ranks: Callable,
    recipe_in: Callable,
    tmp_path: Path,
) -> None:
    recipe = recipe_in(tmp_path / "run") | {"train": {"steps": 2}, "evaluate": {}}
    recipe["model"]["config"] |= {"hidden_size": 64, "head_dim": 16}
    options = {"settings": {}, "statistics": {}, "tokenizer": None}
    arrow.write_packs(tmp_path / "packs", PACK_LENGTH, {"train": [packs()]}, **options)
    recipe["data"]["packs"] = str(tmp_path / "packs")
    run = start_as_ranks(recipe, tmp_path, *settings, launch=launch_of("fsdp2"))
    assert run.status == 0, run.output
