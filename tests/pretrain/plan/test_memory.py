"""The memory estimate against peaks that were measured on H200s, and against shapes where these decide it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml
from transformers import PreTrainedModel

from foundation.units import GIB
from pretrain.plan.memory import Devices, LayerMemory, layers_of
from pretrain.plan.plan import Plan
from tests.conftest import ROOT
from tests.pretrain.conftest import QUANTIZED, active_in
from tests.pretrain.plan.plan_recipe import QWEN3, flops_of, on_meta, recipe, schedule_of

EXACT = {"weights": "bf16_exact"}
HEAD = {"fp8_config": {"scope": "linear+head"}}
LAYER = 50_331_648  # weights of a layer's linears
EVERY = 1_720_574_976


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedModel:
    return on_meta(QWEN3)


def plan(of: PreTrainedModel, precision: str, devices: Devices, **changes: Any) -> Plan:
    """Of compiled layers, on a GPU with Transformer Engine."""
    active = active_in(
        precision,
        "transformer_engine" if precision in QUANTIZED else "torch",
        **changes.get("fp8_config", {}),
    )
    wanted = recipe(**changes)
    schedule = schedule_of(wanted, active)
    return Plan(wanted, schedule, devices, flops_of(of), mean_squared=745.0)


def layers(
    model: PreTrainedModel, precision: str, devices: Devices, **changes: Any
) -> list[LayerMemory]:
    """Of layers that are fused."""
    asked = plan(model, precision, devices, **changes)
    return layers_of(
        model,
        asked.flops,
        asked.recipe,
        asked.schedule.at(1),
        "cuda",
        "packed_fa4",
        devices.capability,
    )


def fused(
    of: PreTrainedModel, packs: int, precision: str, devices: Devices, **changes: Any
) -> dict[str, int]:
    kept = layers(of, precision, devices, **changes)
    assert all(layer.fused for layer in kept)
    return replace(plan(of, precision, devices, **changes), layers={precision: kept}).memory(packs)


def compiled(
    of: PreTrainedModel,
    packs: int,
    precision: str = "bf16",
    devices: Devices | None = None,
    **changes: Any,
) -> dict:
    return plan(of, precision, devices or Devices(), **changes).memory(packs)


def gib_of(parts: dict[str, int]) -> float:
    return sum(parts.values()) / GIB


ZERO, FSDP2 = Devices(4, sharded=True, gathered=True), Devices(4, sharded=True)


@pytest.mark.parametrize(
    ("devices", "precision", "scope", "gib"),
    [
        (Devices(), "bf16", "linear", 73.997),
        (Devices(), "delayed", "linear", 74.875),
        (Devices(), "current", "linear", 74.873),
        (Devices(), "current", "linear+head", 77.261),
        (Devices(4), "delayed", "linear+head", 78.377),
        (ZERO, "delayed", "linear+head", 67.3),
    ],
)
def test_peaks_of_fused_layers_are_met(
    devices: Devices, precision: str, scope: str, gib: float, qwen3: PreTrainedModel
) -> None:
    """Of exact BF16 weights, 8 packs of 4,096 at once: benchmarks/results/speed/h200_*.json."""
    assert gib_of(
        fused(qwen3, 8, precision, devices, **EXACT, fp8_config={"scope": scope})
    ) == pytest.approx(gib, rel=0.03)


@pytest.mark.parametrize(
    ("name", "scope", "devices", "gib"),
    [
        ("llama_3_1_8b", "linear", ZERO, 118.148),
        ("llama_3_1_8b", "linear+head", ZERO, 120.1),
        ("qwen2_5_14b", "linear+head", FSDP2, 135.07),
    ],
)
def test_peaks_of_large_models_in_shards_are_met(
    name: str, scope: str, devices: Devices, gib: float
) -> None:
    """On four H200s: gathered once a step (zero.yaml), and for each use (fsdp2.yaml)."""
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
def test_peaks_of_compiled_layers_are_met(
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
        EVERY * size for size in sizes
    )
    assert parts.get("remainder bits", 0) == (2 * EVERY if weights == "bf16_exact" else 0)


def test_sharding_spreads_weights_and_moments_and_counts_what_is_gathered_and_summed_whole(
    qwen3: PreTrainedModel,
) -> None:
    # the final norm, too small to matter, is among the layers
    layer, head = 50_336_128, 151_936 * 2048
    whole = compiled(qwen3, 8, devices=Devices(4), weights="fp32")
    once, each = (compiled(qwen3, 8, devices=devices, weights="fp32") for devices in (ZERO, FSDP2))
    for shard in (once, each):
        assert all(shard[name] == whole[name] // 4 for name in ("parameters", "optimizer moments"))
        assert shard["activations"] == whole["activations"] and "BF16 working copies" not in shard
    assert (once["gathered weights"], once["gradients"]) == (2 * EVERY, 4 * EVERY + EVERY)
    assert each["gathered weights"] == pytest.approx(2 * (3 * layer + head), rel=1e-4)
    assert each["gradients"] == pytest.approx(4 * (layer + head) + EVERY, rel=1e-4)
    two_replicas = compiled(qwen3, 1, devices=Devices(4, sharded=True, replicas=2), weights="fp32")
    assert two_replicas["parameters"] == 4 * EVERY // 2


def test_layers_keep_what_their_formats_take(qwen3: PreTrainedModel) -> None:
    """Hidden and queries 2,048 wide, 4,096 queries, keys and values, 12,288 gates and ups, 16 heads, two RMS norms."""
    shared = 2 * 2048 * 2 + 2 * 4096 + 2 * 2048 + 4 * 16 + 2 * 12_288 + 2 * 4
    operands = 3 * 2048  # of three products; the fourth's is made again
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


def test_layers_that_stay_in_bf16_are_counted_so_and_fp32_weights_are_copied_for_them_alone(
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
def test_a_blackwell_holds_one_layout_of_what_has_one_scale(
    precision: str, layouts: int, qwen3: PreTrainedModel
) -> None:
    """Its products read operands as they lie, in layers and in the head. With scales of blocks there are two layouts."""
    hopper, blackwell = (
        fused(qwen3, 1, precision, Devices(capability=capability), **EXACT, **HEAD)[
            "quantized weights"
        ]
        for capability in ((9, 0), (10, 0))
    )
    assert blackwell == layouts * hopper // 2
