"""Test schedules of precisions, changes of a run, branches, mixtures of experts, and Muon."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pretrain.optimizer import muon
from pretrain.optimizer.adamw import Hyperparameters
from tests.conftest import PACK_LENGTH, Trainer, contents, write_packs
from tests.golden.runs import poisoned_once, tensors_of
from tests.launcher.conftest import EXPERTS


def test_each_phase_computes_in_its_precision(started: Callable) -> None:
    until = "precision=[{until: 2, use: delayed}, {use: "
    alone = started("alone", "precision=delayed", "train.steps=2").losses()
    ends = []
    for after in ("bf16", "current"):
        run = started(after, f"{until}{after}}}]", "train.steps=3")
        assert [record["precision"] for record in run.steps()] == ["delayed", "delayed", after]
        assert run.audit()["phases"] == {"1": "delayed", "3": after}
        assert run.losses()[:2] == alone
        ends.append(run.losses()[2])
    assert ends[0] != ends[1]
    phases = "precision=[{until: 2, use: current}, {use: delayed}]"
    reverse = started("reverse", phases, "train.steps=3")
    assert reverse.audit()["phases"] == {"1": "current", "3": "delayed"}


@pytest.mark.nightly
def test_layers_are_compiled_on_a_cpu_in_bf16(started: Callable) -> None:
    options = ("precision=bf16", "train.steps=3")
    eager = started("eager", *options)
    compiled = started("compiled", *options, "model.compile=layer")
    assert "torch.compile: each layer" in compiled.output
    assert compiled.losses() == pytest.approx(eager.losses(), rel=1e-3)
    assert json.loads((compiled.run_dir / "summary.json").read_text())["recompiles"] == 0


def test_accept_changes_allows_another_precision_and_other_weights(started: Callable) -> None:
    run = started("run", "precision=bf16", "parity=on")
    losses = run.losses()
    options = ("weights=fp32", "--accept-changes")
    checkpoint = f"{run.run_dir}/checkpoints/step-00000003"
    fp32 = started("fp32", "precision=bf16", *options, "--resume", checkpoint)
    assert losses[3:] == fp32.losses(), "the conversion must not change the weights"
    longer = started("run", "precision=delayed", *options, "train.steps=6")
    assert longer.losses()[:5] == losses
    assert len(longer.losses()) == 6
    card = (longer.run_dir / "final" / "README.md").read_text()
    assert "| `precision` | bf16 to step 5, then delayed |" in card
    assert longer.audit()["effective"] == "delayed"
    assert "parity" not in longer.audit(), "parity was checked for BF16 only"


def test_a_branch_goes_on_as_the_other_did_in_a_folder_of_its_own(
    started: Callable, tmp_path: Path
) -> None:
    settings = ("precision=delayed", "seed=5")
    trunk = started("trunk-5", *settings)
    losses = trunk.losses()
    before = contents(trunk.run_dir)
    begin = f"train.begin_with={tmp_path}/trunk-{{seed}}/checkpoints/step-00000003"
    branch = started("branch", *settings, begin)
    assert branch.losses() == losses[3:]
    assert "from step 4 on" in branch.output
    assert contents(trunk.run_dir) == before
    # A branch that has checkpoints resumes from them and does not need the other run.
    shutil.rmtree(trunk.run_dir)
    shutil.rmtree(branch.run_dir / "checkpoints" / "step-00000005")
    assert started("branch", *settings, begin).losses() == losses[3:]


def test_a_branch_changes_the_weights_of_sources(
    started: Callable, small_recipe: dict[str, Any], small_packs: Path, tmp_path: Path
) -> None:
    shutil.copytree(small_packs, tmp_path / "packs" / "a")
    write_packs(tmp_path / "packs" / "b", PACK_LENGTH, multiple=2)
    shares = []
    branch = ()
    for name, weight, steps in (("first", 0.01, 4), ("branch", 3, 6)):
        sources = [{"name": "a", "weight": 1}, {"name": "b", "weight": weight}]
        small_recipe["data"] = {"packs": str(tmp_path / "packs"), "sources": sources, "length": 32}
        settings = ("precision=bf16", "batch.tokens=256", f"train.steps={steps}")
        run = started(name, *settings, *branch)
        branch = (f"train.begin_with={run.run_dir}/checkpoints/step-00000004",)
        shares.append([record["share/b"] for record in run.records() if "share/b" in record][-1])
    assert shares[0] < 0.1 and shares[1] > 0.5


def test_a_mixture_of_experts_learns_and_is_exported(started: Callable) -> None:
    run = started("run", EXPERTS, "precision=delayed", "log.fp8_statistics=2")
    first, *_, fourth, last = run.steps()
    assert last["loss"] < first["loss"]
    assert last["router_loss"] > 0
    assert max(map(max, fourth["expert_loads"])) == round(fourth["expert_load"], 3) >= 1
    assert "computes each linear layer separately" in run.audit()["fused"]
    tensors = tensors_of(run.run_dir / "checkpoints" / "step-00000005")
    exported = AutoModelForCausalLM.from_pretrained(run.run_dir / "final").state_dict()
    assert any("experts.down_proj/forward/scale" in name for name in tensors)
    assert any("gate_up_proj" in name for name in exported)
    for name in exported.keys() - {"lm_head.weight"}:  # The head is tied.
        assert torch.equal(exported[name], tensors[name]), name


# ── Muon ──

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
    checked = ("fp8_config.on_unsupported=emulate", "parity=on", "log.fp8_statistics=2")
    run = train_here(*MUON, *LEARNS[name], *checked, "train.steps=8").done()
    assert run.losses()[-1] < run.losses()[0] - 0.5
    rms = [step["muon_update_rms"] for step in run.steps() if "muon_update_rms" in step]
    assert len(rms) >= 4
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
    def without_nesterov(*args: Any, **options: Any) -> Hyperparameters:
        # The direction is (1 - beta2) gradient + beta2 momentum.
        return Hyperparameters(*args, **options)._replace(beta2=1.0)

    monkeypatch.setattr(muon, "Hyperparameters", without_nesterov)
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
