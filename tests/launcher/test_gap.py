"""Test the gap meter (`log.gap`) and the actions of `health.on_gap`.

The meter does not change the run, and names the layer whose quantizer breaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.errors import InputError
from foundation.settings import parse
from lab.compare.page import curves_figure
from lab.compare.report import Report
from pretrain.metrics.health import Health, StepDecision
from pretrain.metrics.run_record import read_run
from pretrain.observe import bf16_gap
from pretrain.plan.checks import check_settings
from pretrain.precision.emulation import EmulatedGemm
from pretrain.settings.recipe import HealthSettings, Recipe
from tests.conftest import Finished
from tests.golden.runs import saved, steps_logged, steps_saved

STEPS = 4
BROKEN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def changes(changes: dict[str, Any], small_recipe: dict[str, Any]) -> dict[str, Any]:
    """Recipe changes for four steps of two layers in low precision."""
    small_recipe["model"]["config"]["num_hidden_layers"] = 2
    return changes | {
        "train": {"steps": STEPS},
        "checkpoint": {"every": 2, "keep": 9},
        "precision": "current",
    }


def measured_steps(run: Finished) -> list[dict[str, Any]]:
    """Return the records of the steps in which the gap was measured."""
    return [step for step in run.records() if "gap/loss" in step]


@contextmanager
def broken_from(step: int, run_dir: Path, layer: str = BROKEN) -> Iterator[None]:
    """Keep only the largest inputs of one layer when they are quantized, from `step` on.

    The audit does not find this fault, because the largest value stays the same.
    """
    quantize_along = EmulatedGemm.quantize_along

    def broken(gemm: EmulatedGemm, role: str, x: torch.Tensor, *rest: Any) -> Any:
        breaks = gemm.name == layer and role == "input" and steps_logged(run_dir) >= step - 1
        if breaks:
            x = x * (x.abs() > x.abs().max() / 2)
        return quantize_along(gemm, role, x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedGemm, "quantize_along", broken)
        yield


def test_losses_and_weights_are_those_of_a_run_without_a_meter(started: Callable) -> None:
    """Covers one microbatch, dropout and stochastic rounding.

    Golden runs with a meter cover histories, the head, several microbatches, recomputed layers and
    shards.
    """
    gpt2 = (
        "model.config={model_type: gpt2, vocab_size: 61, n_embd: 32, n_layer: 2, n_head: 2, "
        "n_positions: 32, attn_pdrop: 0.0}"
    )
    options = (gpt2, "precision=mxfp4", "weights=bf16", "batch.microbatch=4")
    without = started("without", *options)
    measured = started("with", *options, "log.gap=2")
    assert measured.losses() == without.losses()
    assert saved(measured.run_dir, STEPS) == saved(without.run_dir, STEPS)
    assert not measured_steps(without)
    first, second = measured_steps(measured)
    assert (first["step"], second["step"]) == (2, 4)
    for step in (first, second):
        assert 0 < abs(step["gap/loss"]) < 0.1
        assert 0.9 < step["gap/cosine"] < 1
        assert 0.8 < step["gap/norm_ratio"] < 1.2
        assert 0.9 < step["gap/cosine/transformer.h.1"] < 1, (
            "the measurement used other dropout masks"
        )


def test_the_gap_meter_names_a_broken_quantizer_before_the_update(
    started: Callable, tmp_path: Path
) -> None:
    with broken_from(step=3, run_dir=tmp_path / "run"):
        run = started("run", "log.gap=2", "health.on_gap=stop", status=3)
    first, second = measured_steps(run)
    assert "gap/worst" not in first
    assert second["gap/worst"] == f"{BROKEN}.weight"
    assert second["gap/moved"] > 0.5
    assert BROKEN in second["halted"]
    for words in ("halted: step 4", BROKEN, "run_dir"):
        assert words in run.err
    assert steps_saved(run.run_dir) == [2]
    assert run.out.count("gap to BF16") == 2
    curves = curves_figure(Report.over([read_run(run.run_dir)]).compared_runs)
    drawn = [line for line in curves.data if len(line.x) == 2]
    assert drawn[0].y.tolist() == [step["gap/loss"] for step in measured_steps(run)]


def test_a_gradient_that_the_meter_leaves_is_found(
    started: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bf16_gap, "clear_gradients", lambda optimizer, model: None)
    assert "gradients were not cleared" in started("run", "log.gap=1", status=3).err


def test_by_default_such_a_look_warns_and_what_is_usual_stays() -> None:
    health = Health(HealthSettings())
    usual = {"a": (1.0, 0.1), "b": (0.9, 0.3)}
    broken = {"a": (1.0, 0.1), "b": (0.5, 0.3)}
    better = {"b": (1.0, 0.01)}
    lost = {"b": (math.nan, math.nan)}
    assert health.judge_gap(1, "current", usual) == (StepDecision(), {})
    for step in (2, 3):
        decision, figures = health.judge_gap(step, "current", broken)
        assert decision.proceed
        assert f"step {step}" in decision.reason
        assert "of b " in decision.reason
        assert figures == {"gap/moved": pytest.approx(0.4), "gap/worst": "b"}
    assert health.judge_gap(4, "nvfp4", broken) == (StepDecision(), {}), (
        "another precision has its own usual values"
    )
    assert health.judge_gap(5, "current", usual)[0] == StepDecision()
    decision, figures = health.judge_gap(6, "current", better)
    assert decision == StepDecision(), "a smaller gap is not reported"
    assert figures == {"gap/moved": 0.0, "gap/worst": "b"}
    assert health.judge_gap(7, "current", lost)[0].reason


@pytest.mark.multi
def test_two_processes_train_as_without_a_meter(
    start_as_ranks: Callable, small_recipe: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    """Each rank has one microbatch. Without a meter, ranks exchange its gradients in backward."""
    recipe = small_recipe | changes | {"weights": "fp32", "train": {"steps": 2}}
    launch = ["--config_file", "accelerate_configs/ddp.yaml", "--mixed_precision", "no"]
    runs = [
        start_as_ranks(
            recipe, tmp_path, f"run_dir={tmp_path / gap}", f"log.gap={gap}", launch=launch
        )
        for gap in ("null", "1")
    ]
    assert [run.status for run in runs] == [0, 0], runs
    without, measured = runs
    assert measured.losses() == without.losses()
    assert saved(measured.run_dir, 2) == saved(without.run_dir, 2)
    steps = measured_steps(measured)
    assert len(steps) == 2
    for step in steps:
        assert 0.9 < step["gap/cosine"] < 1
        assert step["gap/loss"]


def test_what_cannot_be_measured_or_acted_on_is_refused(small_recipe: dict[str, Any]) -> None:
    for section, replicas in (({"health": {"on_gap": "stop"}}, 1), ({"log": {"gap": 100}}, 2)):
        with pytest.raises(InputError, match=r"log\.gap"):
            check_settings(parse(Recipe, small_recipe | section, "recipe"), "bf16", 2, replicas)
