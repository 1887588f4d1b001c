"""Read planner_rows.csv, the measured and published speeds of training steps.

`benchmarks/planner_fit.py` describes its columns, and fits the constants of the formula of
`lab.speed.speed` to its rows.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lab.speed.work import RECOMPUTED, Work
from pretrain.metrics.flops import ModelFlops, Shape
from pretrain.plan.memory import BYTES, Devices
from pretrain.precision.settings import PRECISIONS

ROWS = Path(__file__).with_name("planner_rows.csv")


@dataclass(frozen=True)
class Row:
    """A row of planner_rows.csv: a training step and its speed."""

    values: Mapping[str, str]
    work: Work
    # Tokens per second of all devices together.
    speed: float


@cache
def read_rows(*statuses: str) -> list[Row]:
    """Return the rows with one of these statuses."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        return [
            Row(values, _work_in(values), float(values["tokens_per_second"]))
            for values in csv.DictReader(file)
            if values["status"] in statuses
        ]


def _work_in(values: Mapping[str, str]) -> Work:
    """Return the work that a row describes."""
    gpus = int(values["gpus"])
    precision, _, head = values["precision"].partition("+")
    moments = 2 * BYTES[values["moments"]]
    is_recomputed = values["recompute"] == "full"
    return Work(
        flops=_flops_in(values),
        precision=precision,
        quantized_head=head == "head",
        coded_share=float(PRECISIONS[precision].quantized),
        attention=f"packed_{values['attention']}",
        squared_length_per_token=float(values["mean_squared_length"]),
        tokens=int(values["tokens_per_step"]) // gpus,
        microbatch=int(values["microbatch_tokens"]),
        devices=Devices(
            gpus,
            sharded=values["topology"] in ("zero", "fsdp2"),
            gathered_once=values["topology"] == "zero",
            replicas=gpus // int(values["shards"]),
        ),
        gradient_bytes=BYTES[values["gradients"]],
        moment_bytes=moments,
        offloaded_bytes=moments if values["offload"] == "moments" else 0,
        fused=values["fused"] == "1",
        recomputed_shares=RECOMPUTED if is_recomputed else (0.0, 0.0, 0.0),
    )


def _flops_in(values: Mapping[str, str]) -> ModelFlops:
    """Return the sizes of a row's model. Norms and biases are not counted."""
    shape = Shape(**{name: int(values[name]) for name in Shape.__dataclass_fields__})
    unit = shape.layers * shape.hidden
    matrices = 2 + int(values["gated"])
    experts, chosen = int(values["experts"]), int(values["experts_per_token"])
    expert = unit * matrices * int(values["expert_width"])
    in_attention = 2 * unit * (shape.heads + shape.kv_heads) * shape.head_dim
    # Layers with experts have a router instead of an MLP.
    in_mlp = unit * (experts or matrices * shape.feed_forward)
    head = shape.hidden * shape.vocabulary
    tied = values["tied"] == "1"
    return ModelFlops(
        shape=shape,
        attention_weights=in_attention,
        mlp_weights=in_mlp,
        head_weights=head,
        uncounted=(),
        parameters=in_attention + in_mlp + experts * expert + head * (1 if tied else 2),
        embedding_parameters=head,
        position_parameters=0,
        tied=tied,
        expert_weights=chosen * expert,
        idle_weights=(experts - chosen) * expert,
        experts_per_token=chosen,
    )
