"""Compare trainings that must have the same bits.

`PAIRS` has trainings in this process: with CUDA graphs, recomputed layers, discarded steps, or the
optimizer's state in host memory, and without. `RUNS` has runs of the launcher.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Deterministic GEMMs need this variable. It is read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from packing.batch import StepBatches, build_microbatch
from pretrain.model import attention_backends
from pretrain.model.gradients import clear_main_gradients, gradient_of, local_part
from pretrain.model.graphs import MicrobatchGraphs
from pretrain.model.packed import compute_microbatch, forward_backward, inputs_of
from pretrain.optimizer import adamw
from pretrain.optimizer.adamw import ExactAdamW, named_state
from pretrain.optimizer.exact_weights import master_of, split
from pretrain.optimizer.muon import MatrixWeight, Muon
from pretrain.optimizer.offload import OFFLOADED, PIECE, SLOTS
from pretrain.precision import transformer_engine
from pretrain.settings.recipe import OptimizerSettings
from tests.conftest import write_packs
from tests.golden.runs import tensors_of
from tests.gpu.assembled import assemble, pack_of
from tests.gpu.conftest import needs
from tests.pretrain.conftest import ON_TE, on_a

PACKS = 4
# Steps that are observed in a run, and so have no graphs. The first ones fill the histories of
# delayed scaling.
OBSERVED = (0, 1, 2, 7)
SKIPPED = 9


def step_of(number: int, length: int) -> StepBatches:
    """Return four microbatches, whose numbers of documents are different."""
    draw = np.random.default_rng(number)
    microbatches = []
    for documents in draw.permutation([1, 4, 9, 15]):
        packs = [pack_of(documents, length, draw) for _ in range(PACKS)]
        microbatches.append(build_microbatch(packs, mask_boundaries=True, pin_memory=True))
    valid_tokens = sum(microbatch.valid_tokens for microbatch in microbatches)
    return StepBatches(microbatches, 4 * PACKS * length, valid_tokens, 0)


def requires(recipe: str, attention: str) -> None:
    """Skip the test if this machine cannot run fused layers, the precision or the attention."""
    needs(recipe)
    if missing := transformer_engine.unmet_need():
        pytest.skip(f"fused layers need {missing}")
    name = {"fa4": "flash_attn"}.get(attention, attention)
    case = attention_backends.Case("cuda", 64, torch.bfloat16)
    if obstacle := attention_backends.obstacle(name, case):
        pytest.skip(f"{name} {obstacle}")


def trained(
    kind: str,
    recipe: str,
    *,
    steps: int = 12,
    length: int = 256,
    attention: str = "varlen",
    updates: bool = True,
    graphs: bool = False,
    rehearsed: bool = False,
    poison: float = 0.0,
    **options: Any,
) -> dict[str, Tensor]:
    """Train a model, and return the loss and the tensors of each step.

    Args:
        kind: Architecture.
        recipe: Precision.
        steps: Number of steps.
        length: Tokens of a pack.
        attention: Attention implementation.
        updates: Whether weights are updated, except in one skipped step.
        graphs: Whether steps that are not observed use CUDA graphs.
        rehearsed: Whether the engines are reset after a step and after a forward alone, which is
            what a trial leaves that runs out of memory.
        poison: Factor of the gradients of a discarded step before step 1. 0: no such step.
        options: Options of `assemble`.
    """
    requires(recipe, attention)
    packed = assemble(kind, recipe, attention=f"packed_{attention}", **options)
    exact = packed.hf.dtype == torch.bfloat16
    optimizer = adamw.build_optimizer(packed, OptimizerSettings(learning_rate=1e-3), exact=exact)
    optimizer.materialise()
    captured = MicrobatchGraphs("on", pytest.fail)

    def poisoned(model: Any, accelerator: Any, batch: Any, scale: float, *sums: Any) -> Tensor:
        return compute_microbatch(model, accelerator, batch, scale * poison, *sums)

    results = {}
    with on_a("cuda") as accelerator:
        if rehearsed:
            forward_backward(packed, step_of(20, length), accelerator)
            packed(**inputs_of(step_of(21, length).microbatches[0], accelerator.device))
            packed.context.reset_engines()
            clear_main_gradients(packed.parameters())
        for number in range(steps):
            histories = packed.context.copied_state()
            if poison and number == 1:
                forward_backward(packed, step_of(22, length), accelerator, compute=poisoned)
                packed.context.go_back(histories)
                clear_main_gradients(packed.parameters())
            compute = captured.compute if graphs and number not in OBSERVED else compute_microbatch
            loss = forward_backward(packed, step_of(number, length), accelerator, compute=compute)
            assert loss.isfinite()
            values = {"loss": loss}
            for name, parameter in packed.hf.named_parameters():
                values[f"gradient of {name}"] = gradient_of(parameter)
            values["gradient norm"] = norm = adamw.gradient_norm(packed.parameters())
            results |= {f"step {number}: {name}": value.clone() for name, value in values.items()}
            if number == SKIPPED:
                packed.context.go_back(histories)
            elif updates:
                optimizer.step(clip_coefficient=adamw.clip_coefficient(norm, 1.0))
            clear_main_gradients(packed.parameters())
            values = {**packed.context.saved_state(), **dict(packed.hf.named_parameters())}
            results |= {
                f"step {number}: {name}": value.detach().clone() for name, value in values.items()
            }
    if graphs:
        assert len(captured.captured) > 2
        assert {key[1] for key in captured.captured} == {True, False}
    return results


# ── The optimizer's state in host memory ──

HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# The first parameter has more pieces than there are slots, and the last piece is not complete.
SHAPES = ((SLOTS + 2, PIECE - 9), (33, 17), (17,), (1,))


def updated(
    weights: torch.dtype, moments: torch.dtype | None, offload: str = "none"
) -> dict[str, Tensor]:
    """Return weights, state and the counts of lost updates after 20 updates."""
    generator = torch.Generator("cuda").manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(shape, generator=generator, device="cuda").to(weights))
        for shape in SHAPES
    ]
    optimizer = ExactAdamW(parameters, **HYPER, moments=moments, offload=OFFLOADED[offload])
    optimizer.materialise()
    results = {}
    for step in range(20):
        optimizer.param_groups[0]["lr"] = HYPER["lr"] * (1 - step / 20)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator, device="cuda")
            parameter.grad = gradient.to(weights)
        optimizer.step(clip_coefficient=torch.tensor(0.37, device="cuda"))
        # Overwriting the gradients must not disturb an update that is still running.
        for parameter in parameters:
            parameter.grad.fill_(torch.nan)
        results[f"lost {step}"] = optimizer.lost_counts.clone()
    torch.cuda.synchronize()
    for number, parameter in enumerate(parameters):
        results[f"{number}"] = parameter.detach()
        for name, tensor in optimizer.state[parameter].items():
            assert name not in OFFLOADED[offload] or tensor.is_pinned()
            if name != "step":
                results[f"{number} {name}"] = tensor.clone().cpu()
    return results


def sharded(offload: str = "none") -> dict[str, Tensor]:
    """Train FSDP2's shards in a process group of this process alone."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 7)).cuda().bfloat16()
        fully_shard(model)
        optimizer = ExactAdamW(model.parameters(), **HYPER, offload=OFFLOADED[offload])
        optimizer.materialise()
        for _ in range(5):
            model(torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = named_state(optimizer, model)
        assert all(isinstance(tensor, DTensor) for tensor in state.values())
        device = "cuda" if offload == "none" else "cpu"
        assert {local_part(tensor).device.type for tensor in state.values()} == {device}
        tensors = {**dict(model.named_parameters()), **state}
        assert len(tensors) == 4 * 4
        return {name: local_part(tensor).cpu() for name, tensor in tensors.items()}
    finally:
        dist.destroy_process_group()


# ── Muon's exact BF16 weights ──


def trained_by_muon(moments: torch.dtype, weights: torch.dtype) -> dict[str, Tensor]:
    """Return the FP32 masters after 20 steps. Gradients depend on the weights, rounded to BF16."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((256, 128), (128, 384), (256, 256), (256, 128))
    parameters = [
        nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to("cuda", weights))
        for shape in shapes
    ]
    group = {"params": parameters, "momentum": 0.95, "lr_ratio": 1.0, "adjust_lr_fn": "original"}
    updated_by_adamw = nn.Parameter(torch.zeros(1, device="cuda"))
    updated_by_adamw.grad = torch.ones(1, device="cuda")
    hidden = [MatrixWeight(parameter, inputs_dim=-1) for parameter in parameters]
    options = HYPER | {"lr": 1e-2, "moments": moments}
    optimizer = Muon([{"params": [updated_by_adamw]}, group], hidden, **options)
    for _ in range(20):
        for parameter in parameters:
            weight = parameter.detach()
            rounded = split(weight)[0] if weights == torch.float32 else weight
            noise = torch.randn(weight.shape, generator=generator).bfloat16().cuda()
            parameter.grad = (rounded.sin() + noise).to(weights)
        optimizer.step(clip_coefficient=torch.tensor(0.5, device="cuda"))
    return {
        f"{number}": master_of(parameter.detach(), optimizer.state[parameter].get("remainder"))
        for number, parameter in enumerate(parameters)
    }


# ── Pairs ──


class Pair(NamedTuple):
    """A training, and the change that must not change its bits.

    Attributes:
        train: Return the tensors that are compared, by name.
        options: Arguments of both trainings.
        change: Additional arguments of the second training.
        uncompared: Parts of the names of tensors that are not compared.
        deterministic: Whether deterministic algorithms are used.
    """

    train: Callable[..., dict[str, Tensor]]
    options: dict[str, Any]
    change: dict[str, Any]
    uncompared: tuple[str, ...] = ()
    deterministic: bool = True


SCOPED = {
    "bf16": {"recipe": "bf16"},
    "delayed": {"recipe": "delayed"},
    "delayed_head": {"recipe": "delayed", "scope": "linear+head"},
    "current": {"recipe": "current"},
    "block": {"recipe": "block"},
}
GRAPHS = {"graphs": True}
PAIRS = {
    f"graphs {kind} {precision}": Pair(
        trained, {"kind": kind, "fused": True, **SCOPED[precision]}, GRAPHS
    )
    for kind, precision in [*(("gpt2", precision) for precision in SCOPED), ("qwen3", "block")]
}
# Deterministic runs do not search algorithms. Without determinism, the gradients of embeddings sum
# tokens in no fixed order. Documents are so short that attention computes each of them in one
# block, whose sums have a fixed order.
PAIRS |= {
    f"graphs of searched algorithms {kind} {precision} {attention}": Pair(
        trained,
        {"kind": kind, "fused": True, "attention": attention, "length": 64, "updates": False}
        | SCOPED[precision],
        GRAPHS,
        uncompared=("wte", "wpe", "embed", "lm_head", "gradient norm"),
        deterministic=False,
    )
    for kind, precision in [("gpt2", "delayed_head"), ("qwen3", "bf16"), ("qwen3", "current")]
    for attention in ("varlen", "fa4", "cudnn", "triton")
}
PAIRS |= {
    f"recomputed {kind} {recipe} {'fused' if fused else 'unfused'}": Pair(
        trained, {"kind": kind, "recipe": recipe, "fused": fused, "steps": 3}, {"recompute": True}
    )
    for kind, recipe, fused in [
        *((kind, recipe, True) for kind in ("qwen3", "gpt2") for recipe in ("bf16", *ON_TE)),
        ("qwen2", "bf16", True),
        *(("qwen3", recipe, False) for recipe in ON_TE),
    ]
}
PAIRS["recomputed qwen3 bf16 fused fp32 weights"] = Pair(
    trained,
    {"kind": "qwen3", "recipe": "bf16", "fused": True, "weights": torch.float32, "steps": 3},
    {"recompute": True},
)
PAIRS |= {
    f"reset {recipe}": Pair(
        trained,
        {"kind": "qwen3", "recipe": recipe, "fused": False, "recompute": True, "steps": 3},
        {"rehearsed": True},
    )
    for recipe in ON_TE
}
PAIRS |= {
    f"discarded step times {poison}": Pair(
        trained,
        {"kind": "qwen3", "recipe": "delayed", "fused": False, "steps": 3},
        {"poison": poison},
    )
    for poison in (1e24, torch.inf)
}
PAIRS |= {
    f"offloaded {offload} {weights} {moments}": Pair(
        updated,
        {"weights": weights, "moments": moments},
        {"offload": offload},
        deterministic=False,
    )
    for offload in ("moments", "state")
    for weights, moments in [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16),
    ]
}
PAIRS |= {
    f"exact BF16 weights by Muon with {moments}": Pair(
        trained_by_muon,
        {"moments": moments, "weights": torch.float32},
        {"weights": torch.bfloat16},
        deterministic=False,
    )
    for moments in (torch.float32, torch.bfloat16)
}
PAIRS["offloaded shards"] = Pair(sharded, {}, {"offload": "state"}, deterministic=False)


@pytest.mark.parametrize("name", PAIRS)
def test_both_trainings_have_the_same_bits(name: str, request: pytest.FixtureRequest) -> None:
    """A failure names the first tensors that differ, and their relative errors."""
    pair = PAIRS[name]
    if pair.deterministic:
        request.getfixturevalue("deterministic")
    # One training ends before the other one begins, because Transformer Engine updates the
    # histories of all models together.
    expected = pair.train(**pair.options)
    actual = pair.train(**pair.options | pair.change)
    assert actual.keys() == expected.keys()
    different = {
        key: float((actual[key].double() - tensor.double()).norm() / tensor.double().norm())
        for key, tensor in expected.items()
        if not any(part in key for part in pair.uncompared) and not torch.equal(actual[key], tensor)
    }
    assert not different, f"{len(different)} of {len(expected)}: {[*different.items()][:12]}"


# ── Runs of the launcher ──

STEPS = 80
MIDDLE = STEPS // 2
# Documents of many blocks, four query heads per key head and four packs a microbatch: long sums
# whose order a nondeterministic backward would change.
LENGTH = 1024
QWEN3 = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LENGTH,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 128,
    "n_embd": 256,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LENGTH,
}
GPT2 |= {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}
# Metrics of a step that must be equal.
FIGURES = ("step", "loss", "gradient_norm", "learning_rate", "frozen_updates")
AUTO = r"on: .* GiB are available, and the activations of a second microbatch take .* .iB"

RESUMED: dict[str, tuple[str, ...]] = {"complete": (), "resumed": ()}


class Runs(NamedTuple):
    """Runs with the same bits.

    Attributes:
        settings: Overrides of all runs.
        variants: Overrides of each run. A run `resumed` resumes the run before from its middle.
        audit: Patterns that keys of each run's audit match.
        model: Config of the model.
        configuration: Accelerate configuration, for two GPUs unless it is `bf16`.
    """

    settings: tuple[str, ...]
    variants: dict[str, tuple[str, ...]] = RESUMED
    audit: tuple[dict[str, str], ...] = ({"fused": "2 of 2 layers"}, {})
    model: dict[str, Any] = QWEN3
    configuration: str = "bf16"


HEAD = ("precision=delayed", "fp8_config.scope=linear+head")
RUNS = {
    f"{attention} {' '.join(precision)}": Runs((*precision, f"model.attention={attention}"))
    for attention, precision in [
        ("flash_attn", ("precision=bf16",)),
        ("flash_attn", ("precision=block",)),
        *((attention, HEAD) for attention in ("flash_attn", "varlen", "triton")),
    ]
}
RUNS |= {
    "compiled layers with dropout": Runs(
        ("model.fused=off",), audit=({"compiled": "each layer"}, {}), model=GPT2
    ),
    "graphs": Runs(
        HEAD,
        {
            "plain": ("model.cuda_graphs=off",),
            "graphs": ("model.cuda_graphs=on",),
            "resumed": ("model.cuda_graphs=auto",),
        },
        (
            {"cuda_graphs": "off: the recipe turns them off"},
            {"cuda_graphs": "on$"},
            {"cuda_graphs": AUTO},
        ),
    ),
    "offload": Runs(
        (),
        {
            "on GPU": ("optimizer.offload=none",),
            "on host": ("optimizer.offload=state",),
            "resumed": ("optimizer.offload=none",),
        },
        ({}, {}, {}),
    ),
}
RUNS |= {
    # The resumed run begins at the switch.
    f"{before} to {after}": Runs(
        (f"precision=[{{until: 0.5, use: {before}}}, {{use: {after}}}]", *settings),
        {"plain": ("model.cuda_graphs=off",), "graphs": (), "resumed": ()},
        ({}, {"cuda_graphs": AUTO}, {}),
    )
    for before, after, settings in [
        ("delayed", "bf16", ()),
        ("bf16", "delayed", ("fp8_config.keep_bf16=[down_proj]",)),
        ("current", "delayed", ()),
    ]
}
RUNS |= {
    # Each rank has four microbatches in a step. With ZeRO-2, two of them run as graphs.
    f"graphs under {configuration}": Runs(
        ("precision=delayed", "batch.microbatch=1"),
        {"off": ("model.cuda_graphs=off",), "on": ("model.cuda_graphs=on",)},
        ({"cuda_graphs": "off"}, {"cuda_graphs": "on"}),
        configuration=configuration,
    )
    for configuration in ("ddp", "zero")
}


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(tmp_path_factory.mktemp("packs") / "long", LENGTH)


@pytest.mark.parametrize("name", RUNS)
def test_runs_of_the_launcher_have_the_same_bits(
    name: str,
    train: Callable[..., Any],
    low_precision_recipe: dict[str, Any],
    packs: Path,
    tmp_path: Path,
) -> None:
    """Losses and norms are equal. With one GPU, so are the tensors of the last checkpoints."""
    runs = RUNS[name]
    for precision in re.findall("delayed|block|current", " ".join(runs.settings)):
        needs(precision)
    attention = re.findall("model.attention=(.*)", "\n".join(runs.settings))
    requires("bf16", *(attention or ["varlen"]))
    launch = ["--config_file", f"accelerate_configs/{runs.configuration}.yaml"]
    if runs.configuration != "bf16":
        launch += ["--num_processes", "2"]
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
    recipe = low_precision_recipe | {
        "model": {"config": low_precision_recipe["model"]["config"] | runs.model},
        "data": {"packs": str(packs), "length": LENGTH},
        "batch": {"tokens": 8 * LENGTH, "microbatch": 4},
        "train": {"steps": STEPS},
        "evaluate": {"every": 30},
        "checkpoint": {"every": MIDDLE, "keep": 3},
        "log": {"fp8_statistics": None},
        "precision": "bf16",
        "weights": "bf16_exact",
        "deterministic": True,
    }
    if runs.model is GPT2:
        recipe["model"] = {"config": GPT2}
    earlier: list[Path] = []
    for (variant, settings), expected in zip(runs.variants.items(), runs.audit, strict=True):
        run_dir = tmp_path / variant.replace(" ", "_")
        options = [f"run_dir={run_dir}", *runs.settings, *settings]
        if variant == "resumed":
            middle = earlier[-1] / "checkpoints" / f"step-{MIDDLE:08d}"
            options += ["--resume", str(middle)]
        finished = train(*options, recipe=recipe, launch=launch)
        assert finished.status == 0, finished.output
        audit = finished.audit()
        assert audit["deterministic"] == "yes"
        for key, pattern in expected.items():
            assert re.match(pattern, audit[key]), audit[key]
        earlier.append(run_dir)
        compare(earlier[0], run_dir)
        if runs.configuration == "bf16":
            compare_checkpoints(earlier[0], run_dir)


def figures_of(run_dir: Path) -> list[list[Any]]:
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [[record.get(key) for key in FIGURES] for record in records if "loss" in record]


def compare(first: Path, other: Path) -> None:
    expected, figures = figures_of(first), figures_of(other)
    assert len(expected) == STEPS and len(figures) >= STEPS - MIDDLE
    assert figures == expected[-len(figures) :]
    assert expected[0][1] > 1.2 * expected[-1][1], "the loss did not fall"


def compare_checkpoints(first: Path, other: Path) -> None:
    tensors, others = (
        tensors_of(run_dir / "checkpoints" / f"step-{STEPS:08d}") for run_dir in (first, other)
    )
    assert tensors and tensors.keys() == others.keys()
    assert not [name for name, tensor in tensors.items() if not torch.equal(others[name], tensor)]
