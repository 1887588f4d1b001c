"""A mixture of experts through the launcher, in emulated FP8: one run, killed and gone on with, and what it leaves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.golden.runs import tensors_of

EXPERTS = {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
EXPERTS |= {"output_router_logits": True, "router_aux_loss_coef": 0.01}


def test_a_mixture_trains_goes_on_from_a_checkpoint_to_the_same_bits_and_is_exported(
    start_here: Callable, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    config = {key: value for key, value in small_recipe["model"]["config"].items() if key != "head_dim"}
    small_recipe["model"] = {"config": config | EXPERTS, "gradient_checkpointing": "full"}
    small_recipe |= {"train": {"steps": 4}, "checkpoint": {"every": 2, "keep": 9}, "evaluate": {}, "weights": "bf16_exact"}
    small_recipe |= {"precision": "delayed", "fp8_config": {"backend": "emulation"}, "log": {"gap": 2, "fp8_statistics": 2}}
    run = start_here(small_recipe, tmp_path)
    assert run.status == 0, run.output
    first, *_, last = (record for record in run.records() if "loss" in record)
    assert last["loss"] < first["loss"] and last["router_loss"] > 0 and last["expert_load"] >= 1
    assert 0 < last["gap/routing"] < 0.2 and "gap/routing" not in first
    whole, end = tensors_of(run.run_dir / "checkpoints" / "step-00000004"), run.run_dir / "checkpoints" / "step-00000004"

    shutil.rmtree(end)
    shutil.rmtree(run.run_dir / "final")
    again = start_here(small_recipe, tmp_path)
    assert again.status == 0 and "at step 2" in again.output, again.output
    resumed = tensors_of(end)
    assert resumed.keys() == whole.keys() and all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert any("experts.down_proj/forward/scale" in name for name in whole)

    exported = AutoModelForCausalLM.from_pretrained(run.run_dir / "final").state_dict()
    assert any("experts.gate_up_proj" in name for name in exported)
    for name in exported.keys() - {"lm_head.weight"}:  # which is tied
        assert torch.equal(exported[name], whole[name]), name
