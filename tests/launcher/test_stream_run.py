"""A run on packs that are made while it trains: the same curve when it goes on, on an empty disk and two processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "into", "the", "green", "wood"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    texts = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(i % 40 + 5)) for i in range(600)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, show_progress=False, **special))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def recipe(folder: Path, recipe_for: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    small = recipe_for(folder / "run")
    config = {key: value for key, value in small["model"]["config"].items() if key != "vocab_size"}
    data = {"source": str(folder / "texts.jsonl"), "tokenizer": str(folder / "tokenizer.json"), "packs": str(folder / "packs")}
    streaming = {"disk_gb": 0.0003, "window": 3000}
    return small | {
        "model": {"config": config},
        "data": data | {"length": 32, "held_out": 0.05, "processes": 1, "streaming": streaming},
        "train": {"steps": 40},
        "evaluate": {"every": 20},
        "checkpoint": {"every": 15},
        "parity": "off",
    }


def losses(run: Any) -> list[float]:
    return [record["loss"] for record in run.records() if "loss" in record]


@pytest.mark.multi
def test_a_streamed_run_goes_on_with_the_same_curve_on_an_empty_disk_and_two_processes(
    recipe: dict[str, Any], folder: Path, start_here: Callable, start_as_ranks: Callable
) -> None:
    planned = start_here(recipe, folder, "--plan")
    assert planned.status == 0 and "packed as it comes: 3.00k tokens at a time, 0.0003 GB on disk" in planned.out
    assert not (folder / "packs").exists()
    alone = start_here(recipe, folder)
    assert alone.status == 0, alone.output
    last = [record for record in alone.records() if "loss" in record][-1]
    assert last["part"] > 2 and last["packed_tokens"] >= 40 * 8 * 32
    assert sum(path.stat().st_size for path in (folder / "packs").rglob("*") if path.is_file()) <= 300_000
    whole = start_here(recipe, folder, "train.steps=10000", f"run_dir={folder / 'ends'}")
    assert whole.status == 2 and "come to its end" in whole.err and "saved" in whole.out

    checkpoints = alone.run_dir / "checkpoints"
    for step in (30, 40):  # as if it had been killed after step 15
        shutil.rmtree(checkpoints / f"step-{step:08}")
    shutil.rmtree(folder / "packs")
    unbroken = losses(alone)
    ddp = ["--config_file", "accelerate_configs/ddp.yaml", "--mixed_precision", "no"]
    resumed = start_as_ranks(recipe, folder, launch=ddp, ACCELERATE_USE_CPU="true")
    assert resumed.status == 0 and "at step 15" in resumed.output, resumed.output
    assert losses(resumed) == pytest.approx(unbroken, rel=1e-5) and len(unbroken) == 40
