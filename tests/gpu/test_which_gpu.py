"""`python -m pretrain which` on a GPU: every training in a process of its own, speeds and memory measured, none of it our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.errors import InputError
from pretrain.compare import which, which_trainings
from pretrain.precision.settings import PRECISIONS
from pretrain.precision.transformer_engine import unavailable_because
from tests.conftest import write_recipe
from tests.gpu.conftest import needs


@pytest.fixture
def recipe(low_precision_recipe: dict[str, Any], tmp_path: Path) -> Path:
    """A layer on packs of which each is seen once."""
    recipe = low_precision_recipe | {
        "data": low_precision_recipe["data"] | {"held_out": 0.05},
        "train": {"epochs": 1},
    }
    recipe["batch"] = {"tokens": 128, "microbatch": 1}
    recipe["model"]["config"] |= {"num_hidden_layers": 1}
    for key in ("precision", "fp8_config", "evaluate", "checkpoint", "run_dir"):
        del recipe[key]
    return write_recipe(recipe, tmp_path)


def test_a_round_measures_speed_memory_and_loss_on_the_hardware(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round, as the hours are over then: some 80 s, most of it four starts."""
    # Tests before this one may hold some memory of the GPU.
    monkeypatch.setattr(which_trainings, "GPU_IS_FREE", 1e3)
    needs("delayed")
    folder = tmp_path / "which"
    command = [
        str(recipe),
        "--run_dir",
        str(folder),
        "--precisions",
        "bf16,delayed",
        "--steps",
        "80",
        "--hours",
        "0.001",
    ]
    assert which.main(command) == 1
    verdict = json.loads((folder / "verdict.json").read_text())
    assert list(verdict["protocol"]["seconds"]) == ["bf16", "delayed"]
    candidate = verdict["candidates"]["delayed"]
    assert (
        candidate["speedup"] > 0
        and candidate["tokens_per_second"] > 0
        and candidate["memory_gib"] > 0
    )
    (cost,) = candidate["served"]["by_seed"].values()
    assert 0 < abs(cost) < 0.1
    assert not list(folder.glob("rounds/*/checkpoints")), (
        "no checkpoint is left of a finished round"
    )


def test_candidates_are_what_the_gpu_computes() -> None:
    here = [
        name
        for name, each in PRECISIONS.items()
        if each.quantized and unavailable_because(each) is None
    ]
    assert which.default_candidates("fp32") == [
        "bf16",
        *(here or ["delayed"]),
        *(f"{name}+head" for name in here[:1]),
    ]


def test_a_gpu_that_others_use_is_refused(recipe: Path, tmp_path: Path) -> None:
    """By what nvidia-smi says: this process holds three GiB of it."""
    held = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    with pytest.raises(InputError, match="other processes use"):
        which.main(
            [str(recipe), "--run_dir", str(tmp_path / "which"), "--precisions", "bf16,delayed"]
        )
    del held
