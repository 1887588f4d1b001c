"""Runs with Muon: in low precision, of a mixture of experts, and after AdamW."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pretrain.optimizer.muon import Hidden, Muon
from tests.golden.runs import poisoned_once
from tests.launcher.test_precision_runs import EXPERTS

MUON = ("optimizer.name=muon", "optimizer.muon.learning_rate=0.02")


def recipe_of(recipe_for: Callable, run_dir: Path, **config: Any) -> dict[str, Any]:
    recipe = recipe_for(run_dir) | {"train": {"steps": 8}}
    recipe["model"]["config"] |= config
    if config:
        del recipe["model"]["config"]["head_dim"]
    return recipe


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({}, ("precision=delayed", "weights=bf16_exact")),
        ({}, ("precision=bf16", "model.fused=on", "optimizer.moments=bf16")),
        (EXPERTS, ("precision=current", "weights=bf16_exact")),
    ],
)
def test_a_run_in_low_precision_passes_all_checks_and_learns(
    config: dict[str, Any],
    settings: tuple[str, ...],
    start_here: Callable,
    recipe_for: Callable,
    tmp_path: Path,
) -> None:
    checked = ("fp8_config.on_unsupported=emulate", "parity=on", "log.fp8_statistics=1")
    recipe = recipe_of(recipe_for, tmp_path / "run", **config)
    run = start_here(recipe, tmp_path, *MUON, *settings, *checked)
    assert run.status == 0, run.output
    assert run.losses()[-1] < run.losses()[0] - 0.5
    rms = [record["muon_update_rms"] for record in run.records() if "loss" in record]
    assert len(rms) == 8
    assert all(0.1 < value < 0.25 for value in rms)


def test_a_skipped_step_reports_no_update_and_the_next_is_checked(
    start_here: Callable, recipe_for: Callable, tmp_path: Path
) -> None:
    recipe = recipe_of(recipe_for, tmp_path / "run")
    with poisoned_once(tmp_path / "run", steps_before=2):
        checked = ("train.steps=4", "log.fp8_statistics=1")
        run = start_here(recipe, tmp_path, *MUON, *checked, "health.on_nan=skip")
    assert run.status == 0, run.output
    assert [step["skipped"] for step in run.steps()] == [False, False, True, False]
    for step in run.steps():
        assert ("muon_update_rms" in step) != step["skipped"]


@pytest.mark.parametrize("weights", ["fp32", "bf16", "bf16_exact"])
def test_an_update_without_nesterovs_momentum_stops_the_run(
    weights: str,
    start_here: Callable,
    recipe_for: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def direction(optimizer: Muon, item: Hidden, clip_coefficient: Tensor | None) -> Tensor:
        with_nesterov(optimizer, item, clip_coefficient)
        return item.split(optimizer.state[item.parameter]["momentum"].bfloat16())

    with_nesterov = Muon._direction
    monkeypatch.setattr(Muon, "_direction", direction)
    recipe = recipe_of(recipe_for, tmp_path / "run")
    run = start_here(recipe, tmp_path, *MUON, "precision=bf16", f"weights={weights}")
    assert run.status == 3, run.output
    assert "step 2: the step or its update is wrong" in run.output
    assert "weights of a matrix in model.layers.0." in run.output


def test_a_run_with_adamw_is_not_resumed_with_muon(
    start_here: Callable, recipe_for: Callable, tmp_path: Path
) -> None:
    recipe = recipe_of(recipe_for, tmp_path / "run")
    assert start_here(recipe, tmp_path, "train.steps=4").status == 0
    refused = start_here(recipe, tmp_path, *MUON)
    assert 'optimizer.name: saved "adamw", now "muon"' in refused.refusal
    assert "--accept-changes" not in refused.refusal
    forced = start_here(recipe, tmp_path, *MUON, "--accept-changes")
    assert "the checkpoint does not fit this run" in forced.refusal
