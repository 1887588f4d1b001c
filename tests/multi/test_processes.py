"""Train one recipe in one, two and three processes on the CPU, and resume it with another number.

All of them have the same loss curve. tests/golden tests the bits of every topology.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
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
from tests.launcher.test_precision_runs import EXPERTS

LAUNCH = {
    topology: ["--config_file", f"accelerate_configs/{topology}.yaml", "--mixed_precision", "no"]
    for topology in ("ddp", "fsdp2")
}

pytestmark = pytest.mark.multi


@pytest.fixture(scope="session")
def recipe_for(recipe_for: Callable) -> Callable[[Path], dict[str, Any]]:
    """Function that returns a recipe of 8 steps and two layers, with checkpoints after 4 and 8.

    FSDP2 shards the layers separately.
    """

    def recipe(run_dir: Path) -> dict[str, Any]:
        small = recipe_for(run_dir) | {"train": {"steps": 8}, "parity": "off"}
        small["model"]["config"]["num_hidden_layers"] = 2
        return small

    return recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def one(start_here: Callable, recipe_for: Callable, folder: Path) -> Finished:
    """Finished run of one process."""
    finished = start_here(recipe_for(folder / "one"), folder)
    assert finished.status == 0, finished.output
    return finished


@pytest.fixture(scope="module", params=LAUNCH)
def two(
    request: pytest.FixtureRequest, start_as_ranks: Callable, recipe_for: Callable, folder: Path
) -> Finished:
    """Finished run of two processes, with parity before its first step."""
    finished = start_as_ranks(
        recipe_for(folder / request.param), folder, "parity=on", launch=LAUNCH[request.param]
    )
    assert finished.status == 0, finished.output
    return finished


def copy_of_step_4(run_dir: Path, copy: Path) -> str:
    """Copy the run as it was after step 4. Returns the setting of its run folder."""
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "final")
    shutil.rmtree(copy / "checkpoints" / "step-00000008")
    return f"run_dir={copy}"


def figures(run: Finished, key: str) -> list[float]:
    return [record[key] for record in run.records() if key in record]


def assert_same_curve(run: Finished, other: Finished) -> None:
    for key in ("loss", "gradient_norm", "held_out_loss", "tokens"):
        assert figures(run, key) == pytest.approx(figures(other, key), rel=1e-5), key


def test_two_processes_train_and_export_as_one_and_pass_parity(
    one: Finished, two: Finished, tmp_path: Path
) -> None:
    assert_same_curve(two, one)
    assert two.audit()["parity"]["failures"] == []
    assert main(["export", str(two.run_dir), "--out", str(tmp_path / "out")]) == 0
    exported = tensors_of(tmp_path / "out")
    final = tensors_of(two.run_dir / "final")
    assert exported.keys() == final.keys()
    assert all(torch.equal(exported[name], final[name]) for name in final)


def test_ranks_without_torchrun_say_whom_they_wait_for(two: Finished) -> None:
    lines = re.findall(r"rank \d waits for all 2 ranks at 127\.0\.0\.1:\d+$", two.out, re.MULTILINE)
    assert sorted(line[:6] for line in lines) == ["rank 0", "rank 1"]


@pytest.mark.parametrize("two", ["fsdp2"], indirect=True)  # Golden runs test DDP's bits.
def test_a_run_of_two_processes_is_resumed_by_one_and_by_two_bit_for_bit(
    one: Finished,
    two: Finished,
    start_here: Callable,
    start_as_ranks: Callable,
    recipe_for: Callable,
    tmp_path: Path,
) -> None:
    recipe = recipe_for(tmp_path / "unused")
    by_two = start_as_ranks(
        recipe,
        tmp_path,
        copy_of_step_4(two.run_dir, tmp_path / "two"),
        launch=LAUNCH[two.run_dir.name],
    )
    assert by_two.status == 0, by_two.output
    assert by_two.losses() == two.losses(), by_two.output
    for file in (two.run_dir / "final").glob("*.safetensors"):
        assert (by_two.run_dir / "final" / file.name).read_bytes() == file.read_bytes()
    by_one = start_here(recipe, tmp_path, copy_of_step_4(two.run_dir, tmp_path / "one"))
    assert by_one.status == 0, by_one.output
    assert by_one.losses()[:4] == two.losses()[:4], by_one.output
    assert_same_curve(by_one, one)


def test_three_processes_resume_a_run_of_one_with_uneven_packs(
    one: Finished, start_as_ranks: Callable, recipe_for: Callable, tmp_path: Path
) -> None:
    """3 processes share 8 microbatches of one pack, so one process has an empty microbatch."""
    arguments = [copy_of_step_4(one.run_dir, tmp_path / "moved"), "batch.microbatch=1"]
    three = start_as_ranks(
        recipe_for(tmp_path / "unused"), tmp_path, *arguments, launch=LAUNCH["ddp"], processes=3
    )
    assert three.status == 0, three.output
    assert three.losses()[:4] == one.losses()[:4], three.output
    assert_same_curve(three, one)


def test_a_sharded_mixture_in_low_precision_trains_as_in_one_process(
    start_here: Callable,
    start_as_ranks: Callable,
    recipe_for: Callable,
    tmp_path: Path,
) -> None:
    """Current scaling has scales per microbatch, and two processes have the microbatches of one."""
    low = (
        "precision=current",
        "fp8_config.on_unsupported=emulate",
        "weights=bf16_exact",
        "train.steps=4",
        "parity=on",
        "evaluate.served=current",
        "evaluate.merge=2",
        "checkpoint.every=2",
    )
    runs = []
    for name, start in (
        ("alone", start_here),
        ("shards", partial(start_as_ranks, launch=LAUNCH["fsdp2"])),
    ):
        recipe = recipe_for(tmp_path / name)
        recipe["model"]["config"] |= EXPERTS
        del recipe["model"]["config"]["head_dim"]
        runs.append(start(recipe, tmp_path, *low))
        assert runs[-1].status == 0, runs[-1].output
        assert {
            product["effective"]
            for product in runs[-1].audit()["products"]
            if ".experts." in product["name"]
        } == {"current"}
    alone, shards = runs
    for key in ("loss", "router_loss", "held_out_loss", "served_loss"):
        assert figures(shards, key) == pytest.approx(figures(alone, key), rel=2e-3), key
    assert len(figures(alone, "served_loss")) == 1


def labelled_packs(folder: Path, masks: list[np.ndarray]) -> str:
    """Write a pack of one random document for each mask of the tokens with a loss."""
    draw = np.random.default_rng(0)
    lengths = np.array([PACK_LENGTH], dtype=np.int32)
    packs = [
        Pack(draw.integers(VOCABULARY, size=PACK_LENGTH, dtype=np.uint32), lengths, mask)
        for mask in masks
    ]
    splits = {"train": [packs]}
    arrow.write_packs(folder, PACK_LENGTH, splits, settings={}, statistics={}, tokenizer=None)
    return str(folder)


def test_gradients_of_equal_tokens_are_not_taken_for_rounded_ones(
    start_as_ranks: Callable, recipe_for: Callable, tmp_path: Path
) -> None:
    """Products of two values in MXFP8 fit into BF16, and so do sums of equal products.

    All documents of this data have the same two tokens.
    """
    recipe = recipe_for(tmp_path / "run")
    recipe["model"]["config"] |= {"hidden_size": 64, "head_dim": 16}
    tokens = np.tile(np.array([3, 5], dtype=np.uint32), PACK_LENGTH // 2)
    pack = Pack(tokens, np.full(PACK_LENGTH // 2, 2, dtype=np.int32))
    arrow.write_packs(
        tmp_path / "packs",
        PACK_LENGTH,
        {"train": [[pack] * 8]},
        settings={},
        statistics={},
        tokenizer=None,
    )
    recipe["data"]["packs"] = str(tmp_path / "packs")
    recipe |= {"precision": "mxfp8", "train": {"steps": 2}, "evaluate": {}}
    recipe |= {"fp8_config": {"on_unsupported": "emulate"}}
    run = start_as_ranks(recipe, tmp_path, launch=LAUNCH["fsdp2"])
    assert run.status == 0, run.output


def test_gradients_of_one_labelled_pack_are_not_taken_for_rounded_ones(
    start_as_ranks: Callable, recipe_for: Callable, tmp_path: Path
) -> None:
    """A product in BF16 returns BF16 values. One of the 8 packs of a step has labels."""
    recipe = recipe_for(tmp_path / "run")
    masks = [np.full(PACK_LENGTH, number == 0) for number in range(8)]
    recipe["data"]["packs"] = labelled_packs(tmp_path / "packs", masks)
    recipe |= {"precision": "bf16", "train": {"steps": 2}, "evaluate": {}}
    run = start_as_ranks(recipe, tmp_path, "batch.microbatch=1", launch=LAUNCH["fsdp2"])
    assert run.status == 0, run.output
