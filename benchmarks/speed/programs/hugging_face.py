"""Train with Hugging Face's Trainer (BF16), or with Accelerate's FP8 on torchao.

    python -m benchmarks.speed.programs.hugging_face bf16 TASK.json MICROBATCH
    python -m benchmarks.speed.programs.hugging_face fp8 TASK.json MICROBATCH

The model has Liger's kernels, its layers are compiled, and its weights and moments are in FP32, as
axolotl and LLaMA-Factory train. Every step prints a line of JSON with its seconds and its loss.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from benchmarks.speed.programs.task import Task

ON_GPU = torch.cuda.is_available()


class Sequences(Dataset[dict[str, Tensor]]):
    """Whole sequences of frequent and rare tokens."""

    def __init__(self, task: Task) -> None:
        generator = torch.Generator().manual_seed(0)
        count = min(512, task.sequences * task.steps)
        uniform = torch.rand(count, task.length, generator=generator)
        self.rows = (3 / (uniform + 1e-6)).long() % task.config["vocab_size"]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Clock:
    """Print the seconds of each step."""

    def __init__(self) -> None:
        self.begin = self._now()

    def step(self, loss: float | None = None) -> None:
        now = self._now()
        print(json.dumps({"seconds": now - self.begin, "loss": loss}), flush=True)
        self.begin = now

    def _now(self) -> float:
        if ON_GPU:
            torch.cuda.synchronize()
        return time.perf_counter()


def build(task: Task) -> PreTrainedModel:
    """Return the model with compiled layers."""
    arguments = dict(task.config)
    config = AutoConfig.for_model(arguments.pop("model_type"), **arguments, use_cache=False)
    torch.manual_seed(0)
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
    if ON_GPU:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
        for layer in model.model.layers:
            layer.compile()
    return model


def train_in_bf16(task: Task, microbatch: int) -> None:
    """Train with the Trainer, in BF16 by autocast."""

    class Timer(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.clock = Clock()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.clock.step()

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="hugging-face"),
        bf16=ON_GPU,
        use_cpu=not ON_GPU,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=task.sequences // microbatch,
        max_steps=task.steps,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Trainer(
        model=build(task),
        args=arguments,
        train_dataset=Sequences(task),
        data_collator=default_data_collator,
        callbacks=[Timer()],
    ).train()


def train_in_fp8(task: Task, microbatch: int) -> None:
    """Train with Accelerate's FP8: torchao's float8 linears with one scale per tensor."""
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    accumulation = task.sequences // microbatch
    accelerator = Accelerator(
        mixed_precision="fp8",
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[AORecipeKwargs(config=Float8LinearConfig.from_recipe_name("tensorwise"))],
    )
    model = build(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01, fused=True)
    batches = DataLoader(Sequences(task), microbatch, collate_fn=default_data_collator)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    clock = Clock()
    steps = 0
    total = 0.0
    while steps < task.steps:
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                total += loss.detach() / accumulation
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and steps < task.steps:
                steps += 1
                clock.step(float(total))
                total = 0.0


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("precision", choices=["bf16", "fp8"])
    parser.add_argument("task", type=Path)
    parser.add_argument("microbatch", type=int)
    arguments = parser.parse_args()
    task = Task(**json.loads(arguments.task.read_text()))
    train = {"bf16": train_in_bf16, "fp8": train_in_fp8}[arguments.precision]
    train(task, arguments.microbatch)


if __name__ == "__main__":
    main()
