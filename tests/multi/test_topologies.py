"""One recipe under every topology: real processes, joined by gloo, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

CPU = {"ACCELERATE_USE_CPU": "true"}  # the YAMLs are for GPUs; this is accelerate's own way to run them on CPUs
TOPOLOGIES = {
    "one process": ["--config_file", "accelerate_configs/cpu.yaml"],
    "ddp": ["--config_file", "accelerate_configs/ddp.yaml", "--mixed_precision", "no"],
    "fsdp2": ["--config_file", "accelerate_configs/fsdp2.yaml", "--mixed_precision", "no"],
}

pytestmark = pytest.mark.multi


@pytest.fixture
def train_under(train: Callable, tmp_path: Path) -> Callable:
    def run(topology: str, *arguments: str):
        environment = {} if topology == "one process" else CPU
        finished = train(*arguments, launch=TOPOLOGIES[topology], **environment)
        assert finished.status == 0, finished.output
        return finished

    return run


@pytest.mark.parametrize("topology", ["ddp", "fsdp2"])
def test_two_processes_have_the_loss_curve_of_one(train_under: Callable, topology: str, tmp_path: Path) -> None:
    one = train_under("one process", f"run_dir={tmp_path / 'one'}")
    two = train_under(topology, f"run_dir={tmp_path / 'two'}")
    assert two.losses() == pytest.approx(one.losses(), abs=1e-6)
    assert one.losses()[-1] < 0.8 * one.losses()[0]
    keys = ("step", "tokens", "epoch", "learning_rate", "gradient_norm", "held_out_loss", "held_out_tokens")
    for a, b in zip(one.records(), two.records(), strict=True):
        assert {k: b[k] for k in keys if k in b} == pytest.approx({k: a[k] for k in keys if k in a}, abs=1e-5)
    models = [AutoModelForCausalLM.from_pretrained(run.run_dir / "final") for run in (one, two)]
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_exact_weights_are_sharded_with_their_remainders(train_under: Callable, tmp_path: Path) -> None:
    exact = ["precision=bf16", "weights=bf16_exact", "optimizer.learning_rate=1e-3"]
    one = train_under("one process", f"run_dir={tmp_path / 'one'}", *exact)
    two = train_under("fsdp2", f"run_dir={tmp_path / 'two'}", *exact)
    assert two.losses() == pytest.approx(one.losses(), abs=5e-3)  # BF16 gradients, summed in another order
    assert max(record["frozen_updates"] for record in two.records() if "loss" in record) < 0.01


@pytest.mark.parametrize(("first", "then"), [("one process", "ddp"), ("fsdp2", "one process")])
def test_a_run_resumes_under_another_topology(train_under: Callable, first: str, then: str, tmp_path: Path) -> None:
    whole = train_under("one process", f"run_dir={tmp_path / 'whole'}")
    run_dir = f"run_dir={tmp_path / 'moved'}"
    # The schedule belongs to the horizon of 12 steps, so the first part is ended by removing what came after step 4.
    train_under(first, run_dir)
    moved = tmp_path / "moved"
    for step in ("00000008", "00000012"):
        (moved / "checkpoints" / f"step-{step}").rename(tmp_path / f"{step}-set-aside")
    resumed = train_under(then, run_dir)
    assert "step 4" in resumed.output
    assert resumed.losses() == pytest.approx(whole.losses(), abs=1e-5)


def test_processes_that_would_train_separate_copies_are_refused(train: Callable, tmp_path: Path) -> None:
    config = tmp_path / "copies.yaml"
    config.write_text(Path("accelerate_configs/ddp.yaml").read_text().replace("use_cpu: false", "use_cpu: true"))
    finished = train(launch=["--config_file", str(config), "--mixed_precision", "no"])
    assert finished.status != 0
    assert "2 processes were launched but each runs alone" in finished.output
    assert "ACCELERATE_USE_CPU" in finished.output


@pytest.mark.parametrize("key", ["fsdp_cpu_ram_efficient_loading", "fsdp_activation_checkpointing"])
def test_sharding_options_that_would_train_another_model_are_refused(train: Callable, tmp_path: Path, key: str) -> None:
    config = tmp_path / "fsdp2.yaml"
    config.write_text(Path("accelerate_configs/fsdp2.yaml").read_text().replace(f"{key}: false", f"{key}: true"))
    finished = train(launch=["--config_file", str(config), "--mixed_precision", "no"], **CPU)
    assert finished.status != 0
    assert key in finished.output and "set it" in finished.output
