"""Test low-precision runs: schedules, changes of precision and weights, branches, and experts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.golden.runs import saved, tensors_of

# Steps before the switch of precision.
SWITCH = 3
EXPERTS = {
    "model_type": "olmoe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
}
EXPERTS |= {"output_router_logits": True, "router_aux_loss_coef": 0.01}


def test_phases_resume_at_and_across_a_switch_bit_for_bit(
    started: Callable,
) -> None:
    until = f"precision=[{{until: {SWITCH}, use: delayed"
    schedules = {
        "bf16": f"{until}}}, {{use: bf16}}]",
        "current": f"{until}}}, {{use: current}}]",
    }
    to_bf16, low = (started(after, schedule) for after, schedule in schedules.items())
    only_delayed = started("plain", "precision=delayed", f"train.steps={SWITCH}")
    assert to_bf16.losses()[:SWITCH] == only_delayed.losses()
    assert low.losses()[:SWITCH] == to_bf16.losses()[:SWITCH]
    assert low.losses()[SWITCH:] != to_bf16.losses()[SWITCH:]
    for run, after, step in ((to_bf16, "bf16", SWITCH), (low, "current", 2)):
        precisions = [record["precision"] for record in run.steps()]
        assert precisions == ["delayed"] * SWITCH + [after] * (5 - SWITCH)
        assert run.audit()["phases"] == {"1": "delayed", "4": after}
        checkpoint = f"{run.run_dir}/checkpoints/step-{step:08}"
        resumed = started("resumed", schedules[after], "--resume", checkpoint)
        assert resumed.losses() == run.losses()[step:]
        assert saved(resumed.run_dir, 5) == saved(run.run_dir, 5)
        shutil.rmtree(resumed.run_dir)
    reverse = started("reverse", f"precision=[{{until: {SWITCH}, use: current}}, {{use: delayed}}]")
    assert reverse.audit()["phases"] == {"1": "current", "4": "delayed"}


def test_layers_are_compiled_on_a_cpu_in_bf16(started: Callable) -> None:
    options = ("precision=bf16", "train.steps=3")
    eager = started("eager", *options)
    compiled = started("compiled", *options, "model.compile=layer")
    assert "torch.compile: each layer" in compiled.output
    assert compiled.losses() == pytest.approx(eager.losses(), rel=1e-3)
    assert json.loads((compiled.run_dir / "summary.json").read_text())["recompiles"] == 0


def test_accept_changes_allows_another_precision_and_other_weights(
    started: Callable,
) -> None:
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
    trunk = tmp_path / "trunk-5"
    shutil.move(started("trunk", "precision=delayed", "seed=5").run_dir, trunk)
    before = sorted((path, path.stat().st_mtime_ns) for path in trunk.rglob("*"))
    settings = (
        "precision=delayed",
        "seed=5",
        f"train.begin_with={tmp_path}/trunk-{{seed}}/checkpoints/step-00000003",
    )
    branch = started("branch", *settings)
    records = map(json.loads, (trunk / "metrics.jsonl").read_text().splitlines())
    assert branch.losses() == [record["loss"] for record in records if "loss" in record][3:]
    assert "from step 4 on" in branch.output
    assert sorted((path, path.stat().st_mtime_ns) for path in trunk.rglob("*")) == before
    # A branch that has checkpoints resumes from them and does not need the other run.
    shutil.rmtree(trunk)
    shutil.rmtree(branch.run_dir / "checkpoints" / "step-00000005")
    assert started("branch", *settings).losses() == branch.losses()


def test_a_mixture_trains_resumes_bit_for_bit_and_is_exported(
    started: Callable, small_recipe: dict[str, Any]
) -> None:
    config = {
        key: value for key, value in small_recipe["model"]["config"].items() if key != "head_dim"
    }
    small_recipe["model"] = {"config": config | EXPERTS, "gradient_checkpointing": "full"}
    options = ("precision=delayed", "log.fp8_statistics=2")
    run = started("run", *options)
    first, *_, fourth, last = run.steps()
    assert last["loss"] < first["loss"]
    assert last["router_loss"] > 0
    assert max(map(max, fourth["expert_loads"])) == round(fourth["expert_load"], 3) >= 1
    assert "computes each linear layer separately" in run.audit()["fused"]
    resumed = started("resumed", *options, "--resume", f"{run.run_dir}/checkpoints/step-00000002")
    assert saved(resumed.run_dir, 5) == saved(run.run_dir, 5)
    tensors = tensors_of(run.run_dir / "checkpoints" / "step-00000005")
    exported = AutoModelForCausalLM.from_pretrained(run.run_dir / "final").state_dict()
    assert any("experts.down_proj/forward/scale" in name for name in tensors)
    assert any("gate_up_proj" in name for name in exported)
    for name in exported.keys() - {"lm_head.weight"}:  # The head is tied.
        assert torch.equal(exported[name], tensors[name]), name
