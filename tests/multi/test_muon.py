"""Muon in two processes, with copies of the parameters (DDP) and with shards (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pretrain.model.gradients import gathered
from pretrain.optimizer.muon import Hidden, Muon
from tests.conftest import Finished
from tests.multi.test_processes import copy_of_step_4, figures
from tests.ranks import in_ranks

pytestmark = pytest.mark.multi

# Shapes and dimensions of the inputs: outputs first, a stacked Conv1D, and experts. Two ranks have
# shards of different sizes.
PARAMETERS = (((33, 16), 1, 1), ((16, 34), 1, 1), ((7, 48), 0, 3), ((3, 8, 6), 2, 2))
STEPS = 4


def train(
    to_ranks: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> tuple[list[Tensor], list[int]]:
    """Return the parameters and the momentum after some steps, over all shards."""
    generator = torch.Generator().manual_seed(0)
    hidden = [
        Hidden(nn.Parameter(to_ranks(torch.randn(shape, generator=generator).to(dtype))), *stacking)
        for shape, *stacking in PARAMETERS
    ]
    params = [item.parameter for item in hidden]
    group = {"params": params, "lr_ratio": 1.0, "adjust_lr_fn": "original", "momentum": 0.95}
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = Muon([{"params": [nn.Parameter(torch.zeros(1))]}, group], hidden, **options)
    for _ in range(STEPS):
        for parameter in params:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = to_ranks(gradient.to(dtype))
        optimizer.step(clip_coefficient=torch.tensor(0.5))
    states = [optimizer.state[parameter] for parameter in params]
    tensors = [*params, *(state["momentum"] for state in states)]
    # Gloo gathers no int16.
    tensors += [state["remainder"].int() for state in states if "remainder" in state]
    return [gathered(tensor.detach()) for tensor in tensors], optimizer.frozen_counts.tolist()


def train_as_rank(rank: int, sharded: bool, dtype: torch.dtype) -> tuple[list[Tensor], list[int]]:
    if not sharded:
        return train(lambda tensor: tensor, dtype)
    mesh = init_device_mesh("cpu", (2,))
    return train(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_have_the_parameters_and_momentum_of_one(
    sharded: bool, dtype: torch.dtype
) -> None:
    expected, (_, count) = train(lambda tensor: tensor, dtype)
    results = in_ranks(train_as_rank, sharded, dtype)
    for tensors, _ in results:
        assert all(map(torch.equal, tensors, expected))
    counts = [result[1][1] for result in results]
    assert sum(counts) == (1 if sharded else 2) * count


@pytest.fixture(scope="module")
def start(
    start_here: Callable, start_as_ranks: Callable, recipe_for: Callable, tmp_path_factory: Any
) -> Callable[..., Finished]:
    """Function that trains 8 steps with Muon, in one process or as `topology` launches them.

    The update is checked in every second step.
    """
    folder = tmp_path_factory.mktemp("muon")

    def started(name: str, *settings: str, topology: str | None = None) -> Finished:
        recipe = recipe_for(folder / name) | {"train": {"steps": 8}}
        recipe["model"]["config"]["num_hidden_layers"] = 2
        recipe["optimizer"] = {"name": "muon", "learning_rate": 0.01}
        arguments = (recipe, folder, "log.fp8_statistics=2", *settings)
        if topology is None:
            finished = start_here(*arguments)
        else:
            launch = f"--config_file accelerate_configs/{topology}.yaml --mixed_precision no"
            finished = start_as_ranks(*arguments, launch=launch.split())
        assert finished.status == 0, finished.output
        return finished

    return started


@pytest.fixture(scope="module")
def one(start: Callable[..., Finished]) -> Finished:
    return start("one")


@pytest.mark.parametrize("topology", ["ddp", "zero", "fsdp2"])
def test_two_processes_train_as_one(
    topology: str, one: Finished, start: Callable[..., Finished]
) -> None:
    two = start(topology, topology=topology)
    # Gradients that are summed in another order differ by 1e-7, and then by a bit of BF16.
    for key, tolerance in {"loss": 1e-4, "held_out_loss": 1e-4, "muon_update_rms": 1e-2}.items():
        assert figures(two, key) == pytest.approx(figures(one, key), rel=tolerance), key


def test_shards_that_keep_codes_train_as_one_process(start: Callable[..., Finished]) -> None:
    low = ("precision=current", "weights=bf16_exact", "fp8_config.on_unsupported=emulate")
    settings = (*low, "train.steps=4")
    one = start("one_low", *settings)
    two = start("fsdp2_low", *settings, topology="fsdp2")
    assert figures(two, "loss") == pytest.approx(figures(one, "loss"), rel=1e-3)


@pytest.mark.parametrize("topology", [None, "fsdp2"])
def test_resumed_runs_have_the_same_bits(
    topology: str | None, start: Callable[..., Finished], tmp_path: Path
) -> None:
    settings = ("precision=bf16", "weights=bf16_exact", "optimizer.moments=bf16")
    name = f"exact_{topology}"
    run = start(name, *settings, topology=topology)
    moved = copy_of_step_4(run.run_dir, tmp_path / "resumed")
    resumed = start(name, *settings, moved, topology=topology)
    assert resumed.losses() == run.losses(), resumed.output
    assert "the recipe has changed" not in resumed.output
    for file in (run.run_dir / "final").glob("*.safetensors"):
        assert (resumed.run_dir / "final" / file.name).read_bytes() == file.read_bytes()
