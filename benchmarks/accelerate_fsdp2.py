"""FP8 under FSDP2 as accelerate prepares it, beside this launcher: does it engage, how fast is it, and what is the loss?

    python -m benchmarks.accelerate_fsdp2 --processes 4 --out benchmarks/results/h200_x4_accelerate_fsdp2.json [key=value ...]

The case is huggingface/accelerate#3710: no speed came of `mixed_precision: fp8` with `fsdp_version: 2`. The other way is a script
as accelerate's documentation has it: a configuration with an `fp8_config`, `accelerator.prepare(model, optimizer)`, and the model
and loss of transformers. Both train the same weights on the same packs, in BF16 and in FP8. A hook counts the `te.Linear` modules
whose forward runs in FP8, by Transformer Engine's own flag; of ours `audit.json` says it. Embedding and head are not tied:
accelerate's FSDP2 refuses tied ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from accelerate import Accelerator
from torch import nn

from benchmarks.machine import LAUNCH, measured_on, run_to_its_end, write
from benchmarks.training_speed import RECIPE, measure
from benchmarks.ways.task import Task
from packing.batch import StepBatches
from pretrain.metrics.recorder import memory_gib
from pretrain.settings.config import load_recipe

STEPS, WARM_UP = 10, 3
UNTIED = "model.config.tie_word_embeddings=false"
CONFIG = Path("accelerate_configs/fsdp2.yaml")
FP8_CONFIG = {
    "backend": "TE",
    "fp8_format": "HYBRID",
    "amax_history_len": 1024,
    "amax_compute_algo": "max",
    "interval": 1,
    "margin": 0,
    "use_autocast_during_eval": False,
    "override_linear_precision": [False, False, False],
}


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        train_as_documented(arguments)
        return
    report = {
        **measured_on(),
        "results": {},
    }
    for name, run in (("accelerate's way", theirs), ("this launcher", ours)):
        if name in arguments.only:
            for precision in ("bf16", "fp8"):
                report["results"][f"{name}, {precision}"] = result = run(precision, arguments)
                print(f"{name}, {precision}: { {key: each for key, each in result.items() if key != 'output'} }", flush=True)
                write(arguments.out, report)  # whole after each: the next may be interrupted


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the recipe's settings, for both")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--microbatch", type=int, default=2, help="packs at once of accelerate's way, whose logits are whole")
    parser.add_argument("--only", nargs="+", default=["accelerate's way", "this launcher"], help="one of the two")
    parser.add_argument("--timeout", type=float, default=200, help="seconds for each of the four")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_intermixed_args()


def theirs(precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="accelerate-fsdp2-") as folder:
        config = yaml.safe_load(CONFIG.read_text()) | {"mixed_precision": precision}
        if precision == "fp8":
            config["fp8_config"] = FP8_CONFIG
        written, out = Path(folder) / "config.yaml", Path(folder) / "result.json"
        written.write_text(yaml.safe_dump(config))
        script = ["-m", "benchmarks.accelerate_fsdp2", "--worker", "--recipe", str(arguments.recipe), "--out", str(out)]
        launch = [*LAUNCH, "--config_file", str(written), "--num_processes", str(arguments.processes)]
        command = [*launch, *script, "--microbatch", str(arguments.microbatch), *arguments.overrides]
        status, output = run_to_its_end(command, arguments.timeout, {})
        return json.loads(out.read_text()) if out.exists() else {"status": status, "output": output[-4000:]}


def ours(precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    low = "delayed" if precision == "fp8" else precision
    overrides = [f"precision={low}", "fp8_config.scope=linear+head"] if precision == "fp8" else [f"precision={low}"]
    folder = Path("runs") / "accelerate_fsdp2" / low
    result = measure(
        [UNTIED, f"train.steps={STEPS}", *overrides, *arguments.overrides],
        recipe=arguments.recipe,
        config=CONFIG,
        timeout=arguments.timeout,
        processes=arguments.processes,
        folder=folder,
    )
    if "summary" not in result:
        return result
    audit = json.loads((folder / "audit.json").read_text())
    return {
        "losses": result["steps"]["loss"],
        "gradient_norms": result["steps"]["gradient_norm"],
        "step_ms": result["steps"]["step_ms"],
        "tokens_per_second": result["summary"]["tokens_per_second"],
        "memory_gib": result["summary"]["memory_gib"],
        "audit": {"computes": audit["computes"], "products": dict(Counter(row["effective"] for row in audit["products"]))},
    }


def train_as_documented(arguments: argparse.Namespace) -> None:
    """One process of accelerate's way; the main one writes the figures."""
    accelerator = Accelerator()
    recipe = load_recipe(arguments.recipe, [UNTIED, *arguments.overrides])
    task = Task(recipe, accelerator.device, "fp32")
    hf = task.hugging_face_model()
    model, optimizer = accelerator.prepare(hf, task.adamw(hf.parameters()))
    in_fp8 = watch(model)
    losses, norms, step_ms = [], [], []
    stream = task.batches(arguments.microbatch, accelerator.process_index, accelerator.num_processes)
    with stream.steps(0, STEPS) as batches:
        for _ in range(STEPS):
            began = time.perf_counter()
            loss, norm = step_as_documented(next(batches), task, accelerator, model, optimizer)
            losses.append(loss)
            norms.append(norm)
            if accelerator.device.type == "cuda":
                torch.cuda.synchronize()
            step_ms.append((time.perf_counter() - began) * 1e3)
    if accelerator.is_main_process:
        found = {
            "losses": losses,
            "gradient_norms": norms,
            "step_ms": step_ms,
            "tokens_per_second": recipe.batch.tokens / statistics.median(step_ms[WARM_UP:]) * 1e3,
            "memory_gib": memory_gib(accelerator.device),
            "linears": {str(kind): sum(of == kind for of, _ in in_fp8.values()) for kind in {of for of, _ in in_fp8.values()}},
            "linears that ran in FP8": sum(fp8 for _, fp8 in in_fp8.values()),
        }
        arguments.out.write_text(json.dumps(found))


def step_as_documented(
    step: StepBatches, task: Task, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[float, float]:
    """The mean loss of the step's tokens, and the norm of its gradients before they were clipped."""
    total = torch.zeros((), device=accelerator.device)
    for batch in step.microbatches:
        inputs = task.inputs(batch)
        labels = inputs.pop("labels")  # shifted already, with document boundaries masked
        loss = model(**inputs, labels=labels, shift_labels=labels, num_items_in_batch=step.valid_tokens, use_cache=False).loss
        total += loss.detach()
        # Ranks' gradients are averaged; the loss is a share of all ranks' tokens.
        accelerator.backward(loss * accelerator.num_processes)
    norm = accelerator.clip_grad_norm_(model.parameters(), task.recipe.optimizer.clip)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item(), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def watch(model: nn.Module) -> dict[str, tuple[str, bool]]:
    """Return by linear its class, and whether its last forward ran in FP8 by Transformer Engine's flag. It fills as it trains."""
    found: dict[str, tuple[str, bool]] = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear" or isinstance(module, nn.Linear):
            kind = f"{type(module).__module__}.{type(module).__name__}"

            def after(module: nn.Module, _inputs: object, _output: object, name: str = name, kind: str = kind) -> None:
                found[name] = (kind, bool(getattr(module, "fp8", False)))

            module.register_forward_hook(after)
    return found


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
