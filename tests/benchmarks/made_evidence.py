"""Result files of `benchmarks.evidence` and `benchmarks.throughput`, written in a moment with differences that are known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.evidence_read import BRANCH
from pretrain.settings.config import flatten, load_recipe, resolved
from pretrain.settings.launch_environment import with_precision

STEPS, TOKENS = 100, 4096  # a step
SLOPE = -0.2  # nats for each factor e of tokens
ANNEALED = 0.3  # nats by which the decay lowers the loss
TRAINED = 50.0  # of a loss above the baseline's, what the last step's training loss has
KINDS = {"code": 0.5, "prose": 2.0}  # of a loss above the baseline's, what each kind of text has
RECIPE = {
    "name": "evidence_tiny",
    "model": {"config": {"model_type": "qwen3", "hidden_size": 32}},
    "data": {"packs": "packs"},
    "batch": {"tokens": TOKENS},
    "weights": "bf16_exact",
    "optimizer": {"learning_rate": 3.0e-3},
    "schedule": {"kind": "wsd", "decay": 0.2},
    "train": {"steps": STEPS},
    "fp8_config": {"use_autocast_during_eval": True},
}


@dataclass(frozen=True)
class MadeCell:
    """A cell as its settings over RECIPE, and by how much its loss ends above the baseline's with each seed, from 1 on."""

    settings: tuple[str, ...]
    above: Sequence[float | None]  # nats; None: the run's loss is no number
    backend: str = "torch"
    kl: float | None = 0.01


def level(seed: int) -> float:
    """A baseline's held-out loss at the end."""
    return 2.0 + 0.01 * seed


def make_evidence(path: Path, cells: Mapping[str, MadeCell], *, between: Sequence[float] = (0.02, 0.04), **head: Any) -> Path:
    """A result file of one scale."""
    recipe = path.with_name("recipe.yaml")
    recipe.write_text(yaml.safe_dump(RECIPE))
    settings = {
        f"{name}-seed{seed}": flatten(resolved(with_precision(load_recipe(recipe, [*cell.settings, f"seed={seed}"]), {})))
        for name, cell in cells.items()
        for seed in range(1, len(cell.above) + 1)
    }
    every = list(settings.values())
    shared = {key: value for key, value in every[0].items() if all(each.get(key) == value for each in every)}
    runs = {}
    for name, cell in cells.items():
        for seed, above in enumerate(cell.above, start=1):
            own = {key: value for key, value in settings[f"{name}-seed{seed}"].items() if key not in shared}
            runs[f"{name}-seed{seed}"] = {
                "cell": name,
                "seed": seed,
                "commit": None,
                "date": "2026-11-21",
                "settings": own,
                "began_with": f"hash{seed}" if name.endswith(BRANCH) else None,
                "checkpoints": {"fifth": f"hash{seed}"},
            } | _run(cell, seed, above)
    packages = {"torch": "2.11.0"}
    environment = {"gpus": ["NVIDIA H200"], "packages": packages, "data_fingerprint": "ab12"}
    content = {"scale": "tiny", "parameters": 14_200_000, "tokens": STEPS * TOKENS, "command": "python -m benchmarks.evidence"}
    content |= {"environment": environment, "settings": shared, "runs": runs}
    content |= {"between_baseline_seeds": [{"seeds": [1, 2 + number], "kl": kl} for number, kl in enumerate(between)]} | head
    path.write_text(json.dumps(content))
    return path


def _run(cell: MadeCell, seed: int, above: float | None) -> dict[str, Any]:
    lost = above is None
    final = math.nan if above is None else level(seed) + above
    before = final + ANNEALED

    def loss_at(step: int) -> float | None:
        return None if lost else final if step == STEPS else before + SLOPE * math.log(step / (0.8 * STEPS))

    evaluations = [
        {"step": step, "tokens": step * TOKENS, "held_out_loss": loss_at(step)}
        for step in range(STEPS // 10, STEPS + 1, STEPS // 10)
    ]
    summary = {"steps": STEPS, "tokens": STEPS * TOKENS, "tokens_per_step": TOKENS, "data_fingerprint": "ab12"}
    return {
        "audit": {"precision": None, "backend": cell.backend},
        "summary": summary | ({} if lost else {"held_out_loss": final}),
        "losses": [3.0] * (STEPS - 1) + [None if lost else 3.0 + TRAINED * above],
        "gradient_norms": [1.0] * STEPS,
        "evaluations": evaluations,
        "endpoints": {
            "before_decay": {"held_out_loss": None if lost else before},
            "final": {"held_out_loss": None if lost else final, "last_word_accuracy": 0.25, "kl_to_baseline": cell.kl}
            | {f"held_out_loss/{kind}": None if lost else level(seed) + part * above for kind, part in KINDS.items()},
        },
    }


def make_speeds(path: Path, speeds: Mapping[tuple[str, ...], float]) -> Path:
    """A result file of throughput: tokens/s of our ways by their overrides."""
    ways = {
        str(number): {"ours": True, "status": "ok", "overrides": [*overrides], "tokens_per_second": {"median": speed}}
        for number, (overrides, speed) in enumerate(speeds.items())
    }
    environment = {"gpus": ["NVIDIA H200"]}
    path.write_text(json.dumps({"ways": ways, "settings": {"model": "qwen3_1_7b", "gpus": "7"}, "environment": environment}))
    return path
