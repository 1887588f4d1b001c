"""The kinds of inputs, and the small world that they are made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.fuzz.files import LENGTH, World
from tests.fuzz.harness import Kind
from tests.fuzz.launching import Launches

CORPUS = Path(__file__).parent / "corpus.json"
MDS = Path(__file__).parents[1] / "data" / "mds" / "reference"


def recipe_on(packs: Path, run_dir: Path) -> dict[str, Any]:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": True}
    return {
        "name": "small",
        "model": {"config": {"model_type": "qwen3"} | sizes},
        "data": {"packs": str(packs), "length": LENGTH},
        "batch": {"tokens": 8 * LENGTH, "microbatch": 2},
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"kind": "cosine", "warmup": 2},
        "train": {"steps": 12},
        "evaluate": {"every": 5},
        "run_dir": str(run_dir),
    }


def kinds_in(folder: Path) -> list[Kind]:
    """All kinds, over whole inputs that are written into `folder`. Shares as an early review had them."""
    torch.set_num_threads(1)  # a child that is forked cannot use its parent's threads
    world = World(folder / "world", MDS)
    launches = Launches(recipe_on(world.arrow, folder / "none" / "run"))
    return [
        Kind("recipe keys x values", 300, launches.draw_key, launches.run_key),
        Kind("raw YAML", 80, launches.draw_yaml, launches.run_text),
        Kind("key=value, options", 80, launches.draw_arguments, launches.run_arguments),
        Kind("launch environment", 60, launches.draw_environment, launches.run_arguments),
        Kind("text sources", 110, world.draw_source, world.run_source),
        Kind("Arrow packs, damaged", 60, world.draw_packs, world.run_arrow),
        Kind("MDS, damaged", 60, world.draw_packs, world.run_mds),
        Kind(".bin, meta.json, meta.pkl", 60, world.draw_bin, world.run_bin),
        Kind("checkpoints, damaged", 60, world.draw_checkpoint, world.run_checkpoint),
        Kind("forged, hashes made to fit", 90, world.draw_forged, world.run_forged),
        Kind("run folders", 40, world.draw_run, world.run_run),
    ]
