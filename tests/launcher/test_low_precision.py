"""The launcher in low precision, emulated, as a user runs it: every recipe trains, says what ran, and resumes exactly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import benchmarks.parity
import train_accelerate
from pretrain.metrics.run_record import read_metrics
from pretrain.precision.emulation import EmulatedProduct, Operand
from pretrain.precision.registry import PRECISIONS
from tests.conftest import BLOCK_LENGTH

QUANTIZED = [name for name, recipe in PRECISIONS.items() if recipe.quantized]


@pytest.fixture
def low_precision_recipe(low_precision_recipe: dict[str, Any]) -> dict[str, Any]:
    """In steps of a quarter of the size, which these tests can do with."""
    return low_precision_recipe | {"batch": {"tokens": 2 * BLOCK_LENGTH, "microbatch": 1}}


@pytest.fixture
def shallow_recipe(low_precision_recipe: dict[str, Any]) -> dict[str, Any]:
    """Of a single layer, for what is no matter of one layer or another."""
    config = low_precision_recipe["model"]["config"] | {"num_hidden_layers": 1}
    return low_precision_recipe | {"model": {"config": config}}


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run_dir) if "loss" in record]


def json_of(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("precision", QUANTIZED)
def test_every_recipe_trains_and_leaves_proof(precision: str, train_here: Callable, shallow_recipe: dict[str, Any]) -> None:
    recipe = shallow_recipe | {"precision": precision, "weights": "bf16_exact", "train": {"steps": 10}}
    finished = train_here("fp8_config.scope=linear+head+norm", recipe=recipe)
    assert finished.status == 0, finished.output
    summary = json_of(finished.run_dir / "summary.json")
    assert summary["held_out_loss"] < 0.6 * finished.losses()[0]

    found = json_of(finished.run_dir / "audit.json")
    assert (found["precision"], found["effective"], found["backend"]) == (precision, precision, "emulation")
    assert PRECISIONS[precision].hardware.missing(None, None) in found["reason"]
    assert found["confirmed_in_step"] == 1
    assert len(found["products"]) == 8 + 5 and {each["effective"] for each in found["products"]} == {precision}

    due = [json.loads(line) for line in (finished.run_dir / "fp8_statistics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in due] == [1, 5, 10] and all(len(each["operands"]) == 8 * 3 for each in due)
    with_figures = [step["step"] for step in steps_of(finished.run_dir) if "fp8/fwd_scale" in step and "fp8/bwd_scale" in step]
    assert with_figures == [1, 5, 10]


@pytest.mark.parametrize("weights", ["fp32", "bf16_exact"])
def test_delayed_scaling_resumes_with_its_history_bit_for_bit(
    weights: str, train_here: Callable, low_precision_recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe = low_precision_recipe | {
        "precision": "delayed",
        "weights": weights,
        "train": {"steps": 5},
        "checkpoint": {"every": 2},
    }
    whole = train_here(recipe=recipe)
    assert whole.status == 0, whole.output
    losses, checkpoints = whole.losses(), whole.run_dir / "checkpoints"
    end = (checkpoints / "step-00000005").rename(tmp_path / "whole")
    again = train_here("--resume", str(checkpoints / "step-00000002"), recipe=recipe)
    assert again.status == 0, again.output
    assert "resumed from" in again.output
    assert again.losses() == losses
    last = [sorted(folder.glob("*.safetensors")) for folder in (end, checkpoints / "step-00000005")]
    assert len(last[0]) > 0
    for ours, theirs in zip(*last, strict=True):
        one, other = load_file(ours), load_file(theirs)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    state = {name: tensor for path in last[0] for name, tensor in load_file(path).items() if name.startswith("fp8/")}
    assert len(state) == 14 * 4 and all(tensor.dtype == torch.float32 for tensor in state.values())
    history = state["fp8/model.layers.0.mlp.down_proj/forward/amax_history"]
    assert history.shape == (1024, 3) and history[-1, 0] > 0 and history[-1, 1] > 0


def test_delayed_scaling_knows_all_gradients_before_the_first_step(
    low_precision_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step of a million tokens gradients are so small that they round to zero at the scale that a history begins with."""
    recipe = low_precision_recipe | {"precision": "delayed", "batch": {"tokens": 2**20, "microbatch": 8}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    arguments = ["--recipe", str(tmp_path / "recipe.yaml"), "--repeats", "1", "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["parity.py", *arguments])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps its state in the process
    try:
        benchmarks.parity.main()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    parity = json_of(tmp_path / "out.json")["parity"]
    assert not parity["failures"] and parity["quantized"]["least_cosine"] > 0.9
    assert abs(parity["quantized"]["gradient_norm"] / parity["quantized"]["reference_norm"] - 1) < 0.05


def test_a_run_goes_on_in_another_precision_if_it_is_allowed_to(train_here: Callable, shallow_recipe: dict[str, Any]) -> None:
    recipe = shallow_recipe | {"precision": "delayed"}
    assert train_here("train.steps=4", "schedule.warmup=0", recipe=recipe).status == 0
    refused = train_here("precision=mxfp8", recipe=recipe)
    assert refused.status == 2 and 'precision: saved "delayed", now "mxfp8"' in refused.output
    to_mxfp8 = train_here("precision=mxfp8", "train.steps=8", "--accept-changes", recipe=recipe)
    assert to_mxfp8.status == 0 and "tensors of delayed scaling" in to_mxfp8.output
    back = train_here("--accept-changes", recipe=recipe)
    assert back.status == 0 and "tensors of delayed scaling" in back.output
    assert "not in the checkpoint: its histories of amax are empty, and passes over 8 packs" in back.output
    assert back.losses()[-1] < 0.5 * back.losses()[0]


def test_evaluation_is_in_bf16_unless_it_is_asked_for(
    train_here: Callable, shallow_recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe = shallow_recipe | {"precision": "nvfp4", "train": {"steps": 2}, "schedule": {}}
    losses = {}
    for low in (False, True):
        run = train_here(f"fp8_config.use_autocast_during_eval={low}", recipe=recipe | {"run_dir": str(tmp_path / str(low))})
        assert run.status == 0, run.output
        losses[low] = (run.losses(), json_of(run.run_dir / "summary.json")["held_out_loss"])
    assert losses[False][0] == losses[True][0], "how a run is evaluated does not touch its training"
    assert losses[False][1] != losses[True][1] and abs(losses[False][1] - losses[True][1]) < 0.1


@pytest.mark.parametrize("precision", ["delayed", "nvfp4"])
def test_what_goes_wrong_in_a_later_step_stops_the_run_before_its_update(
    precision: str, train_here: Callable, low_precision_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its fourth step on nothing rounds the inputs of one linear any more: the next step with statistics finds it."""
    steps, honest, seed = [], EmulatedProduct.operand, train_accelerate.seed_step
    monkeypatch.setattr(train_accelerate, "seed_step", lambda seeds, step, rank: (steps.append(step), seed(seeds, step, rank)))

    def broken(product: EmulatedProduct, role: str, x: torch.Tensor, along: str, scale: torch.Tensor | None) -> Operand:
        operand = honest(product, role, x, along, scale)
        if len(steps) < 4 or role != "input" or "1.mlp.up_proj" not in product.name:
            return operand
        return Operand(1.01 * operand.values, operand.scale, operand.block_scale)

    monkeypatch.setattr(EmulatedProduct, "operand", broken)
    stopped = train_here(recipe=low_precision_recipe | {"precision": precision})
    assert stopped.status == 2
    assert "1 of 14 modules did not run in it as they should in step 5: model.layers.1.mlp.up_proj" in stopped.output
    assert "forward input: of " in stopped.output and "wgrad input: of " in stopped.output
    assert "at row" in stopped.output
    assert [record["step"] for record in steps_of(stopped.run_dir)] == [1, 2, 3, 4]
    assert [path.name for path in (stopped.run_dir / "checkpoints").iterdir()] == ["step-00000004"]


def test_a_fallback_is_said_and_written_down(train_here: Callable, low_precision_recipe: dict[str, Any]) -> None:
    run = train_here("precision=nvfp4", "fp8_config.on_unsupported=fallback", "train.steps=3", recipe=low_precision_recipe)
    assert run.status == 0, run.output
    found = json_of(run.run_dir / "audit.json")
    assert (found["precision"], found["effective"], found["backend"]) == ("nvfp4", "bf16", "torch")
    assert {each["effective"] for each in found["products"]} == {"bf16"}
    assert "`precision: nvfp4` needs a GPU of compute capability 10.0" in run.output
