"""Test `python -m pretrain gap`, which compares a checkpoint in low precision with BF16."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pretrain.precision.emulation import EmulatedGemm
from tests.conftest import command_here, contents
from tests.lab.made_runs import rows_of

LAYER = "model.layers.1"


def figures(output: str) -> dict[str, list[float]]:
    """Return distance, cosine and ratio of norms by layer. The output has one precision."""
    rows = rows_of(output)
    return {layer: [float(cell) for cell in rows[layer][0]] for layer in rows if layer != "layer"}


@contextmanager
def broken_quantizer() -> Iterator[None]:
    """Keep only the largest inputs of one linear when they are quantized."""
    quantize_along = EmulatedGemm.quantize_along

    def broken(gemm: EmulatedGemm, role: str, x: torch.Tensor, *rest: Any) -> Any:
        if gemm.name == f"{LAYER}.mlp.down_proj" and role == "input":
            x = x * (x.abs() > x.abs().max() / 2)
        return quantize_along(gemm, role, x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedGemm, "quantize_along", broken)
        yield


def test_the_gap_shows_the_layer_with_a_broken_quantizer(started: Callable) -> None:
    run = started("run", "train.steps=2", "precision=current", "model.config.num_hidden_layers=2")
    before = contents(run.run_dir)
    output = command_here("gap", run.run_dir).done().out
    assert contents(run.run_dir) == before, "the command writes nothing"
    loss = re.search(r"current: loss (\d\.\d+), [+−](0\.\d+) nats from BF16's", output)
    assert loss and 0 < float(loss[2]) < 0.1 < float(loss[1])
    whole = figures(output)
    assert {LAYER, "model.embed_tokens", "model.norm", "all"} <= whole.keys()
    for distance, cosine, ratio in whole.values():
        assert 0 < distance < 0.2 and 0.98 < cosine < 1 and 0.9 < ratio < 1.1
        assert distance**2 == pytest.approx(1 + ratio**2 - 2 * ratio * cosine, abs=1e-3)
    with broken_quantizer():
        broken = figures(command_here("gap", run.run_dir).done().out)
    growth = [
        broken[f"model.layers.{layer}"][0] / whole[f"model.layers.{layer}"][0] for layer in (0, 1)
    ]
    assert growth[0] < 1.2 < 1.5 < growth[1], growth


def test_both_sides_have_the_same_dropout_masks(started: Callable) -> None:
    """Covers stochastic rounding, exact BF16 weights, and a precision of the command line."""
    gpt2 = (
        "model.config={model_type: gpt2, vocab_size: 61, n_embd: 32, n_layer: 2, n_head: 2, "
        "n_positions: 32, attn_pdrop: 0.0}"
    )
    run = started("run", gpt2, "train.steps=2", "precision=bf16")
    gap = ("gap", run.run_dir)
    assert "the run has no low precision; set --precisions" in command_here(*gap).err
    finished = command_here(*gap, "--precisions", "mxfp4,delayed", "--packs", 3).done()
    rows = rows_of(finished.out)
    for mxfp4, delayed in (rows["transformer.h.1"], rows["all"]):
        assert 0.9 < float(mxfp4[1]) < float(delayed[1]) < 1
