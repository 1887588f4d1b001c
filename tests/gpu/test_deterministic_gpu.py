"""`deterministic: true` on a GPU: two runs, and one that was killed and resumed, have the same bits. By the real launcher."""

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

STEPS, SAVED = 80, 20
# Documents of many blocks, four query heads to a key head, four packs at once: much to add up for a backward without an order.
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
# of a step, which two runs must share
FIGURES = ("step", "loss", "gradient_norm", "learning_rate", "frozen_updates")


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(tmp_path_factory.mktemp("packs") / "long", LENGTH)


@pytest.fixture
def train(
    low_precision_recipe: dict[str, Any], packs: Path, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Trains with these overrides, of `model` where one is given: from the first step to the last, and with SIGKILL after the
    first checkpoint and a second start. Asserts that losses, norms and the last checkpoint's tensors have the same bits.
    Returns what is left of the first."""

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
        alone, killed = (tmp_path / name for name in ("alone", "killed"))
        finish(
            start(
                [*launch, f"run_dir={alone}", "checkpoint.every=null"],
                log := tmp_path / "alone.log",
            ),
            log,
        )

        again, log = (
            [*launch, f"run_dir={killed}", f"checkpoint.every={SAVED}"],
            tmp_path / "killed.log",
        )
        process = start(again, log)
        while not any((killed / "checkpoints").glob("step-*")):
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert figures_of(killed)[-1][0] < STEPS, "it had ended before it could be killed"
        finish(start(again, log), log)

        one, other = outcome(alone), outcome(killed)
        assert one["figures"] == other["figures"] and one["tensors"]
        assert one["tensors"].keys() == other["tensors"].keys()
        assert not [
            name
            for name, tensor in one["tensors"].items()
            if not torch.equal(tensor, other["tensors"][name])
        ]
        return one

    return train


def figures_of(run_dir: Path) -> list[list[Any]]:
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [[record[key] for key in FIGURES] for record in records if "loss" in record]


def outcome(run_dir: Path) -> dict[str, Any]:
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
    [*(("flash_attn", name) for name in FUSED), ("varlen", "delayed_head")],
)
def test_fused_layers_repeat_their_bits_and_resume_with_them(
    attention: str, precision: str, train: Callable[..., dict[str, Any]]
) -> None:
    if missing := transformer_engine.missing():
        pytest.skip(f"fused layers need {missing}")
    if attention == "flash_attn" and (
        obstacle := packed_attention._obstacle("fa4", "cuda", 64, torch.bfloat16)
    ):
        pytest.skip(f"flash_attn {obstacle}")
    needs(precision.removesuffix("_head"))
    alone = train(*FUSED[precision], f"model.attention={attention}")
    assert alone["audit"]["deterministic"] == "yes" and alone["audit"]["fused"].startswith(
        "2 of 2 layers"
    )
    assert alone["figures"][0][1] > 1.2 * alone["figures"][-1][1], "nothing was learnt"


def test_compiled_layers_with_dropout_repeat_their_bits_and_resume_with_them(
    train: Callable[..., dict[str, Any]],
) -> None:
    alone = train("model.fused=off", model=GPT2)
    assert alone["audit"]["compiled"] == "each layer"
