"""One recipe in one, two and three processes joined by gloo on the CPU: the same training, resumed by any number of them.

What each topology computes to the bit is kept by tests/golden.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.__main__ import main
from tests.conftest import Finished
from tests.golden.runs import tensors_of
from tests.launcher.test_precision_runs import EXPERTS

LAUNCH = {
    way: ["--config_file", f"accelerate_configs/{way}.yaml", "--mixed_precision", "no"]
    for way in ("ddp", "fsdp2")
}

pytestmark = pytest.mark.multi


@pytest.fixture(scope="session")
def recipe_for(recipe_for: Callable) -> Callable[[Path], dict[str, Any]]:
    """Of 8 steps, with a checkpoint to go on from and one at the end, and of two layers, which FSDP2 shards one by one."""

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
    """The finished run of one process."""
    finished = start_here(recipe_for(folder / "one"), folder)
    assert finished.status == 0, finished.output
    return finished


@pytest.fixture(scope="module", params=LAUNCH)
def two(
    request: pytest.FixtureRequest, start_as_ranks: Callable, recipe_for: Callable, folder: Path
) -> Finished:
    """The finished run of two processes, held against plain transformers before its first step."""
    finished = start_as_ranks(
        recipe_for(folder / request.param), folder, "parity=on", launch=LAUNCH[request.param]
    )
    assert finished.status == 0, finished.output
    return finished


def sent_back(run_dir: Path, copy: Path) -> str:
    """A copy of the run as it was after step 4, as the argument `run_dir`."""
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
    assert main(["export", str(two.run_dir), str(tmp_path / "out")]) == 0
    exported, final = tensors_of(tmp_path / "out"), tensors_of(two.run_dir / "final")
    assert exported.keys() == final.keys() and all(
        torch.equal(exported[name], final[name]) for name in final
    )


@pytest.mark.parametrize("two", ["fsdp2"], indirect=True)  # in shards; golden runs have DDP's bits
def test_a_run_of_two_processes_is_resumed_by_one_and_by_two_bit_for_bit(
    one: Finished,
    two: Finished,
    start_here: Callable,
    start_as_ranks: Callable,
    recipe_for: Callable,
    tmp_path: Path,
) -> None:
    recipe = recipe_for(tmp_path / "unused")
    again = start_as_ranks(
        recipe, tmp_path, sent_back(two.run_dir, tmp_path / "two"), launch=LAUNCH[two.run_dir.name]
    )
    assert again.status == 0 and again.losses() == two.losses(), again.output
    for file in (two.run_dir / "final").glob("*.safetensors"):
        assert (again.run_dir / "final" / file.name).read_bytes() == file.read_bytes()
    alone = start_here(recipe, tmp_path, sent_back(two.run_dir, tmp_path / "one"))
    assert alone.status == 0 and alone.losses()[:4] == two.losses()[:4], alone.output
    assert_same_curve(alone, one)


def test_three_processes_resume_a_run_of_one_with_uneven_packs(
    one: Finished, start_as_ranks: Callable, recipe_for: Callable, tmp_path: Path
) -> None:
    """8 packs over 3 processes, in microbatches of one: one process has a microbatch of nothing, and takes part all the same."""
    arguments = [sent_back(one.run_dir, tmp_path / "moved"), "batch.microbatch=1"]
    three = start_as_ranks(
        recipe_for(tmp_path / "unused"), tmp_path, *arguments, launch=LAUNCH["ddp"], processes=3
    )
    assert three.status == 0 and three.losses()[:4] == one.losses()[:4], three.output
    assert_same_curve(three, one)


def test_a_sharded_mixture_in_low_precision_trains_as_in_one_process(
    start_here: Callable, start_as_ranks: Callable, recipe_for: Callable, tmp_path: Path
) -> None:
    """Scales of current scaling are a microbatch's own, and two processes have the microbatches of one."""
    low = (
        "precision=current",
        "fp8_config.on_unsupported=emulate",
        "weights=bf16_exact",
        "train.steps=4",
        "parity=on",
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
            each["effective"]
            for each in runs[-1].audit()["products"]
            if ".experts." in each["name"]
        } == {"current"}
    alone, shards = runs
    for key in ("loss", "router_loss", "held_out_loss"):
        assert figures(shards, key) == pytest.approx(figures(alone, key), rel=2e-3), key
