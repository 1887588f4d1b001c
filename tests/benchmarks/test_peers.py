"""Other trainers as programs: their commands, their logs, and packages that are missing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from benchmarks.machine import without_padding
from benchmarks.speed.programs.measure import run, table
from benchmarks.speed.programs.task import QWEN3, task_of
from benchmarks.speed.programs.trainers import TRAINERS
from tests.lab.made_runs import rows_of

TASK = task_of(QWEN3, 5)
BY_NAME = {trainer.name: trainer for trainer in TRAINERS}
# A step of one second in the log of each trainer.
LOGS = {
    "torchtitan BF16": (
        "[rank0]:\x1b[31mstep:  5  \x1b[32mloss: 12.1  grad_norm: 1.5  \x1b[38mmemory: 70.1GiB(50%)"
        "  \x1b[34mtps: 131,072  tflops: 400.1  mfu: 40.4%\x1b[39m\n"
    ),
    "Megatron-Core FP8": (
        " [2026-11-28 10:00:00] iteration        5/      12 | consumed samples:          160 | "
        "elapsed time per iteration (ms): 1000.0 | lm loss: 1.2E+01 |\n"
    ),
    "NeMo Automodel BF16": "INFO:root:Max iter time: 1.00 seconds\n",
    "llmq FP8": 'llmq starts\n{"seconds": 1.0, "loss": 12.1}\n',
    "Hugging Face BF16": '{"seconds": 1.0, "loss": null}\n{"train_runtime": 3}\n',
}


@pytest.mark.parametrize("name", LOGS)
def test_the_seconds_of_a_step_are_read_from_the_log(name: str, tmp_path: Path) -> None:
    assert BY_NAME[name].seconds(TASK, 3 * LOGS[name], tmp_path) == [1.0] * 3


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_a_command_has_the_microbatch_and_the_tokens(trainer, tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text("{}")
    command = trainer.command(TASK, 7, tmp_path)
    recipe = tmp_path / "recipe.yaml"
    if recipe.exists():
        batch = yaml.safe_load(recipe.read_text())["step_scheduler"]
        assert (batch["local_batch_size"], batch["global_batch_size"]) == (7, 32)
        assert json.loads((tmp_path / "model" / "config.json").read_text())["hidden_size"] == 2048
    else:
        assert "7" in command or "batch.microbatch=7" in command


def test_a_missing_package_and_a_model_are_named(tmp_path: Path) -> None:
    arguments = SimpleNamespace(packages=tmp_path, timeout=1)
    missing = run(BY_NAME["llmq BF16"], TASK, arguments)
    other_model = run(BY_NAME["torchtitan FP8"], task_of("Qwen2.5-7B", 5), arguments)
    assert missing["failed"] == "needs the package pyllmq"
    assert other_model["failed"] == "its models are Qwen3-1.7B here"
    ours = {"tokens_per_second": 47_388, "differs": ""}
    faster = {"tokens_per_second": 49_000, "differs": ""}
    rows = {"llmq BF16": missing, "ours BF16": ours, "ours FP8 with the head": faster}
    text = table({"rows": rows | {"ours BF16 without FlashAttention-4": ours}})
    assert rows_of(without_padding(text))["ours"] == [["47,388", "–", "49,000", ""]]
    assert "ours without FlashAttention-4" in text
    assert text.endswith("\nllmq BF16: needs the package pyllmq")
