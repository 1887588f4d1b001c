"""The optimizer's state in pinned host memory (`optimizer.offload`), streamed through the GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pretrain.checkpoint.checkpoint import checksums
from pretrain.model.gradients import local_part
from pretrain.optimizer.adamw import ExactAdamW, named_state
from pretrain.optimizer.offload import OFFLOADED, PIECE, SLOTS
from tests.golden.runs import tensors_of
from tests.gpu.conftest import cuda_only

pytestmark = cuda_only

HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# The first parameter has more pieces than there are slots, and the last piece is not complete.
SHAPES = ((SLOTS + 2, PIECE - 9), (33, 17), (17,), (1,))
COEFFICIENT = 0.37


def trained(
    offload: str, weights: torch.dtype, moments: torch.dtype | None, updates: int = 20
) -> tuple[list[Tensor], list[list[int]]]:
    """Return weights and state after some updates, and the counts of lost updates."""
    generator = torch.Generator("cuda").manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(shape, generator=generator, device="cuda").to(weights))
        for shape in SHAPES
    ]
    optimizer = ExactAdamW(parameters, **HYPER, moments=moments, offload=OFFLOADED[offload])
    optimizer.materialise()
    counts = []
    for step in range(updates):
        optimizer.param_groups[0]["lr"] = HYPER["lr"] * (1 - step / updates)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator, device="cuda")
            parameter.grad = gradient.to(weights)
        optimizer.step(clip_coefficient=torch.tensor(COEFFICIENT, device="cuda"))
        # Overwriting the gradients must not disturb an update that is still running.
        for parameter in parameters:
            parameter.grad.fill_(torch.nan)
        counts.append(optimizer.frozen_counts.tolist())
    state = [
        tensor
        for parameter in parameters
        for name, tensor in optimizer.state[parameter].items()
        if name != "step"
    ]
    for name in OFFLOADED[offload]:
        tensors = [optimizer.state[p][name] for p in parameters if name in optimizer.state[p]]
        assert all(tensor.is_pinned() and tensor.device.type == "cpu" for tensor in tensors)
    return [tensor.detach().cpu() for tensor in (*parameters, *state)], counts


@pytest.mark.parametrize("offload", ["moments", "state"])
@pytest.mark.parametrize(
    ("weights", "moments"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_twenty_updates_have_the_bits_of_the_state_on_the_gpu(
    offload: str, weights: torch.dtype, moments: torch.dtype | None
) -> None:
    tensors, counts = trained(offload, weights, moments)
    expected, expected_counts = trained("none", weights, moments)
    assert counts == expected_counts
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def test_offloading_lowers_the_peak_by_the_size_of_the_moments() -> None:
    values = 2**27
    peaks = {}
    for offload in ("none", "moments"):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        weight = nn.Parameter(torch.zeros(values, dtype=torch.bfloat16, device="cuda"))
        optimizer = ExactAdamW([weight], **HYPER, offload=OFFLOADED[offload])
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        peaks[offload] = torch.cuda.max_memory_allocated() - before
        del weight, optimizer
    slots = 2 * SLOTS * 4 * PIECE
    assert peaks["none"] - peaks["moments"] > 8 * values - slots - 2**22


def test_host_memory_is_unpinned_when_the_optimizer_is_freed() -> None:
    for _ in range(3):
        weight = nn.Parameter(torch.zeros(10_000, device="cuda"))
        optimizer = ExactAdamW([weight], **HYPER, offload=OFFLOADED["moments"])
        optimizer.materialise()
        values = optimizer.state[weight]["exp_avg"].detach()
        assert values.is_pinned()
        del weight, optimizer
        gc.collect()
        assert not values.is_pinned()


@pytest.fixture
def process_group() -> Iterator[None]:
    """Process group of this process alone."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_sharded_state_has_the_bits_of_the_state_on_the_gpu() -> None:
    outcomes = []
    for offload in ("none", "state"):
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
        assert {local_part(tensor).device.type for tensor in state.values()} == {
            "cuda" if offload == "none" else "cpu"
        }
        outcomes.append(checksums({**dict(model.named_parameters()), **state}))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) == 4 * 4


def test_a_run_has_the_same_bits_wherever_its_state_is_stored(
    train: Callable, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    """The third run resumes from a checkpoint of the second run, with the state on the GPU."""
    small_recipe["model"]["config"] |= {"hidden_size": 128, "head_dim": 64}
    recipe = small_recipe | {"weights": "bf16_exact", "deterministic": True}
    options = {"recipe": recipe, "launch": ["--config_file", "accelerate_configs/bf16.yaml"]}
    runs = {
        "on_gpu": ["optimizer.offload=none"],
        "on_host": ["optimizer.offload=state"],
        "resumed": [
            "optimizer.offload=none",
            "--resume",
            str(tmp_path / "on_host" / "checkpoints" / "step-00000004"),
        ],
    }
    outcomes = []
    for name, settings in runs.items():
        finished = train(f"run_dir={tmp_path / name}", *settings, **options)
        assert finished.status == 0, finished.output
        outcomes.append(tensors_of(tmp_path / name / "checkpoints" / "step-00000012"))
    for outcome in outcomes[1:]:
        assert outcome.keys() == outcomes[0].keys()
        assert all(torch.equal(tensor, outcome[name]) for name, tensor in outcomes[0].items())
