"""Runs in low precision: schedules, changes of precision and of weights, branches, and a mixture of experts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import Finished
from tests.golden.runs import tensors_of

SWITCH = 3  # steps before it
EXPERTS = {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
EXPERTS |= {"output_router_logits": True, "router_aux_loss_coef": 0.01}


@pytest.fixture
def started(start_here: Callable, small_recipe: dict[str, Any], tmp_path: Path) -> Callable[..., Finished]:
    changes = {"train": {"steps": 5}, "evaluate": {}, "checkpoint": {"every": 1, "keep": 9}, "weights": "bf16_exact"}
    changes |= {"batch": {"tokens": 128, "microbatch": 2}, "fp8_config": {"on_unsupported": "emulate"}, "parity": "off"}
    changes |= {"schedule": {"kind": "constant"}}

    def start(folder: str, *arguments: str) -> Finished:
        run = start_here(small_recipe | changes, tmp_path, f"run_dir={tmp_path / folder}", *arguments)
        assert run.status == 0, run.output
        return run

    return start


def audit_of(run: Finished) -> dict[str, Any]:
    return json.loads((run.run_dir / "audit.json").read_text())


def end_of(run: Finished) -> dict[str, torch.Tensor]:
    return tensors_of(run.run_dir / "checkpoints" / "step-00000005")


def assert_same_end(one: Finished, other: Finished) -> None:
    ours, theirs = end_of(one), end_of(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_schedules_first_steps_are_the_plain_runs_and_it_resumes_at_its_switch_bit_for_bit(started: Callable) -> None:
    before, after = "delayed", "bf16"
    schedule = f"precision=[{{until: {SWITCH}, use: {before}}}, {{use: {after}}}]"
    plain, whole = started("plain", f"precision={before}", f"train.steps={SWITCH}"), started("whole", schedule)
    assert whole.losses()[:SWITCH] == plain.losses()
    precisions = [step["precision"] for step in whole.records() if "loss" in step]
    assert precisions == [before] * SWITCH + [after] * (5 - SWITCH)
    assert audit_of(whole)["phases"] == {"1": before, "4": after}
    again = started("again", schedule, "--resume", f"{whole.run_dir}/checkpoints/step-{SWITCH:08}")
    assert again.losses() == whole.losses()[SWITCH:]
    assert_same_end(again, whole)


def test_a_phase_with_a_bf16_forward_has_bf16s_losses_and_a_resume_across_its_beginning_is_exact(started: Callable) -> None:
    before = f"precision=[{{until: {SWITCH}, use: delayed}}, {{use: "
    whole, to_bf16 = started("whole", f"{before}delayed, forward: bf16}}]"), started("to_bf16", f"{before}bf16}}]")
    assert whole.losses()[: SWITCH + 1] == to_bf16.losses()[: SWITCH + 1], "of the same weights, the first one of the phase too"
    assert whole.losses()[SWITCH + 1 :] != to_bf16.losses()[SWITCH + 1 :], "whose gradients are not the same"
    assert audit_of(whole)["phases"] == {"1": "delayed", "4": "delayed_bf16_forward"}
    again = started("again", f"{before}delayed, forward: bf16}}]", "--resume", f"{whole.run_dir}/checkpoints/step-00000002")
    assert again.losses() == whole.losses()[2:]
    assert_same_end(again, whole)
    first = started("first", f"precision=[{{until: {SWITCH}, use: delayed, forward: bf16}}, {{use: delayed}}]")
    assert audit_of(first)["phases"] == {"1": "delayed_bf16_forward", "4": "delayed"}, "whichever is first, both find one history"


def test_a_run_goes_on_in_another_precision_and_other_weights_if_that_is_accepted(started: Callable) -> None:
    first = started("run", "precision=bf16", "train.steps=3").losses()
    then = started("run", "precision=delayed", "weights=fp32", "train.steps=5", "--accept-changes")
    assert then.losses()[:3] == first and len(then.losses()) == 5
    assert audit_of(then)["effective"] == "delayed"


# ── Branches: a run that begins with another run's checkpoint ─────────────────────────────────────────────────────────────────


def test_a_branch_goes_on_as_the_other_did_in_a_folder_of_its_own(started: Callable, tmp_path: Path) -> None:
    whole = started("whole", "precision=delayed", "seed=5")
    shutil.move(whole.run_dir, tmp_path / "whole-5")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "whole-5").rglob("*"))
    begins = ("precision=delayed", "seed=5", f"train.begin_with={tmp_path}/whole-{{seed}}/checkpoints/step-00000003")
    branch = started("branch", *begins)
    steps = [json.loads(line) for line in (tmp_path / "whole-5" / "metrics.jsonl").read_text().splitlines()]
    assert branch.losses() == [step["loss"] for step in steps if "loss" in step][3:]
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "whole-5").rglob("*")) == before
    shutil.rmtree(tmp_path / "whole-5")  # once it has checkpoints of its own, those are gone on from
    shutil.rmtree(branch.run_dir / "checkpoints" / "step-00000005")
    assert started("branch", *begins).losses() == branch.losses()


# ── A mixture of experts ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_mixture_trains_goes_on_from_a_checkpoint_to_the_same_bits_and_is_exported(
    started: Callable, small_recipe: dict[str, Any]
) -> None:
    config = {key: value for key, value in small_recipe["model"]["config"].items() if key != "head_dim"}
    small_recipe["model"] = {"config": config | EXPERTS, "gradient_checkpointing": "full"}
    options = ("precision=delayed", "log.gap=2", "log.fp8_statistics=2")
    whole = started("whole", *options)
    first, *_, fourth, last = (record for record in whole.records() if "loss" in record)
    assert last["loss"] < first["loss"] and last["router_loss"] > 0 and last["expert_load"] >= 1
    assert 0 < fourth["gap/routing"] < 0.2 and "gap/routing" not in first
    assert_same_end(started("again", *options, "--resume", f"{whole.run_dir}/checkpoints/step-00000002"), whole)

    saved, exported = end_of(whole), AutoModelForCausalLM.from_pretrained(whole.run_dir / "final").state_dict()
    assert any("experts.down_proj/forward/scale" in name for name in saved)
    assert any("experts.gate_up_proj" in name for name in exported)
    for name in exported.keys() - {"lm_head.weight"}:  # which is tied
        assert torch.equal(exported[name], saved[name]), name
