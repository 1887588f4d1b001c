"""Test CUDA graphs of microbatches: their results equal those of other launches bit for bit.

Every failure names the first step and tensor that differ.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Deterministic GEMMs need this variable. It is read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from packing.arrow import Pack
from packing.batch import StepBatches, build_microbatch
from pretrain.model import attention as packed_attention
from pretrain.model.gradients import clear_main_gradients, gradient_of
from pretrain.model.graphs import MicrobatchGraphs
from pretrain.model.packed import PackedLanguageModel, compute_microbatch, forward_backward
from pretrain.optimizer import adamw
from pretrain.precision import transformer_engine
from pretrain.settings.recipe import OptimizerSettings
from tests.golden.runs import tensors_of
from tests.gpu.conftest import needs
from tests.gpu.test_fused_gpu import assemble, larger

PACKS = 4
# Steps that are observed in a run, and so have no graphs. The first ones fill the histories of
# delayed scaling.
OBSERVED = (0, 1, 2, 7)
SKIPPED = 9
STEPS = 12
TURNED_ON = r"on: .* GiB are available, and the activations of a second microbatch take .* .iB"
PRECISIONS = {
    "bf16": ("bf16", "linear"),
    "delayed": ("delayed", "linear"),
    "delayed_head": ("delayed", "linear+head"),
    "current": ("current", "linear"),
    "block": ("block", "linear"),
}


def step_of(number: int, length: int) -> StepBatches:
    """Return four microbatches, whose numbers of documents are different."""
    draw = np.random.default_rng(number)
    microbatches = []
    for documents in draw.permutation([1, 4, 9, 15]):
        packs = []
        for _ in range(PACKS):
            cuts = np.sort(draw.choice(np.arange(1, length), documents - 1, replace=False))
            lengths = np.diff([0, *cuts, length]).astype(np.int32)
            packs.append(Pack(draw.integers(256, size=length).astype(np.uint32), lengths))
        microbatches.append(build_microbatch(packs, mask_boundaries=True, pin_memory=True))
    valid_tokens = sum(microbatch.valid_tokens for microbatch in microbatches)
    return StepBatches(microbatches, 4 * PACKS * length, valid_tokens, 0)


def train_model(
    packed: PackedLanguageModel,
    accelerator: Accelerator,
    compute: Callable[..., Tensor],
    *,
    length: int,
    updates: bool,
) -> Iterator[dict[str, Tensor]]:
    """Train a model, and yield the loss and the tensors of each step.

    With `updates`, the weights are updated, except in one skipped step.
    """
    settings = OptimizerSettings(learning_rate=1e-3)
    optimizer = adamw.build_optimizer(packed, settings, exact=True)
    optimizer.materialise()
    for number in range(STEPS):
        histories = packed.context.copied_state()
        step = step_of(number, length)
        observed = number in OBSERVED
        loss = forward_backward(
            packed, step, accelerator, compute=compute_microbatch if observed else compute
        )
        gradients = {
            f"gradient of {name}": gradient_of(parameter).clone()
            for name, parameter in packed.hf.named_parameters()
        }
        norm = adamw.gradient_norm(packed.parameters())
        if number == SKIPPED:
            packed.context.go_back(histories)
        elif updates:
            optimizer.step(clip_coefficient=adamw.clip_coefficient(norm, 1.0))
        clear_main_gradients(packed.parameters())
        yield {
            "loss": loss,
            "gradient norm": norm,
            **gradients,
            **{name: tensor.clone() for name, tensor in packed.context.saved_state().items()},
            **{name: tensor.detach().clone() for name, tensor in packed.hf.named_parameters()},
        }


def require_equal(
    config: dict[str, Any],
    precision: str,
    accelerator: Accelerator,
    *,
    attention: str,
    length: int,
    updates: bool,
    skipped: tuple[str, ...] = (),
) -> None:
    """Require that training with graphs equals training without graphs bit for bit.

    skipped: parts of the names of tensors that are not compared.
    """
    if missing := transformer_engine.missing():
        pytest.skip(f"fused layers need {missing}")
    recipe, scope = PRECISIONS[precision]
    options: dict[str, Any] = {"fused": True, "scope": scope, "attention": attention}
    graphs = MicrobatchGraphs("on", pytest.fail)

    def run(compute: Callable[..., Tensor]) -> Iterator[dict[str, Tensor]]:
        packed = assemble(config, recipe, **options)
        return train_model(packed, accelerator, compute, length=length, updates=updates)

    # The first run ends before the second one begins, because Transformer Engine updates the
    # histories of both models together.
    plain = list(run(compute_microbatch))
    for number, (expected, actual) in enumerate(zip(plain, run(graphs.compute), strict=True)):
        different = [
            f"{name}: {relative(actual[name], tensor):.3g}"
            for name, tensor in expected.items()
            if not any(part in name for part in skipped) and not torch.equal(actual[name], tensor)
        ]
        message = f"step {number} ({'observed' if number in OBSERVED else 'graphs'}), graphs of "
        message += f"{[key[1:] for key in graphs.captured]}: {len(different)} of {len(expected)} "
        assert not different, f"{message} tensors differ: {different[:12]}"
        assert torch.isfinite(expected["loss"])
    assert len(graphs.captured) > 2
    assert {key[1] for key in graphs.captured} == {True, False}


def relative(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize(
    ("kind", "precision"), [*(("gpt2", precision) for precision in PRECISIONS), ("qwen3", "block")]
)
def test_training_with_graphs_repeats_the_bits_of_training_without(
    kind: str, precision: str, accelerator: Accelerator, deterministic: None
) -> None:
    needs(PRECISIONS[precision][0])
    require_equal(
        larger(kind), precision, accelerator, attention="packed_varlen", length=256, updates=True
    )


@pytest.mark.parametrize("attention", ["varlen", "fa4", "cudnn", "triton"])
@pytest.mark.parametrize(
    ("kind", "precision"), [("gpt2", "delayed_head"), ("qwen3", "bf16"), ("qwen3", "current")]
)
def test_products_with_searched_algorithms_are_captured(
    kind: str, precision: str, attention: str, accelerator: Accelerator
) -> None:
    """Embeddings are not compared, because their gradients sum tokens in no fixed order.

    Documents are so short that attention computes each of them in one block. All sums in a block
    have a fixed order.
    """
    needs(PRECISIONS[precision][0])
    name = "flash_attn" if attention == "fa4" else attention
    case = packed_attention.Case("cuda", 64, torch.bfloat16)
    if obstacle := packed_attention.obstacle(name, case):
        pytest.skip(f"{name} {obstacle}")
    require_equal(
        larger(kind),
        precision,
        accelerator,
        attention=f"packed_{attention}",
        length=64,
        updates=False,
        skipped=("wte", "wpe", "embed", "lm_head", "gradient norm"),
    )


def test_a_resumed_run_with_graphs_repeats_a_run_without(
    train_on_gpu: Callable[..., Path],
) -> None:
    needs("delayed")
    plain = train_on_gpu("plain", "model.cuda_graphs=off")
    graphs = train_on_gpu("graphs", "model.cuda_graphs=on")
    assert audit_of(plain)["cuda_graphs"] == "off: the recipe turns them off"
    assert audit_of(graphs)["cuda_graphs"] == "on"
    assert figures_of(graphs) == figures_of(plain)
    middle = graphs / "checkpoints" / "step-00000006"
    resumed = train_on_gpu("resumed", "model.cuda_graphs=auto", "--resume", str(middle))
    assert re.fullmatch(TURNED_ON, audit_of(resumed)["cuda_graphs"])
    assert figures_of(resumed)[-6:] == figures_of(plain)[-6:]
    assert different_at_the_end(plain, graphs) == []
    assert different_at_the_end(plain, resumed) == []


def test_a_change_of_precision_with_graphs_repeats_a_run_without(
    train_on_gpu: Callable[..., Path],
) -> None:
    needs("delayed")
    schedule = "precision=[{until: 0.5, use: delayed}, {use: bf16}]"
    plain = train_on_gpu("plain", schedule, "model.cuda_graphs=off")
    graphs = train_on_gpu("graphs", schedule, "model.cuda_graphs=auto")
    assert re.fullmatch(TURNED_ON, audit_of(graphs)["cuda_graphs"])
    assert figures_of(graphs) == figures_of(plain)
    assert different_at_the_end(plain, graphs) == []


@pytest.fixture
def train_on_gpu(
    train: Callable[..., Any], low_precision_recipe: dict[str, Any], tmp_path: Path
) -> Callable[..., Path]:
    """Return a function that trains in FP8 with the launcher, and returns the run folder."""
    recipe = low_precision_recipe | {
        "precision": "delayed",
        "weights": "bf16_exact",
        "deterministic": True,
        "checkpoint": {"every": 6, "keep": 3},
        "log": {"fp8_statistics": None},
    }

    def run(name: str, *overrides: str) -> Path:
        launch = ["--config_file", "accelerate_configs/bf16.yaml"]
        options = (f"run_dir={tmp_path / name}", "fp8_config.scope=linear+head", *overrides)
        finished = train(*options, recipe=recipe, launch=launch)
        assert finished.status == 0, finished.output
        return tmp_path / name

    return run


def audit_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "audit.json").read_text())


def different_at_the_end(one: Path, other: Path) -> list[str]:
    """Return the names of the tensors that differ in the last checkpoints of two runs."""
    expected, actual = (
        tensors_of(run_dir / "checkpoints" / "step-00000012") for run_dir in (one, other)
    )
    return [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]


def figures_of(run_dir: Path) -> list[list[Any]]:
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [
        [record["step"], record["loss"], record["gradient_norm"]]
        for record in records
        if "loss" in record
    ]
