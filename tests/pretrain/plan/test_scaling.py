"""What `--plan --gpus` says: by hand for each topology, and against what was measured on four H200s."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from foundation.errors import InputError
from pretrain.metrics.flops import ModelFlops
from pretrain.plan.memory import Devices
from pretrain.plan.plan import Plan
from pretrain.plan.scaling import Cluster, Links, Scaled, cluster_asked, links_of, on_cluster, render_scaling, speeds_of
from pretrain.precision.selection import missing_on, select_precision
from pretrain.precision.settings import LowPrecisionSettings
from tests.pretrain.plan.plan_recipe import recipe

H200 = Links(450.0, 400.0)
QWEN3 = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144}
QWEN3 |= {"num_hidden_layers": 28, "vocab_size": 151936, "tie_word_embeddings": True, "model_type": "qwen3"}
LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336}
LLAMA |= {"num_hidden_layers": 32, "vocab_size": 128256, "model_type": "llama"}
VALUES = 1_720_574_976  # of QWEN3


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    with torch.device("meta"):
        return {
            config["model_type"]: AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)) for config in (QWEN3, LLAMA)
        }


def scaling(
    model: PreTrainedModel,
    gpus: int,
    nodes: int = 1,
    *,
    sharding: Any = "none",
    replicated: bool = False,
    speed: float = 80_000.0,
    **changes: Any,
) -> Scaled:
    bf16 = select_precision("bf16", LowPrecisionSettings(), missing_on("cpu"))
    one = Plan(recipe(**changes), bf16, Devices(), "any", ModelFlops.of(model), 745.0, packs=22_206)
    cluster = Cluster(gpus, nodes)
    return Scaled(on_cluster(one, cluster, sharding, replicated=replicated), cluster, H200, speed, replicated)


@pytest.mark.parametrize(
    ("name", "sharding", "tokens", "length", "microbatch", "alone", "efficiency"),
    [
        ("qwen3", "none", 131_072, 4096, 8, 76_923, 278_422 / (4 * 76_923)),
        ("qwen3", "none", 524_288, 4096, 8, 76_923, 299_500 / (4 * 76_923)),
        ("qwen3", "once", 524_288, 4096, 8, 76_923, 300_000 / (4 * 76_923)),
        ("llama", "once", 262_144, 8192, 1, 20_679, 77_841 / (4 * 20_679)),
        # An earlier form of `fsdp2.yaml`.
        ("qwen3", "each", 524_288, 4096, 8, 70_023, 262_825 / (4 * 70_023)),
        ("llama", "each", 262_144, 8192, 1, 20_679, 61_233 / (4 * 20_679)),
    ],
)
def test_efficiencies_of_four_h200s_are_met_within_one_and_a_half_points(
    models: dict[str, PreTrainedModel],
    name: str,
    sharding: str,
    tokens: int,
    length: int,
    microbatch: int,
    alone: float,
    efficiency: float,
) -> None:
    changes = {"batch": {"tokens": tokens, "microbatch": microbatch}, "data": {"packs": "packs", "length": length}}
    found = scaling(models[name], 4, sharding=sharding, speed=alone, **changes)
    assert found.efficiency(hidden=True) == found.efficiency(hidden=False) == pytest.approx(efficiency, abs=0.015)


def test_ddp_sends_fp32_sums_twice_in_rings_within_and_between_machines(models: dict[str, PreTrainedModel]) -> None:
    (found,) = scaling(models["qwen3"], 16, 2).exchanges()
    assert found.inside == pytest.approx(2 * 7 / 8 * 4 * VALUES)
    assert found.between == pytest.approx(2 * 1 / 2 * 4 * VALUES / 8)


def test_shards_gathered_once_send_each_sum_and_each_bf16_weight_once(models: dict[str, PreTrainedModel]) -> None:
    sums, weights = scaling(models["qwen3"], 16, 2, sharding="once").exchanges()
    assert (sums.inside, weights.inside) == pytest.approx((7 / 8 * 4 * VALUES, 7 / 8 * 2 * VALUES))
    assert (sums.between, weights.between) == pytest.approx((1 / 2 * 4 * VALUES / 8, 1 / 2 * 2 * VALUES / 8))


def test_shards_gathered_for_each_use_send_all_in_each_microbatch(models: dict[str, PreTrainedModel]) -> None:
    batch = {"tokens": 3 * 8 * 4 * 4096, "microbatch": 8}  # three microbatches on each of four
    backward, forward = scaling(models["qwen3"], 4, sharding="each", batch=batch).exchanges()
    assert (backward.inside, forward.inside) == pytest.approx((3 * 3 / 4 * (4 + 2) * VALUES, 3 * 3 / 4 * 2 * VALUES))
    compute = 24 * 4096 / 80_000
    assert (backward.behind, forward.behind) == pytest.approx((2 / 3 * compute, 1 / 3 * compute))


def test_replicas_of_shards_add_up_between_machines_alone(models: dict[str, PreTrainedModel]) -> None:
    found = scaling(models["qwen3"], 32, 4, sharding="once", replicated=True)
    assert found.plan.devices.replicas == 4
    sums, weights, replicas = found.exchanges()
    assert sums.between == weights.between == replicas.inside == 0
    assert replicas.between == pytest.approx(2 * 3 / 4 * 4 * VALUES / 8)
    on_one_machine = scaling(models["qwen3"], 8, sharding="once", replicated=True)
    assert on_one_machine.on(32, 4).exchanges() == found.exchanges()


def test_what_the_network_takes_hides_behind_the_last_backward_and_the_rest_is_lost(models: dict[str, PreTrainedModel]) -> None:
    """128 packs on 16 GPUs: one microbatch each. A slow network, 10 Gbit/s a GPU: 0.86 GB at 1 GB/s."""
    slow = replace(scaling(models["qwen3"], 16, 2, batch={"tokens": 524_288, "microbatch": 8}), links=Links(450.0, 10.0))
    compute, sent = 8 * 4096 / 80_000, VALUES / 2 * 2 / 1e9
    assert slow.between(hidden=False) == pytest.approx(sent / 2 * 4 / 4)
    assert slow.between(hidden=True) == pytest.approx(sent / 2 - 2 / 3 * compute)
    assert slow.step(hidden=True) == pytest.approx(compute + 2 * 7 / 8 * 4 * VALUES / (0.45 * 450e9) + sent / 2 - 2 / 3 * compute)
    assert slow.efficiency(hidden=True) == pytest.approx(compute / slow.step(hidden=True))


def test_places_that_packs_leave_empty_take_their_time(models: dict[str, PreTrainedModel]) -> None:
    """32 packs on three GPUs: eleven at most, in two microbatches of eight."""
    assert scaling(models["qwen3"], 3, batch={"tokens": 131_072, "microbatch": 8}).compute == 16 * 4096 / 80_000


def test_where_it_stops_scaling_is_the_last_size_of_ninety_percent(models: dict[str, PreTrainedModel]) -> None:
    found = scaling(models["qwen3"], 64, 8, batch={"tokens": 4_194_304, "microbatch": 8})
    last = found.scales_to(hidden=True)
    assert last % 8 == 0 and found.on(last, last // 8).efficiency(hidden=True) >= 0.9
    assert all(found.on(8 * nodes, nodes).efficiency(hidden=True) < 0.9 for nodes in range(last // 8 + 1, 129))
    assert found.scales_to(hidden=False) <= last
    assert found.on(10**12, 1).scales_to(hidden=True) <= 1024  # GPUs of one machine, of which most have no pack
    assert scaling(models["qwen3"], 8, batch={"tokens": 4096, "microbatch": 1}).scales_to(hidden=True) == 1


def test_devices_are_known_by_name_and_others_are_assumed_and_said_to_be() -> None:
    assert links_of("NVIDIA B200", None) == (Links(900.0, 400.0), "B200")
    assert links_of("NVIDIA H100 80GB HBM3", 200.0) == (Links(450.0, 200.0), "H100")
    assert links_of("NVIDIA H100 PCIe", None)[1] is None and links_of("CPU", None) == (H200, None)


def test_the_text_says_what_is_sent_what_is_lost_and_what_is_assumed(models: dict[str, PreTrainedModel]) -> None:
    base = scaling(models["qwen3"], 1, batch={"tokens": 4_194_304, "microbatch": 8}).plan
    measured = replace(base, tokens_per_second=76_923.0)
    said = render_scaling(measured, Cluster(512, 64), "once", replicated=False)
    for part in (
        "512 GPUs on 64 machines, zero",
        "compute 0.11 s (a GPU has 1 x 2 packs)",
        "9.03 GB",
        "1.27 GB",
        "all of which can hide",
        "a GPU, assumed;",
    ):
        assert part in said, said
    assert "H200's, as this device is not in the table" in said and max(map(len, said.splitlines())) <= 100
    assumed = replace(base, devices=Devices(name="NVIDIA H200"))
    fast, slow = speeds_of(assumed)
    assert fast / slow == pytest.approx(5 / 3) and "50 to 30 %" in render_scaling(assumed, Cluster(8), "none", replicated=False)
    on_h200 = replace(assumed, devices=Devices(name="NVIDIA H200", memory=140 * 2**30))
    assert "of 140.0 GiB a GPU" in render_scaling(on_h200, Cluster(8), "auto", replicated=False)
    assert "memory" not in render_scaling(
        replace(measured, devices=Devices(name="CPU", memory=2**34)), Cluster(8), "auto", replicated=False
    )
    with pytest.raises(InputError, match="--tokens-per-second"):
        render_scaling(base, Cluster(8), "none", replicated=False)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gpus": 8}, "--gpus: say how a run would scale, with --plan"),
        ({"plan": True, "nodes": 2}, "--nodes: say how"),
        ({"plan": True, "network_gbps": 400.0}, "--network-gbps: say how"),
        ({"plan": True, "gpus": 9, "nodes": 2}, "--gpus 9 --nodes 2: give a multiple"),
    ],
)
def test_options_with_nothing_to_go_with_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        cluster_asked(argparse.Namespace(**{"plan": False, "gpus": None, "nodes": None, "network_gbps": None} | given))
