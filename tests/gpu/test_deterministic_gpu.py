"""Test `deterministic: true` on a GPU with the real launcher.

A run that is killed and resumed has the same bits as a run without interruption.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.machine import LAUNCH, finish, start
from pretrain.model import attention as packed_attention
from pretrain.precision import transformer_engine
from tests.conftest import ROOT, write_packs
from tests.golden.runs import tensors_of
from tests.gpu.conftest import needs

STEPS = 80
# Steps between two checkpoints.
SAVE_EVERY = 20
# Documents of many blocks, four query heads per key head and four packs a microbatch: long sums
# whose order a nondeterministic backward would change.
LENGTH = 1024
QWEN3 = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LENGTH,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 128,
    "n_embd": 256,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LENGTH,
}
GPT2 |= {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}
BATCH = {"tokens": 8 * LENGTH, "microbatch": 4}
# Metrics of a step that must be equal in both runs.
FIGURES = ("step", "loss", "gradient_norm", "learning_rate", "frozen_updates")


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(tmp_path_factory.mktemp("packs") / "long", LENGTH)


@pytest.fixture
def train(
    low_precision_recipe: dict[str, Any], packs: Path, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Return a function that trains twice and compares the runs bit for bit.

    The second run is killed by SIGKILL after its first checkpoint and started again. Losses, norms
    and the tensors of the last checkpoints must be equal. The function takes overrides and an
    optional model config, and returns the `outcome` of the first run.
    """

    def train(*overrides: str, model: dict[str, Any] | None = None) -> dict[str, Any]:
        config = model or low_precision_recipe["model"]["config"] | QWEN3
        changes = {
            "model": {"config": config},
            "data": {"packs": str(packs), "length": LENGTH},
            "batch": BATCH,
        }
        changes |= {"precision": "bf16", "weights": "bf16_exact", "evaluate": {"every": 30}}
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(low_precision_recipe | changes))
        configuration = str(ROOT / "accelerate_configs" / "bf16.yaml")
        launch = [
            *LAUNCH,
            "--config_file",
            configuration,
            "train_accelerate.py",
            str(recipe),
            *overrides,
        ]
        launch += ["deterministic=true", f"train.steps={STEPS}"]
        complete = tmp_path / "complete"
        log = tmp_path / "complete.log"
        finish(start([*launch, f"run_dir={complete}", "checkpoint.every=null"], log), log)

        killed = tmp_path / "killed"
        command = [*launch, f"run_dir={killed}", f"checkpoint.every={SAVE_EVERY}"]
        log = tmp_path / "killed.log"
        process = start(command, log)
        while not any((killed / "checkpoints").glob("step-*")):
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert figures_of(killed)[-1][0] < STEPS, "the run ended before it was killed"
        finish(start(command, log), log)

        expected = outcome(complete)
        resumed = outcome(killed)
        assert expected["figures"] == resumed["figures"]
        assert expected["tensors"]
        assert expected["tensors"].keys() == resumed["tensors"].keys()
        assert not [
            name
            for name, tensor in expected["tensors"].items()
            if not torch.equal(tensor, resumed["tensors"][name])
        ]
        return expected

    return train


def figures_of(run_dir: Path) -> list[list[Any]]:
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [[record[key] for key in FIGURES] for record in records if "loss" in record]


def outcome(run_dir: Path) -> dict[str, Any]:
    """Return the figures, the tensors of the last checkpoint and the audit of a run."""
    tensors = tensors_of(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    return {
        "figures": figures_of(run_dir),
        "tensors": tensors,
        "audit": json.loads((run_dir / "audit.json").read_text()),
    }


FUSED = {
    "bf16": ["precision=bf16"],
    "delayed_head": ["precision=delayed", "fp8_config.scope=linear+head"],
    "block": ["precision=block"],
}


@pytest.mark.parametrize(
    ("attention", "precision"),
    [
        *(("flash_attn", name) for name in FUSED),
        ("varlen", "delayed_head"),
        ("triton", "delayed_head"),
    ],
)
def test_fused_layers_repeat_their_bits_after_a_resume(
    attention: str, precision: str, train: Callable[..., dict[str, Any]]
) -> None:
    if missing := transformer_engine.missing():
        pytest.skip(f"fused layers need {missing}")
    case = packed_attention.Case("cuda", 64, torch.bfloat16)
    if obstacle := packed_attention.obstacle(attention, case):
        pytest.skip(f"{attention} {obstacle}")
    needs(precision.removesuffix("_head"))
    run = train(*FUSED[precision], f"model.attention={attention}")
    assert run["audit"]["deterministic"] == "yes"
    assert run["audit"]["fused"].startswith("2 of 2 layers")
    first_loss = run["figures"][0][1]
    last_loss = run["figures"][-1][1]
    assert first_loss > 1.2 * last_loss, "the loss did not fall"


def test_compiled_layers_with_dropout_repeat_their_bits_after_a_resume(
    train: Callable[..., dict[str, Any]],
) -> None:
    run = train("model.fused=off", model=GPT2)
    assert run["audit"]["compiled"] == "each layer"
