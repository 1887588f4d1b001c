"""Read rows.csv, the measured and published speeds of training steps.

`python -m benchmarks.planner_fit` fits the constants of `pretrain.plan.speed` to the rows with the
status `fit`, and describes all columns.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pretrain.plan.memory import BYTES
from pretrain.plan.work import RECOMPUTED, Work

ROWS = Path(__file__).with_name("rows.csv")
# The rows that a plan may quote: steps of this trainer, as it is today.
QUOTED = ("fit", "multi")


@dataclass(frozen=True)
class Step:
    """A measured step."""

    # Short name of the card.
    card: str
    work: Work
    # Of all devices together.
    tokens_per_second: float


def read_rows() -> list[dict[str, str]]:
    """Return the rows of rows.csv."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def measured_steps() -> list[Step]:
    """Return the steps of this trainer that a plan may quote."""
    return [
        Step(row["card"], work_in(row), float(row["tokens_per_second"]))
        for row in read_rows()
        if row["status"] in QUOTED
    ]


def work_in(row: Mapping[str, str]) -> Work:
    """Return the work that a row describes."""
    size = {
        name: int(row[name])
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocabulary", "gpus")
    }
    matrices = 2 + int(row["gated"])
    experts = int(row["experts"])
    width = int(row["experts_per_token"]) * int(row["expert_width"]) if experts else 0
    per_width = size["layers"] * size["hidden"]
    heads = 2 * (size["heads"] + size["kv_heads"])
    in_attention = per_width * (heads * size["head_dim"] + experts)  # with routers
    in_mlp = per_width * matrices * (width or int(row["intermediate"]))
    in_experts = per_width * matrices * experts * int(row["expert_width"])
    head = size["hidden"] * size["vocabulary"]
    precision, _, low_head = row["precision"].partition("+")
    tokens = int(row["tokens_per_step"]) // size["gpus"]
    moments = 2 * BYTES[row["moments"]]
    return Work(
        **size,
        feed_forward=width or int(row["intermediate"]),
        gated=matrices == 3,
        tied=row["tied"] == "1",
        parameters=in_attention + (in_experts or in_mlp) + head * (2 - int(row["tied"])),
        layer_weights=in_attention + in_mlp,
        expert_weights=in_mlp if experts else 0,
        head_weights=head,
        precision=precision,
        low_head=bool(low_head),
        attention=f"packed_{row['attention']}",
        squares=float(row["mean_squared_length"]),
        tokens=tokens,
        microbatch=min(int(row["microbatch_tokens"]), tokens),
        shards=int(row["shards"]),
        topology=row["topology"],
        weights=2 if row["weights"] == "bf16" else 4,
        gradients=BYTES[row["gradients"]],
        moments=moments,
        offloaded=moments if row["offload"] == "moments" else 0,
        fused=row["fused"] == "1",
        recomputed=RECOMPUTED if row["recompute"] == "full" else (0.0, 0.0, 0.0),
    )
