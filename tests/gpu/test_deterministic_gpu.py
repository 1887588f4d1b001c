"""`deterministic: true` on a GPU: two runs, and one that was killed and resumed, have the same bits. By the real launcher."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from benchmarks.machine import LAUNCH, finish, start
from pretrain.model import gpu_attention
from pretrain.precision import transformer_engine
from pretrain.precision.selection import missing_on
from pretrain.precision.settings import PRECISIONS
from tests.conftest import ROOT, write_packs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS, SAVED = 80, 20
# Documents of many blocks, four query heads to a key head, four packs at once: much to add up for a backward without an order.
LENGTH = 1024
QWEN3 = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LENGTH,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 128, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
GPT2 |= {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}
BATCH = {"tokens": 8 * LENGTH, "microbatch": 4}
FIGURES = ("step", "loss", "gradient_norm", "learning_rate", "frozen_updates")  # of a step, which two runs must share


@dataclass(frozen=True)
class Training:
    """One training with `deterministic: true`, started as a user starts it; each run has a folder of its own in `folder`."""

    recipe: Path
    overrides: Sequence[str]
    folder: Path

    def start(self, name: str, *settings: str) -> Any:
        self.folder.mkdir(parents=True, exist_ok=True)
        launch = [
            *LAUNCH,
            "--config_file",
            str(ROOT / "accelerate_configs" / "bf16.yaml"),
            "train_accelerate.py",
            str(self.recipe),
        ]
        own = ["deterministic=true", f"train.steps={STEPS}", f"run_dir={self.folder / name}"]
        return start([*launch, *self.overrides, *own, *settings], self.folder / f"{name}.log")

    def alone(self) -> dict[str, Any]:
        """The run from its first step to its last, and what is left of it."""
        finish(self.start("alone", "checkpoint.every=null"), self.folder / "alone.log")
        return self.outcome("alone")

    def killed(self) -> dict[str, Any]:
        """The same with SIGKILL after its first checkpoint, then started again."""
        process, saved = self.start("killed", f"checkpoint.every={SAVED}"), self.folder / "killed/checkpoints"
        while not any(saved.glob("step-*")):
            assert process.poll() is None, (self.folder / "killed.log").read_text()[-3000:]
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert self.figures("killed")[-1][0] < STEPS, "it had ended before it could be killed"
        finish(self.start("killed", f"checkpoint.every={SAVED}"), self.folder / "killed.log")
        return self.outcome("killed")

    def figures(self, name: str) -> list[list[Any]]:
        records = map(json.loads, (self.folder / name / "metrics.jsonl").read_text().splitlines())
        return [[record[key] for key in FIGURES] for record in records if "loss" in record]

    def outcome(self, name: str) -> dict[str, Any]:
        run_dir = self.folder / name
        last = sorted((run_dir / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors"))
        tensors = {key: tensor for path in last for key, tensor in load_file(path).items()}
        return {"figures": self.figures(name), "tensors": tensors, "audit": json.loads((run_dir / "audit.json").read_text())}


def check_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Losses and norms are the same doubles, and so are the bits of the last checkpoint's tensors."""
    assert one["figures"] == other["figures"]
    assert one["tensors"] and one["tensors"].keys() == other["tensors"].keys()
    different = [name for name, tensor in one["tensors"].items() if not torch.equal(tensor, other["tensors"][name])]
    assert not different


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(tmp_path_factory.mktemp("packs") / "long", LENGTH)


@pytest.fixture
def training(low_precision_recipe: dict[str, Any], packs: Path, tmp_path: Path) -> Callable[..., Training]:
    """A training of the recipe with these overrides, of `model` where one is given."""

    def make(*overrides: str, model: dict[str, Any] | None = None, name: str = "runs") -> Training:
        config = model or low_precision_recipe["model"]["config"] | QWEN3
        changes = {"model": {"config": config}, "data": {"packs": str(packs), "length": LENGTH}, "batch": BATCH}
        changes |= {"precision": "bf16", "weights": "bf16_exact", "evaluate": {"every": 30}}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(low_precision_recipe | changes))
        return Training(tmp_path / "recipe.yaml", overrides, tmp_path / name)

    return make


def needs_transformer_engine() -> None:
    if missing := transformer_engine.missing():
        pytest.skip(f"fused layers need {missing}")


FUSED = {
    "bf16": ["precision=bf16"],
    "delayed_head": ["precision=delayed", "fp8_config.scope=linear+head"],
    "block": ["precision=block"],
}


@pytest.mark.parametrize(("attention", "precision"), [*(("flash_attn", name) for name in FUSED), ("varlen", "delayed_head")])
def test_fused_layers_repeat_their_bits_and_resume_with_them(
    attention: str, precision: str, training: Callable[..., Training]
) -> None:
    needs_transformer_engine()
    if attention == "flash_attn" and (obstacle := gpu_attention.flash_obstacle(64)):
        pytest.skip(f"flash_attn {obstacle}")
    quantized = PRECISIONS[precision.removesuffix("_head")]
    if quantized.quantized and (missing := missing_on("cuda")(quantized)):
        pytest.skip(f"{precision} {missing}")
    ours = training(*FUSED[precision], f"model.attention={attention}")
    alone, killed = ours.alone(), ours.killed()
    check_equal(alone, killed)
    assert alone["audit"]["deterministic"] == "yes" and alone["audit"]["fused"].startswith("2 of 2 layers")
    assert alone["figures"][0][1] > 1.2 * alone["figures"][-1][1], "nothing was learnt"


def test_compiled_layers_with_dropout_repeat_their_bits_and_resume_with_them(training: Callable[..., Training]) -> None:
    ours = training("model.fused=off", model=GPT2)
    alone, killed = ours.alone(), ours.killed()
    check_equal(alone, killed)
    assert alone["audit"]["compiled"] == "each layer"
