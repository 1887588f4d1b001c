"""Train one way in its own process, and print the result as one line of JSON.

    python -m benchmarks.speed.libraries.worker benchmarks.speed.libraries.hf_eager \\
        --recipe benchmarks/qwen3_1_7b.yaml --microbatch 8 --steps 11

`benchmarks.speed ways` starts this command. As in the launcher, a step is timed from the request
for its data to the end of its update.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.speed.libraries.task import Builder, Task, Way
from packing.batch import Prefetch, StepBatches
from pretrain.metrics.recorder import memory_metrics
from pretrain.optimizer import schedule
from pretrain.optimizer.adamw import set_learning_rate
from pretrain.settings.config import load_recipe


def main() -> None:
    arguments = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    builder: Builder = importlib.import_module(arguments.module)
    if obstacle := builder.obstacle(device):
        result: dict[str, Any] = {"status": "not run", "reason": obstacle}
    else:
        task = Task(load_recipe(arguments.recipe, arguments.overrides), device, arguments.weights)
        try:
            result = train(builder.build(task), task, arguments.microbatch, arguments.steps)
        # The caller tries a smaller microbatch in a new process.
        except torch.OutOfMemoryError as error:
            result = {"status": "out of memory", "reason": str(error).partition(". ")[0]}
    print(json.dumps(result), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "module", help="module of `benchmarks.speed.libraries` with `obstacle` and `build`"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the recipe")
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--weights", choices=("fp32", "bf16", "bf16_exact"), default="fp32")
    parser.add_argument("--microbatch", type=int, required=True, help="packs in one forward pass")
    parser.add_argument("--steps", type=int, required=True)
    return parser.parse_intermixed_args()


def train(way: Way, task: Task, microbatch: int, steps: int) -> dict[str, Any]:
    """Train with the packs and learning rates of the launcher. Return the figures of every step."""
    recipe = task.recipe
    peak = recipe.optimizer.learning_rate
    figures = {"losses": [], "gradient_norms": [], "step_ms": [], "data_wait_ms": []}
    parameters = {id(p): p for p in way.model.parameters() if p.requires_grad}
    updated = {id(p): p for group in way.optimizer.param_groups for p in group["params"]}
    with task.batches(microbatch).steps(0, steps) as batches:
        for step in range(steps):
            began = time.perf_counter()
            rate = schedule.learning_rate(step, recipe.schedule, peak, steps)
            set_learning_rate(way.optimizer, rate)
            loss, norm = train_step(way, batches, recipe.optimizer.clip, task.device)
            seconds = time.perf_counter() - began
            values = (loss, norm, seconds * 1e3, batches.data_wait_ms)
            batches.data_wait_ms = 0.0
            for key, value in zip(figures, values, strict=True):
                figures[key].append(value)
    return {
        "status": "ok",
        **figures,
        "memory_gib": memory_metrics(task.device)["memory_gib"],
        "parameters": sum(p.numel() for p in parameters.values()),
        "updated_parameters": sum(p.numel() for key, p in updated.items() if key in parameters),
    }


def train_step(
    way: Way, batches: Prefetch[StepBatches], clip: float | None, device: torch.device
) -> tuple[float, float]:
    """Train one step. Return its mean loss and the gradient norm before clipping."""
    step = batches.take()
    losses = []
    for batch in step.microbatches:
        loss = way.loss(batch, step.valid_tokens)
        way.backward(loss)
        losses.append(loss.detach().float())
    batches.build_ahead()
    norm = nn.utils.clip_grad_norm_(
        way.model.parameters(), clip if clip is not None else float("inf")
    )
    way.optimizer.step()
    way.optimizer.zero_grad(set_to_none=True)
    figures = torch.stack([torch.stack(losses).sum(), norm.float()]).tolist()
    if device.type == "cuda":
        # Wait for the update too.
        torch.cuda.synchronize()
    return figures[0], figures[1]


if __name__ == "__main__":
    main()
