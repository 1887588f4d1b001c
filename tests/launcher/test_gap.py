"""Test the comparison of a microbatch with BF16 (`pretrain.observe.bf16_gap`).

The measurement changes no result of a run, and shows the layer whose quantizer breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.observe.bf16_gap import GapMeter
from pretrain.precision.emulation import EmulatedGemm
from pretrain.run import startup
from tests.conftest import Finished
from tests.golden.runs import saved, steps_logged

STEPS = 4
LAYER = "model.layers.1"


@pytest.fixture
def changes(changes: dict[str, Any], small_recipe: dict[str, Any]) -> dict[str, Any]:
    """Recipe changes for four steps of two layers in low precision."""
    small_recipe["model"]["config"]["num_hidden_layers"] = 2
    return changes | {
        "train": {"steps": STEPS},
        "checkpoint": {"every": 2, "keep": 9},
        "precision": "current",
    }


@pytest.fixture
def measured(started: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finished]:
    """Return a function like `started` whose runs measure the gap in every second step."""
    make_observers = startup.make_observers

    def with_meter(run: Any, profile: Any) -> Any:
        observers = make_observers(run, profile)
        model = run.assembly.model
        meter = GapMeter(model, run.assembly.optimizer, run.job.recipe, run.accelerator)
        monkeypatch.setattr(meter, "due", lambda step: step.number % 2 == 0)
        return replace(observers, observers=[meter, *observers.observers])

    def start(*options: str) -> Finished:
        with monkeypatch.context() as patch:
            patch.setattr(startup, "make_observers", with_meter)
            return started(*options)

    return start


def measured_steps(run: Finished) -> list[dict[str, Any]]:
    """Return the records of the steps in which the gap was measured."""
    return [step for step in run.records() if "gap/loss" in step]


@contextmanager
def broken_from(step: int, run_dir: Path) -> Iterator[None]:
    """Keep only the largest inputs of one linear when they are quantized, from `step` on."""
    quantize_along = EmulatedGemm.quantize_along

    def broken(gemm: EmulatedGemm, role: str, x: torch.Tensor, *rest: Any) -> Any:
        is_broken = gemm.name == f"{LAYER}.mlp.down_proj" and role == "input"
        if is_broken and steps_logged(run_dir) >= step - 1:
            x = x * (x.abs() > x.abs().max() / 2)
        return quantize_along(gemm, role, x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedGemm, "quantize_along", broken)
        yield


def test_losses_and_weights_are_those_of_a_run_without_a_meter(
    started: Callable, measured: Callable
) -> None:
    """Covers one microbatch, dropout and stochastic rounding."""
    gpt2 = (
        "model.config={model_type: gpt2, vocab_size: 61, n_embd: 32, n_layer: 2, n_head: 2, "
        "n_positions: 32, attn_pdrop: 0.0}"
    )
    options = (gpt2, "precision=mxfp4", "weights=bf16", "batch.microbatch=4")
    plain = started("plain", *options)
    run = measured("run", *options)
    assert run.losses() == plain.losses()
    assert saved(run.run_dir, STEPS) == saved(plain.run_dir, STEPS)
    first, second = measured_steps(run)
    assert (first["step"], second["step"]) == (2, 4)
    for step in (first, second):
        assert 0 < abs(step["gap/loss"]) < 0.1
        assert 0.9 < step["gap/cosine"] < 1
        assert 0.8 < step["gap/norm_ratio"] < 1.2
        assert 0.9 < step["gap/cosine/transformer.h.1"] < 1, (
            "the measurement used other dropout masks"
        )


def test_the_gap_shows_the_layer_with_a_broken_quantizer(
    measured: Callable, tmp_path: Path
) -> None:
    with broken_from(step=3, run_dir=tmp_path / "run"):
        first, second = measured_steps(measured("run"))
    growth = [
        (1 - second[f"gap/cosine/model.layers.{layer}"])
        / (1 - first[f"gap/cosine/model.layers.{layer}"])
        for layer in (0, 1)
    ]
    assert growth[0] < 1.5 and growth[1] > 2, growth
