"""`weights:` end to end: what each mode keeps, what it loses, and how a run goes on in another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from pretrain.optimizer.adamw_update import join
from tests.conftest import over

# A rate at which most updates are smaller than half a unit in a BF16 weight's last place.
SLOW = ["precision=bf16", "optimizer.learning_rate=2e-5", "schedule.kind=constant", "schedule.warmup=0", "evaluate.every=6"]


def tensors(run_dir: Path, kind: str) -> dict[str, torch.Tensor]:
    newest = sorted((run_dir / "checkpoints").iterdir())[-1]
    return {name: tensor for file in newest.glob(f"{kind}-*.safetensors") for name, tensor in load_file(file).items()}


def masters(run_dir: Path) -> dict[str, torch.Tensor]:
    """FP32 weights of a run's newest checkpoint, whatever mode it was saved in."""
    state = tensors(run_dir, "optimizer")
    return {
        name: join(weight, state[f"remainder/{name}"]) if f"remainder/{name}" in state else weight.float()
        for name, weight in tensors(run_dir, "model").items()
    }


@pytest.fixture
def runs(train_here: Callable, tmp_path: Path) -> Callable:
    def run(weights: str, *arguments: str, run_dir: str | None = None):
        finished = train_here(*over(SLOW, f"weights={weights}", f"run_dir={tmp_path / (run_dir or weights)}", *arguments))
        assert finished.status == 0, finished.output
        return finished

    return run


def test_exact_bf16_weights_keep_what_plain_bf16_weights_lose(runs: Callable) -> None:
    fp32, exact, plain = (runs(weights) for weights in ("fp32", "bf16_exact", "bf16"))
    # The same draw, rounded to BF16 for computing in all three.
    assert fp32.losses()[0] == pytest.approx(exact.losses()[0], abs=1e-5)
    frozen = {
        run.run_dir.name: [record["frozen_updates"] for record in run.records() if "loss" in record]
        for run in (fp32, exact, plain)
    }
    assert max(frozen["fp32"]) < 0.01
    assert max(frozen["bf16_exact"]) < 0.01
    assert min(frozen["bf16"]) > 0.5

    assert "frozen_most" not in exact.records()[0] and "too small to change" not in fp32.output + exact.output
    named = [record["frozen_most"] for record in plain.records() if "frozen_most" in record]
    at_first, at_last = named[0], named[-1]
    assert len(named) == 3, "after steps 1, 10 and the last"
    norms = {name for name, value in masters(plain.run_dir).items() if value.dim() == 1}
    assert at_last.keys() <= norms and set(at_last.values()) == {1.0}, "norms are 1 and never move at this rate"
    assert plain.output.count("of all updates were too small") == 1 and next(iter(at_first)) in plain.output
    assert json.loads((plain.run_dir / "summary.json").read_text())["frozen_most"] == at_last

    moved = {run.run_dir.name: masters(run.run_dir) for run in (fp32, exact, plain)}

    def distance(name: str) -> float:
        differences = [(moved[name][key] - weight).flatten() for key, weight in moved["fp32"].items()]
        return torch.cat(differences).norm().item()

    assert distance("bf16_exact") < 0.1 * distance("bf16")
    for weights in ("bf16_exact", "bf16"):
        loaded = AutoModelForCausalLM.from_pretrained(fp32.run_dir.parent / weights / "final")
        assert loaded.dtype == torch.bfloat16


@pytest.mark.parametrize(("first", "then"), [("fp32", "bf16_exact"), ("bf16_exact", "fp32"), ("bf16", "bf16_exact")])
def test_a_checkpoint_of_one_mode_is_continued_in_another_and_says_so(
    runs: Callable, train_here: Callable, tmp_path: Path, first: str, then: str
) -> None:
    begun = runs(first, "train.steps=4", run_dir="moved")
    before = masters(begun.run_dir)
    refused = train_here(*SLOW, f"weights={then}", f"run_dir={begun.run_dir}", "train.steps=4")
    assert refused.status == 2
    assert f'weights: saved "{first}", now "{then}"' in refused.output

    # No step is left to do: what is saved again is what was loaded, in the other mode.
    (begun.run_dir / "checkpoints" / "step-00000004").rename(tmp_path / "step-00000004")
    taken = ["--accept-changes", "--resume", str(tmp_path / "step-00000004"), "train.steps=5", "optimizer.learning_rate=1e-30"]
    continued = runs(then, *taken, "optimizer.weight_decay=0", run_dir="moved")
    assert f"{first} became {then}" in continued.output
    after = masters(continued.run_dir)
    assert before.keys() == after.keys()
    for name, master in before.items():
        assert torch.equal(master, after[name]), name
    assert json.loads((continued.run_dir / "audit.json").read_text())["weights"] == then


def test_bf16_weights_stay_as_they_are_when_their_remainders_are_dropped(
    runs: Callable, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    """Where a master lies just between two of them, too: one in 65,536 does, and here all."""
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small_recipe["model"]["config"]))
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.view(torch.int32).bitwise_or_(0xFFFF).bitwise_xor_(0x7FFF)
    hf.save_pretrained(tmp_path / "between")
    still = [f"model.source={tmp_path / 'between'}", "model.config=null", "optimizer.learning_rate=1e-35", "parity=off"]
    exact = runs("bf16_exact", *still, "train.steps=1")
    begins = f"train.begin_with={exact.run_dir / 'checkpoints' / 'step-00000001'}"
    plain = runs("bf16", *still, begins, "train.steps=2")
    before, after = tensors(exact.run_dir, "model"), tensors(plain.run_dir, "model")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(not torch.equal(master.bfloat16(), before[name]) for name, master in masters(exact.run_dir).items())
