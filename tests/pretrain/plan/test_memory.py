"""The memory estimate agrees with peaks measured on H200s and with exact sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml
from transformers import PreTrainedModel

from foundation.units import GIB
from pretrain.model.attention import Choice
from pretrain.optimizer.muon import hidden_parameters
from pretrain.plan.memory import Devices, LayerMemory, layers_of
from pretrain.plan.plan import Plan
from tests.conftest import ROOT
from tests.pretrain.conftest import QUANTIZED, active_in
from tests.pretrain.plan.plan_recipe import (
    QWEN3,
    compiled_layers,
    flops_of,
    on_meta,
    recipe,
    schedule_of,
)

EXACT = {"weights": "bf16_exact"}
HEAD = {"fp8_config": {"scope": "linear+head"}}
LAYER = 50_331_648  # weights of one layer's linears
LAYER_OF_8B = 218_103_808  # the same of Llama-3.1-8B
PARAMETERS = 1_720_574_976  # of the model


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedModel:
    return on_meta(QWEN3)


def plan(model: PreTrainedModel, precision: str, devices: Devices, **changes: Any) -> Plan:
    """Return the plan of compiled layers on a GPU with Transformer Engine."""
    active = active_in(
        precision,
        "transformer_engine" if precision in QUANTIZED else "torch",
        **changes.get("fp8_config", {}),
    )
    settings = recipe(**changes)
    schedule = schedule_of(settings, active)
    flops = flops_of(model)
    layers = compiled_layers(flops, schedule)
    return Plan(
        settings,
        schedule,
        flops,
        mean_squared=745.0,
        devices=devices,
        layers=layers,
        attention=Choice("packed_fa4", "requested"),
    )


def layers(
    model: PreTrainedModel, precision: str, devices: Devices, **changes: Any
) -> list[LayerMemory]:
    """Return the memory of fused layers."""
    request = plan(model, precision, devices, **changes)
    return layers_of(
        model,
        request.flops,
        request.recipe,
        request.schedule.at(1),
        devices,
        "packed_fa4",
    )


def fused(
    model: PreTrainedModel, packs: int, precision: str, devices: Devices, **changes: Any
) -> dict[str, int]:
    """Return the memory of fused layers with `packs` packs in a microbatch, in bytes by part."""
    model_layers = layers(model, precision, devices, **changes)
    assert all(layer.fused for layer in model_layers)
    return replace(
        plan(model, precision, devices, **changes), layers={precision: model_layers}
    ).memory(packs)


def compiled(
    model: PreTrainedModel,
    packs: int,
    precision: str = "bf16",
    devices: Devices | None = None,
    **changes: Any,
) -> dict:
    """Return the memory of compiled layers with `packs` packs in a microbatch, in bytes by part."""
    return plan(model, precision, devices or Devices(), **changes).memory(packs)


def gib_of(parts: dict[str, int]) -> float:
    return sum(parts.values()) / GIB


ZERO = Devices(4, sharded=True, gathered=True)
FSDP2 = Devices(4, sharded=True)


@pytest.mark.parametrize(
    ("devices", "precision", "scope", "gib"),
    [
        (Devices(), "bf16", "linear", 73.997),
        (Devices(), "delayed", "linear", 74.875),
        (Devices(), "current", "linear", 74.873),
        (Devices(), "current", "linear+head", 77.261),
        (Devices(4), "delayed", "linear+head", 78.377),
        # Measured before gathered weights of layers were freed.
        (ZERO, "delayed", "linear+head", 67.3 - 2 * 28 * LAYER / GIB),
    ],
)
def test_estimates_of_fused_layers_match_measured_peaks(
    devices: Devices, precision: str, scope: str, gib: float, qwen3: PreTrainedModel
) -> None:
    """Exact BF16 weights, 8 packs of 4,096 tokens in a microbatch.

    The peaks are from benchmarks/results/speed/h200_*.json.
    """
    assert gib_of(
        fused(qwen3, 8, precision, devices, **EXACT, fp8_config={"scope": scope})
    ) == pytest.approx(gib, rel=0.03)


@pytest.mark.parametrize(
    ("name", "scope", "devices", "gib"),
    [
        ("llama_3_1_8b", "linear", ZERO, 118.148 - 2 * 32 * LAYER_OF_8B / GIB),
        ("llama_3_1_8b", "linear+head", ZERO, 120.1 - 2 * 32 * LAYER_OF_8B / GIB),
        ("qwen2_5_14b", "linear+head", FSDP2, 135.07),
    ],
)
def test_estimates_of_large_sharded_models_match_measured_peaks(
    name: str, scope: str, devices: Devices, gib: float
) -> None:
    """Four H200s: weights are gathered once a step (zero.yaml) or for every use (fsdp2.yaml).

    The peaks were measured before gathered weights were freed. With zero.yaml, the weights of all
    layers are subtracted from them.
    """
    model = on_meta(
        yaml.safe_load((ROOT / f"benchmarks/{name}.yaml").read_text())["model"]["config"]
    )
    data = {"data": {"packs": "p", "length": 8192}, "fp8_config": {"scope": scope}}
    assert gib_of(fused(model, 1, "delayed", devices, **EXACT, **data)) == pytest.approx(
        gib, rel=0.03
    )


@pytest.mark.parametrize(
    ("precision", "weights", "gradients", "gib"),
    [
        ("bf16", "bf16", "bf16", 77.0),
        ("bf16", "fp32", "fp32", 93.0),
        ("bf16", "bf16_exact", "fp32", 89.8),
        ("delayed", "bf16_exact", "bf16", 98.0),
        ("nvfp4", "bf16_exact", "bf16", 99.7),
        ("mxfp8", "bf16_exact", "bf16", 102.4),
    ],
)
def test_estimates_of_compiled_layers_match_measured_peaks(
    precision: str, weights: str, gradients: str, gib: float, qwen3: PreTrainedModel
) -> None:
    assert gib_of(
        compiled(qwen3, 8, precision, weights=weights, optimizer={"gradients": gradients})
    ) == pytest.approx(gib, rel=0.05)


@pytest.mark.parametrize(
    ("weights", "moments", "gradients", "sizes"),
    [
        ("fp32", None, None, (4, 4, 4)),
        ("bf16", None, None, (2, 2, 2)),
        ("bf16_exact", "bf16", "bf16", (2, 2, 2)),
    ],
)
def test_weights_moments_and_gradients_are_exact(
    weights: str,
    moments: str | None,
    gradients: str | None,
    sizes: tuple[int, ...],
    qwen3: PreTrainedModel,
) -> None:
    parts = compiled(
        qwen3, 1, weights=weights, optimizer={"moments": moments, "gradients": gradients}
    )
    assert (parts["parameters"], parts["optimizer moments"] // 2, parts["gradients"]) == tuple(
        PARAMETERS * size for size in sizes
    )
    assert parts.get("remainder bits", 0) == (2 * PARAMETERS if weights == "bf16_exact" else 0)


@pytest.mark.parametrize(
    ("offload", "name", "devices_with_state", "host_bytes"),
    [
        ("none", "NVIDIA H100", {"optimizer moments", "remainder bits"}, 0),
        ("moments", "NVIDIA H100", {"remainder bits"}, 8),
        ("state", "NVIDIA H100", set(), 10),
        ("state", "CPU", {"optimizer moments", "remainder bits"}, 0),
    ],
)
def test_offloaded_state_is_in_host_memory_and_not_on_the_device(
    offload: str, name: str, devices_with_state: set[str], host_bytes: int, qwen3: PreTrainedModel
) -> None:
    for devices in (Devices(name=name), replace(ZERO, name=name)):
        with_state = plan(qwen3, "bf16", devices, **EXACT)
        offloaded = plan(qwen3, "bf16", devices, **EXACT, optimizer={"offload": offload})
        parts = offloaded.memory(1)
        assert parts.keys() & {"optimizer moments", "remainder bits"} == devices_with_state
        assert offloaded.host_memory == host_bytes * PARAMETERS // devices.shards
        assert with_state.takes(1) - offloaded.takes(1) == offloaded.host_memory


@pytest.mark.parametrize("shards", [1, 4])
def test_muon_keeps_one_moment_of_each_matrix_in_layers(
    qwen3: PreTrainedModel, shards: int
) -> None:
    request = plan(qwen3, "bf16", Devices(shards, sharded=shards > 1), optimizer={"name": "muon"})
    hidden_weights = sum(item.parameter.numel() for item in hidden_parameters(qwen3))
    assert hidden_weights == 28 * LAYER
    flops = replace(request.flops, hidden_weights=hidden_weights)
    moments = replace(request, flops=flops).memory(1)["optimizer moments"]
    assert moments == 4 * (2 * PARAMETERS - 28 * LAYER) // shards


def test_sharding_divides_weights_and_moments_and_adds_gathered_parts(
    qwen3: PreTrainedModel,
) -> None:
    # The final norm, which is too small to matter, is counted with the layers.
    layer = 50_336_128
    head = 151_936 * 2048
    replicated = compiled(qwen3, 8, devices=Devices(4), weights="fp32")
    zero = compiled(qwen3, 8, devices=ZERO, weights="fp32")
    fsdp2 = compiled(qwen3, 8, devices=FSDP2, weights="fp32")
    for shard in (zero, fsdp2):
        assert all(
            shard[name] == replicated[name] // 4 for name in ("parameters", "optimizer moments")
        )
        assert (
            shard["activations"] == replicated["activations"] and "BF16 working copies" not in shard
        )
    assert (zero["gathered weights"], zero["gradients"]) == (
        2 * PARAMETERS,
        4 * PARAMETERS + PARAMETERS,
    )
    assert fsdp2["gathered weights"] == pytest.approx(2 * (3 * layer + head), rel=1e-4)
    assert fsdp2["gradients"] == pytest.approx(4 * (layer + head) + PARAMETERS, rel=1e-4)
    two_replicas = compiled(qwen3, 1, devices=Devices(4, sharded=True, replicas=2), weights="fp32")
    assert two_replicas["parameters"] == 4 * PARAMETERS // 2


@pytest.mark.parametrize(
    ("keep", "by_zero", "by_fsdp2"),
    [
        ({}, 0, 0),
        ({"keep_bf16_layers": {"first": 1, "last": 2}}, 3, 3),
        ({"keep_bf16": ["o_proj"]}, 0, 0),
        # A quarter of each layer stays in BF16.
        ({"keep_bf16": ["down_proj"]}, 28, 3),
    ],
)
def test_layers_are_gathered_unless_they_keep_codes(
    keep: dict, by_zero: int, by_fsdp2: int, qwen3: PreTrainedModel
) -> None:
    table = 151_936 * 2048
    for devices, gathered_layers in ((ZERO, by_zero), (FSDP2, by_fsdp2)):
        gathered = fused(qwen3, 1, "delayed", devices, **EXACT, fp8_config=keep)["gathered weights"]
        assert gathered == pytest.approx(2 * (table + gathered_layers * LAYER), rel=1e-3)


def test_the_kept_bytes_of_a_token_follow_from_the_formats(qwen3: PreTrainedModel) -> None:
    """Kept values of a token in a layer, by format.

    Hidden states and queries have 2,048 values. Queries, keys and values have 4,096 together, gates
    and ups 12,288. A layer has 16 heads and two RMS norms.
    """
    shared = 2 * 2048 * 2 + 2 * 4096 + 2 * 2048 + 4 * 16 + 2 * 12_288 + 2 * 4
    operands = 3 * 2048  # Inputs of three products. The input of the fourth is recomputed.
    expected = {
        "bf16": shared + 2 * 2 * 2048,
        "delayed": shared + operands,
        "block": shared + (operands + 6144) * 33 // 32,
        "nvfp4": shared + (operands + 6144) * 9 // 16,
    }
    everywhere = {"keep_bf16_layers": {"last": 0}}
    for precision, kept in expected.items():
        assert {
            layer.kept
            for layer in layers(qwen3, precision, Devices(), **EXACT, fp8_config=everywhere)
        } == {kept}


def test_bf16_layers_are_counted_and_only_they_copy_fp32_weights(
    qwen3: PreTrainedModel,
) -> None:
    mixed = layers(
        qwen3,
        "delayed",
        Devices(),
        weights="fp32",
        fp8_config={"keep_bf16_layers": {"first": 1, "last": 2}},
    )
    low, bf16 = (
        layers(qwen3, precision, Devices(), weights="fp32")[0] for precision in ("delayed", "bf16")
    )
    assert mixed == [bf16, *[low] * 25, bf16, bf16]
    assert (low.quantized_weights, low.unquantized_weights) == (2 * LAYER, 0)
    assert (bf16.quantized_weights, bf16.unquantized_weights) == (0, 2 * LAYER)


@pytest.mark.parametrize(
    ("precision", "layouts"),
    [("delayed", 1), ("current", 1), ("block", 2), ("mxfp8", 2), ("nvfp4", 2)],
)
def test_blackwell_keeps_one_layout_of_tensor_scaled_weights(
    precision: str, layouts: int, qwen3: PreTrainedModel
) -> None:
    """Blackwell's GEMMs read operands in either layout. Block-scaled weights need two layouts."""
    hopper, blackwell = (
        fused(qwen3, 1, precision, Devices(capability=capability), **EXACT, **HEAD)[
            "quantized weights"
        ]
        for capability in ((9, 0), (10, 0))
    )
    assert blackwell == layouts * hopper // 2
