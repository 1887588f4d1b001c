"""Runs with Muon: in low precision, of a mixture of experts, and after AdamW."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from pretrain.optimizer.muon import Hidden, Muon
from tests.conftest import Trainer
from tests.golden.runs import poisoned_once
from tests.launcher.conftest import EXPERTS

MUON = ("optimizer.name=muon", "optimizer.muon.learning_rate=0.02")
LEARNS = {
    "delayed": ("precision=delayed", "weights=bf16_exact"),
    "fused": ("precision=bf16", "model.fused=on", "optimizer.moments=bf16"),
    "experts": ("precision=current", "weights=bf16_exact", EXPERTS),
}


@pytest.mark.parametrize("name", LEARNS)
def test_a_run_in_low_precision_passes_all_checks_and_learns(
    name: str, train_here: Trainer
) -> None:
    checked = ("fp8_config.on_unsupported=emulate", "parity=on", "log.fp8_statistics=1")
    run = train_here(*MUON, *LEARNS[name], *checked, "train.steps=8").done()
    assert run.losses()[-1] < run.losses()[0] - 0.5
    rms = [step["muon_update_rms"] for step in run.steps()]
    assert len(rms) == 8
    assert all(0.1 < value < 0.25 for value in rms)


def test_a_skipped_step_reports_no_update_and_the_next_is_checked(
    train_here: Trainer, tmp_path: Any
) -> None:
    with poisoned_once(tmp_path / "run", steps_before=2):
        run = train_here(
            *MUON, "train.steps=4", "log.fp8_statistics=1", "health.on_nan=skip"
        ).done()
    assert [step["skipped"] for step in run.steps()] == [False, False, True, False]
    for step in run.steps():
        assert ("muon_update_rms" in step) != step["skipped"]


@pytest.mark.parametrize("weights", ["fp32", "bf16", "bf16_exact"])
def test_an_update_without_nesterovs_momentum_stops_the_run(
    weights: str, train_here: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def direction(optimizer: Muon, item: Hidden, clip_coefficient: Tensor | None) -> Tensor:
        with_nesterov(optimizer, item, clip_coefficient)
        return item.split(optimizer.state[item.parameter]["momentum"].bfloat16())

    with_nesterov = Muon._direction
    monkeypatch.setattr(Muon, "_direction", direction)
    run = train_here(*MUON, "train.steps=8", "precision=bf16", f"weights={weights}")
    assert run.status == 3, run.output
    assert "step 2: the step or its update is wrong" in run.output
    assert "weights of a matrix in model.layers.0." in run.output


def test_a_run_with_adamw_is_not_resumed_with_muon(train_here: Trainer) -> None:
    assert train_here("train.steps=4").status == 0
    refusal = train_here(*MUON, "train.steps=8").refusal
    assert "optimizer.name (was adamw, now muon)" in refusal
    assert "--accept-changes" not in refusal
    forced = train_here(*MUON, "train.steps=8", "--accept-changes")
    assert "the checkpoint does not fit this run" in forced.refusal
