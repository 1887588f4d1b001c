"""What GPUs of one machine send each other: by hand for each topology, and beside what four H200s lost."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pretrain.metrics.flops import ModelFlops
from pretrain.plan.exchange import bytes_sent, on_devices, step_seconds
from pretrain.plan.memory import Devices
from pretrain.plan.plan import Plan
from pretrain.precision.selection import missing_on, select_precision
from pretrain.precision.settings import LowPrecisionSettings
from tests.pretrain.plan.plan_recipe import QWEN3, recipe

VALUES = 1_720_574_976  # of QWEN3


def plan(tokens: int, devices: int, *, sharded: bool = False) -> Plan:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3))
    changed = recipe(batch={"tokens": tokens, "microbatch": 8}, data={"packs": "p", "length": 4096})
    bf16 = select_precision("bf16", LowPrecisionSettings(), missing_on("cpu"))
    one = Plan(changed, bf16, Devices(name="NVIDIA H200"), "any", ModelFlops.of(model), 745.0, packs=22_206)
    return on_devices(one, devices, sharded=sharded)


def test_a_copy_on_each_sends_its_sums_twice_and_shards_send_sums_and_weights_once():
    assert bytes_sent(plan(131_072, 4), 1) == pytest.approx(2 * 3 / 4 * 4 * VALUES)
    assert bytes_sent(plan(131_072, 4, sharded=True), 1) == pytest.approx(3 / 4 * (4 + 2) * VALUES)
    assert bytes_sent(plan(131_072, 1), 4) == 0


@pytest.mark.parametrize(("tokens", "measured"), [(131_072, 278_422), (524_288, 299_000)])
def test_what_four_h200s_lost_is_met_within_two_percent(tokens: int, measured: int):
    """DDP in FP8 with its head, where one made 76,923 tokens/s: benchmarks/results/speed/h200_x4_ddp.json, docs/scaling.md."""
    assert tokens / step_seconds(plan(tokens, 4), 76_923) == pytest.approx(measured, rel=0.02)
