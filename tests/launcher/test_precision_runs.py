"""Runs in low precision: schedules, changes of precision and of weights, branches, and a mixture of experts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.golden.runs import saved, tensors_of

SWITCH = 3  # steps before it
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
        "delayed_bf16_forward": f"{until}}}, {{use: delayed, forward: bf16}}]",
    }
    to_bf16, low = (started(after, schedule) for after, schedule in schedules.items())
    assert (
        to_bf16.losses()[:SWITCH]
        == started("plain", "precision=delayed", f"train.steps={SWITCH}").losses()
    )
    assert low.losses()[: SWITCH + 1] == to_bf16.losses()[: SWITCH + 1], (
        "of the same weights, the first one of the phase too"
    )
    assert low.losses()[SWITCH + 1 :] != to_bf16.losses()[SWITCH + 1 :], (
        "whose gradients are not the same"
    )
    for whole, after, step in ((to_bf16, "bf16", SWITCH), (low, "delayed_bf16_forward", 2)):
        assert [each["precision"] for each in whole.steps()] == ["delayed"] * SWITCH + [after] * (
            5 - SWITCH
        )
        assert whole.audit()["phases"] == {"1": "delayed", "4": after}
        again = started(
            "again", schedules[after], "--resume", f"{whole.run_dir}/checkpoints/step-{step:08}"
        )
        assert again.losses() == whole.losses()[step:] and saved(again.run_dir, 5) == saved(
            whole.run_dir, 5
        )
        shutil.rmtree(again.run_dir)
    first = started("first", f"{until}, forward: bf16}}, {{use: delayed}}]")
    assert first.audit()["phases"] == {"1": "delayed_bf16_forward", "4": "delayed"}, (
        "whichever is first, both find one history"
    )
    assert first.output.count("it is emulated") == 1


def test_accept_changes_allows_another_precision_and_other_weights(
    started: Callable,
) -> None:
    whole = started("run", "precision=bf16", "parity=on")
    options = ("weights=fp32", "--accept-changes")
    fp32 = started(
        "fp32", "precision=bf16", *options, "--resume", f"{whole.run_dir}/checkpoints/step-00000003"
    )
    assert (losses := whole.losses())[3:] == fp32.losses(), "of the weights nothing is lost"
    then = started("run", "precision=delayed", *options, "train.steps=6")
    assert then.losses()[:5] == losses and len(then.losses()) == 6
    assert (
        "| `precision` | bf16 to step 5, then delayed |"
        in (then.run_dir / "final" / "README.md").read_text()
    )
    assert then.audit()["effective"] == "delayed" and "parity" not in then.audit(), (
        "which was looked at in BF16 alone"
    )


def test_a_branch_goes_on_as_the_other_did_in_a_folder_of_its_own(
    started: Callable, tmp_path: Path
) -> None:
    whole = started("whole", "precision=delayed", "seed=5")
    shutil.move(whole.run_dir, tmp_path / "whole-5")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "whole-5").rglob("*"))
    begins = (
        "precision=delayed",
        "seed=5",
        f"train.begin_with={tmp_path}/whole-{{seed}}/checkpoints/step-00000003",
    )
    branch = started("branch", *begins)
    steps = [
        json.loads(line)
        for line in (tmp_path / "whole-5" / "metrics.jsonl").read_text().splitlines()
    ]
    assert branch.losses() == [step["loss"] for step in steps if "loss" in step][3:]
    card = (branch.run_dir / "final" / "README.md").read_text()
    assert (
        "the first 3 of these steps, by another run" in card and "from step 4 on" in branch.output
    )
    assert (
        sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "whole-5").rglob("*"))
        == before
    )
    # once it has checkpoints of its own, those are gone on from
    shutil.rmtree(tmp_path / "whole-5")
    shutil.rmtree(branch.run_dir / "checkpoints" / "step-00000005")
    assert started("branch", *begins).losses() == branch.losses()


def test_a_mixture_trains_resumes_bit_for_bit_and_is_exported(
    started: Callable, small_recipe: dict[str, Any]
) -> None:
    config = {
        key: value for key, value in small_recipe["model"]["config"].items() if key != "head_dim"
    }
    small_recipe["model"] = {"config": config | EXPERTS, "gradient_checkpointing": "full"}
    options = ("precision=delayed", "log.gap=2", "log.fp8_statistics=2")
    whole = started("whole", *options)
    first, *_, fourth, last = whole.steps()
    assert last["loss"] < first["loss"] and last["router_loss"] > 0
    assert max(map(max, fourth["expert_loads"])) == round(fourth["expert_load"], 3) >= 1
    assert (
        0 < fourth["gap/routing"] < 0.2
        and "gap/routing" not in first
        and "one by one" in whole.audit()["fused"]
    )
    again = started("again", *options, "--resume", f"{whole.run_dir}/checkpoints/step-00000002")
    assert saved(again.run_dir, 5) == saved(whole.run_dir, 5)
    tensors = tensors_of(whole.run_dir / "checkpoints" / "step-00000005")
    exported = AutoModelForCausalLM.from_pretrained(whole.run_dir / "final").state_dict()
    assert any("experts.down_proj/forward/scale" in each for each in tensors) and any(
        "gate_up_proj" in each for each in exported
    )
    for name in exported.keys() - {"lm_head.weight"}:  # which is tied
        assert torch.equal(exported[name], tensors[name]), name
