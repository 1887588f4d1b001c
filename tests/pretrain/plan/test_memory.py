"""The memory estimate agrees with peaks measured on H200s and with exact sizes."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import yaml
from transformers import PreTrainedModel

from foundation.units import GIB
from lab.speed.targets import devices_called, plan_on
from pretrain.model.configuration import load_config
from pretrain.model.huggingface import build_on_meta
from pretrain.optimizer.muon import find_matrix_weights
from pretrain.plan.memory import Devices
from pretrain.plan.plan import Training
from pretrain.settings.config import load_recipe
from tests.conftest import ROOT
from tests.pretrain.conftest import QUANTIZED, active_in
from tests.pretrain.plan.plan_recipe import (
    QWEN3,
    flops_of,
    on_meta,
    plan_of,
    qwen3,
    schedule_of,
)

EXACT = {"weights": "bf16_exact"}
SPEED = ROOT / "benchmarks/results/speed"
RUNS = json.loads((SPEED / "h200_qwen2_5.json").read_text())["runs"]
QWEN3_5 = json.loads((SPEED / "h200_qwen3_5.json").read_text())["shapes"]
LAYER = 50_331_648  # weights of one layer's linears
LAYER_OF_8B = 218_103_808  # the same of Llama-3.1-8B
TABLE = 151_936 * 2048  # weights of the embedding
PARAMETERS = 1_720_574_976  # of the model
ZERO = Devices(4, sharded=True, gathered_once=True)
FSDP2 = Devices(4, sharded=True)


fused = partial(plan_of, fused=True)


@cache
def model_of(name: str) -> PreTrainedModel:
    """Return a model of the benchmarks without storage."""
    values = yaml.safe_load((ROOT / f"benchmarks/{name}.yaml").read_text())
    return on_meta(values["model"]["config"])


HEAD = {"fp8_config": {"scope": "linear+head"}}
# Peaks of fused layers in benchmarks/results/speed/h200_*.json, with exact BF16 weights, and
# microbatches of 32,768 tokens, or 8,192 of large models.
FUSED = [
    ("qwen3_1_7b", Devices(), "bf16", {}, 73.997),
    ("qwen3_1_7b", Devices(), "delayed", {}, 74.875),
    ("qwen3_1_7b", Devices(), "current", {}, 74.873),
    ("qwen3_1_7b", Devices(), "current", HEAD, 77.261),
    ("qwen3_1_7b", Devices(4), "delayed", HEAD, 78.377),
    # Measured before gathered weights of layers were freed.
    ("qwen3_1_7b", ZERO, "delayed", HEAD, 67.3 - 2 * 28 * LAYER / GIB),
    ("llama_3_1_8b", ZERO, "delayed", {}, 118.148 - 2 * 32 * LAYER_OF_8B / GIB),
    ("llama_3_1_8b", ZERO, "delayed", HEAD, 120.1 - 2 * 32 * LAYER_OF_8B / GIB),
    ("qwen2_5_14b", FSDP2, "delayed", HEAD, 135.07),
]
# Peaks of compiled layers of Qwen3-1.7B.
COMPILED = [
    ("bf16", "bf16", "bf16", 77.0),
    ("bf16", "fp32", "fp32", 93.0),
    ("bf16", "bf16_exact", "fp32", 89.8),
    ("delayed", "bf16_exact", "bf16", 98.0),
    ("nvfp4", "bf16_exact", "bf16", 99.7),
    ("mxfp8", "bf16_exact", "bf16", 102.4),
]


@pytest.mark.parametrize(("model", "devices", "precision", "changes", "gib"), FUSED)
def test_estimates_of_fused_layers_match_measured_peaks(
    model: str, devices: Devices, precision: str, changes: dict[str, Any], gib: float
) -> None:
    packs, length = (8, 4096) if model == "qwen3_1_7b" else (1, 8192)
    data = {"packs": "p", "length": length}
    plan = fused(precision, devices, model=model_of(model), data=data, **EXACT, **changes)
    assert plan.needed_memory(packs) / GIB == pytest.approx(gib, rel=0.03)


@pytest.mark.parametrize(("precision", "weights", "gradients", "gib"), COMPILED)
def test_estimates_of_compiled_layers_match_measured_peaks(
    precision: str, weights: str, gradients: str, gib: float
) -> None:
    plan = plan_of(precision, weights=weights, optimizer={"gradients": gradients})
    assert plan.needed_memory(8) / GIB == pytest.approx(gib, rel=0.05)


@pytest.mark.parametrize("shape", ["Qwen3.5-0.8B", "Qwen3.5-4B"])
def test_estimates_of_layers_with_a_fused_mlp_match_measured_peaks(shape: str) -> None:
    recipe = yaml.safe_load(QWEN3_5[shape]["settings"]["recipe_text"])
    config = next(text for text in QWEN3_5[shape]["changed"] if text.startswith("model.config="))
    model = on_meta(json.loads(config.removeprefix("model.config=")))
    for way in QWEN3_5[shape]["ways"].values():
        if way["ours"]:
            changes = HEAD if "head" in way["name"] else {}
            data = {"packs": "p", "length": recipe["data"]["length"]}
            plan = fused(way["precision"], Devices(), model=model, data=data, **EXACT, **changes)
            assert plan.needed_memory(way["microbatch"]) / GIB == pytest.approx(
                way["memory_gib"], rel=0.05
            )


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_plan_of_a_run_has_the_memory_that_it_allocated(run: dict[str, Any]) -> None:
    # The command was recorded without quotation marks around the JSON text of the model.
    config, rest = re.search(r"model\.config=(\{.*?\})(.*)", run["command"]).groups()
    machine = ("data.", "run_dir=")  # paths of the machine
    settings = [text for text in shlex.split(rest) if not text.startswith(machine)]
    settings += [f"model.config={config}", "model.attention=varlen"]
    run_recipe = load_recipe(ROOT / "benchmarks/qwen2_5.yaml", settings)
    model = build_on_meta(load_config(run_recipe.model))
    engine = "transformer_engine" if run_recipe.precision in QUANTIZED else "torch"
    active = active_in(run_recipe.precision, engine, scope=run_recipe.fp8_config.scope)
    schedule = schedule_of(run_recipe, active)
    training = Training(run_recipe, schedule, flops_of(model), squared_length_per_token=1024.0)
    plan = plan_on(devices_called("H200"), training, model)
    planned = plan.needed_memory(run_recipe.batch.microbatch) / GIB
    assert planned == pytest.approx(run["memory_gib"], rel=0.01)


@pytest.mark.parametrize(
    ("weights", "kept_in", "size"),
    [("fp32", None, 4), ("bf16", None, 2), ("bf16_exact", "bf16", 2)],
)
def test_weights_moments_and_gradients_are_exact(
    weights: str, kept_in: str | None, size: int
) -> None:
    optimizer = {"moments": kept_in, "gradients": kept_in}
    parts = plan_of(weights=weights, optimizer=optimizer).memory_parts(1)
    sizes = (parts["parameters"], parts["optimizer moments"] // 2, parts["gradients"])
    assert sizes == (size * PARAMETERS,) * 3
    assert parts.get("remainder bits", 0) == (2 * PARAMETERS if weights == "bf16_exact" else 0)


@pytest.mark.parametrize(
    ("offload", "name", "on_device", "host_bytes"),
    [
        ("none", "NVIDIA H100", {"optimizer moments", "remainder bits"}, 0),
        ("moments", "NVIDIA H100", {"remainder bits"}, 8),
        ("state", "NVIDIA H100", set(), 10),
        ("state", "CPU", {"optimizer moments", "remainder bits"}, 0),
    ],
)
def test_offloaded_state_is_in_host_memory_and_not_on_the_device(
    offload: str, name: str, on_device: set[str], host_bytes: int
) -> None:
    for devices in (Devices(name=name), replace(ZERO, name=name)):
        with_state = plan_of("bf16", devices, **EXACT)
        offloaded = plan_of("bf16", devices, **EXACT, optimizer={"offload": offload})
        assert (
            offloaded.memory_parts(1).keys() & {"optimizer moments", "remainder bits"} == on_device
        )
        assert offloaded.host_memory == host_bytes * PARAMETERS // devices.shards
        assert with_state.needed_memory(1) - offloaded.needed_memory(1) == offloaded.host_memory


@pytest.mark.parametrize("shards", [1, 4])
def test_muon_keeps_one_moment_of_each_matrix_in_layers(shards: int) -> None:
    devices = Devices(shards, sharded=shards > 1)
    plan = plan_of("bf16", devices, optimizer={"name": "muon"})
    muon_weights = sum(item.parameter.numel() for item in find_matrix_weights(qwen3()))
    assert muon_weights == 28 * LAYER
    flops = replace(plan.flops, muon_weights=muon_weights)
    parts = replace(plan, flops=flops).memory_parts(1)
    assert parts["optimizer moments"] == 4 * (2 * PARAMETERS - 28 * LAYER) // shards
    # With more weights than activations, the largest peak is in the update.
    assert "activations" in parts
    large = replace(plan.flops, muon_weights=10**12)
    update = replace(plan, flops=large).memory_parts(1)
    assert "activations" not in update
    assert update["Muon's update"] == 2 * 10**12 // shards


def test_sharding_divides_weights_and_moments_and_adds_gathered_parts() -> None:
    layer = 50_336_128  # with norms
    replicated, zero, fsdp2, two_replicas = (
        plan_of("bf16", devices, weights="fp32").memory_parts(8)
        for devices in (Devices(4), ZERO, FSDP2, replace(FSDP2, replicas=2))
    )
    for parts in (zero, fsdp2):
        for name in ("parameters", "optimizer moments"):
            assert parts[name] == replicated[name] // 4
        assert parts["activations"] == replicated["activations"]
        assert "BF16 working copies" not in parts
    assert zero["gathered weights"] == 2 * PARAMETERS
    assert zero["gradients"] == 4 * PARAMETERS + PARAMETERS
    assert fsdp2["gathered weights"] == pytest.approx(2 * (3 * layer + TABLE), rel=1e-4)
    assert fsdp2["gradients"] == pytest.approx(4 * (layer + TABLE) + PARAMETERS, rel=1e-4)
    assert two_replicas["parameters"] == 4 * PARAMETERS // 2
    model = on_meta(QWEN3 | {"tie_word_embeddings": False})
    untied = plan_of("bf16", FSDP2, model=model, weights="fp32").memory_parts(8)
    assert untied["gradients"] == pytest.approx(4 * TABLE + PARAMETERS + TABLE, rel=1e-4)


def test_a_recomputed_layer_keeps_its_input_and_no_copies_of_weights() -> None:
    def parts(which: str | int) -> dict[str, int]:
        section = {"source": "m", "fused": "off", "gradient_checkpointing": which}
        return plan_of(fused=True, section=section).memory_parts(8)

    full, second, none = map(parts, ("full", 2, "none"))
    assert full["activations"] == 28 * 8 * 4096 * 2 * 2048
    assert none["BF16 working copies"] == 28 * full["BF16 working copies"] == 28 * 2 * LAYER
    # Layers after a recomputed layer have freed their activations when it is recomputed.
    assert "the loss" in second and second["activations"] > 14 * full["activations"] / 28


@pytest.mark.parametrize(("model_type", "tensors"), [("gemma2", 2), ("gpt_oss", 1)])
def test_caps_and_sinks_in_plain_torch_keep_scores_of_all_layers(
    model_type: str, tensors: int
) -> None:
    """A cap keeps the result of tanh and of softmax, and sinks keep that of softmax."""
    model = on_meta({**QWEN3, "model_type": model_type, "num_local_experts": 2})

    def kept(attention: str) -> int:
        return plan_of(model=model, fused=True, attention=attention).memory_parts(8)["activations"]

    scores = 4 * 8 * 16 * 4096**2
    assert kept("packed_sdpa") - kept("packed_fa4") == 28 * tensors * scores


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
    keep: dict, by_zero: int, by_fsdp2: int
) -> None:
    for devices, layers in ((ZERO, by_zero), (FSDP2, by_fsdp2)):
        parts = fused("delayed", devices, **EXACT, fp8_config=keep).memory_parts(1)
        assert parts["gathered weights"] == pytest.approx(2 * (TABLE + layers * LAYER), rel=1e-3)


def test_bf16_layers_are_counted_and_only_they_copy_fp32_weights() -> None:
    def layers(precision: str, **changes: Any) -> list[Any]:
        return fused(precision, Devices(), weights="fp32", **changes).layers[precision]

    low, bf16 = layers("delayed")[0], layers("bf16")[0]
    mixed = layers("delayed", fp8_config={"keep_bf16_layers": {"first": 1, "last": 2}})
    assert mixed == [bf16, *[low] * 25, bf16, bf16]
    assert (low.quantized_weights, low.unquantized_weights) == (2 * LAYER, 0)
    assert (bf16.quantized_weights, bf16.unquantized_weights) == (0, 2 * LAYER)


@pytest.mark.parametrize(
    ("precision", "layouts"),
    [("delayed", 1), ("current", 1), ("block", 2), ("mxfp8", 2), ("nvfp4", 2)],
)
def test_blackwell_keeps_one_layout_of_tensor_scaled_weights(precision: str, layouts: int) -> None:
    """Blackwell's GEMMs read operands in either layout. Block-scaled weights need two layouts."""
    hopper, blackwell = (
        fused(precision, Devices(capability=capability), **EXACT, **HEAD).memory_parts(1)
        for capability in ((9, 0), (10, 0))
    )
    assert blackwell["quantized weights"] == layouts * hopper["quantized weights"] // 2


# A layer's inputs and weights, quantized: 33 and 9 sixteenths of a value with the scale of a block.
@pytest.mark.parametrize(
    ("precision", "operands"), [("block", 12_288 * 33 // 32), ("nvfp4", 12_288 * 9 // 16)]
)
def test_operands_are_kept_in_the_bytes_of_their_format(precision: str, operands: int) -> None:
    """In FP8 with a scale per tensor, 6,144 values of a token are kept, and recomputed the rest."""
    everywhere = {"fp8_config": {"keep_bf16_layers": {"last": 0}}}
    kept = {}
    for name in ("delayed", precision):
        layers = fused(name, Devices(), **EXACT, **everywhere).layers[name]
        (kept[name],) = {layer.kept for layer in layers}
    assert kept[precision] - kept["delayed"] == operands - 6144
