"""What several tests need: small packs that a model can learn from, and the launcher started as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import settings

from packing.store import Pack, PackWriter

# Two cores shared by several workers: how long one example takes says nothing.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

ROOT = Path(__file__).resolve().parent.parent
PACK_LENGTH = 32
BLOCK_LENGTH = 128
VOCABULARY = 61


@pytest.fixture(scope="session")
def small_packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 training and 10 held-out packs of 32 tokens; each document counts upwards from a random token, which can be learnt."""
    return write_packs(tmp_path_factory.mktemp("packs") / "small", PACK_LENGTH)


@pytest.fixture(scope="session")
def block_packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in packs of 128 tokens, which every low-precision recipe can take."""
    return write_packs(tmp_path_factory.mktemp("packs") / "block", BLOCK_LENGTH)


def write_packs(folder: Path, length: int) -> Path:
    rng = np.random.default_rng(0)
    with PackWriter(folder, length) as writer:
        for split, count in (("train", 120), ("held_out", 10)):
            for _ in range(count):
                cuts = np.sort(rng.choice(np.arange(1, length), 3, replace=False))
                lengths = np.diff([0, *cuts, length])
                tokens = np.concatenate([(rng.integers(VOCABULARY) + np.arange(n)) % VOCABULARY for n in lengths])
                writer.add(split, Pack(tokens.astype(np.uint32), lengths.astype(np.int32)))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    return folder


@pytest.fixture
def low_precision_recipe(small_recipe: dict[str, Any], block_packs: Path) -> dict[str, Any]:
    """One whose every linear fits every recipe; emulated where the device has none of them."""
    config = small_recipe["model"]["config"] | {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    return small_recipe | {
        "model": {"config": config | {"num_key_value_heads": 4, "max_position_embeddings": BLOCK_LENGTH}},
        "data": {"packs": str(block_packs), "length": BLOCK_LENGTH},
        "batch": {"tokens": 8 * BLOCK_LENGTH, "microbatch": 2},
        "precision": "current",
        "fp8_config": {"on_unsupported": "emulate"},
        "log": {"fp8_statistics": 5},
    }


@pytest.fixture
def small_recipe(small_packs: Path, tmp_path: Path) -> dict[str, Any]:
    """A recipe that trains in seconds; a step is 8 packs."""
    return {
        "name": "small",
        "model": {
            "config": {
                "model_type": "qwen3",
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": 64,
                "tie_word_embeddings": True,
            }
        },
        "data": {"packs": str(small_packs), "length": PACK_LENGTH},
        "batch": {"tokens": 8 * PACK_LENGTH, "microbatch": 2},
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"kind": "cosine", "warmup": 2},
        "train": {"steps": 12},
        "evaluate": {"every": 5},
        "checkpoint": {"every": 4},
        "run_dir": str(tmp_path / "run"),
    }


@pytest.fixture(scope="session")
def references() -> Path:
    """The folder of published packages that ours is compared with, which `make test` installs beside the environment and not into
    it: there, transformers would find them and load them into every run."""
    folder = Path(os.environ.get("REFERENCES", ROOT / ".venv" / "references"))
    if not folder.is_dir():
        pytest.skip(f"needs the packages of requirements-references.txt in {folder}: `make test` installs them")
    return folder


@dataclass(frozen=True)
class Finished:
    """A launcher process that has ended."""

    status: int
    output: str
    run_dir: Path

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records() if "loss" in record]


def command_of(recipe: dict[str, Any], folder: Path, *arguments: str, launch: list[str] | None = None) -> list[str]:
    """The command line that trains `recipe`, under `accelerate launch` with the options `launch` where given."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    launcher = (
        [sys.executable] if launch is None else [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *launch]
    )
    return [*launcher, "train_accelerate.py", str(path), *arguments]


@pytest.fixture
def train(small_recipe: dict[str, Any], tmp_path: Path) -> Callable[..., Finished]:
    """Run the launcher on a recipe and wait for it."""

    def run(
        *arguments: str, recipe: dict[str, Any] | None = None, launch: list[str] | None = None, **environment: str
    ) -> Finished:
        recipe = recipe or small_recipe
        command = command_of(recipe, tmp_path, *arguments, launch=launch)
        clean = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
        done = subprocess.run(
            command, cwd=ROOT, env=clean | {"OMP_NUM_THREADS": "1"} | environment, capture_output=True, text=True, timeout=240
        )
        run_dir = next((Path(a.removeprefix("run_dir=")) for a in arguments if a.startswith("run_dir=")), Path(recipe["run_dir"]))
        return Finished(done.returncode, done.stdout + done.stderr, run_dir)

    return run
