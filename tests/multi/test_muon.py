"""The parameters of Muon in two processes, with copies (DDP) and with shards (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from foundation.overrides import overridden
from pretrain.model.gradients import full_tensor
from pretrain.optimizer import muon
from pretrain.optimizer.muon import MatrixWeight, Muon
from tests.ranks import in_ranks

pytestmark = pytest.mark.multi

# Shapes and dimensions of the inputs: outputs first, a stacked Conv1D, and experts. Two ranks have
# shards of different sizes.
PARAMETERS = (((33, 16), -1, 1), *[((16, 34), -1, 1)] * 5, ((7, 48), -2, 3), ((3, 8, 6), -1, 2))
# A batch has one parameter, so two ranks share the five equal ones in rounds of 2, 2 and 1.
BATCH = 16 * 34
STEPS = 4


def train(
    to_ranks: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> tuple[list[Tensor], list[int]]:
    """Return the parameters and the momentum after some steps, over all shards."""
    generator = torch.Generator().manual_seed(0)
    hidden = [
        MatrixWeight(
            nn.Parameter(to_ranks(torch.randn(shape, generator=generator).to(dtype))), *stacking
        )
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
        with overridden(muon, BATCH=BATCH):
            optimizer.step(clip_coefficient=torch.tensor(0.5))
    states = [optimizer.state[parameter] for parameter in params]
    tensors = [*params, *(state["momentum"] for state in states)]
    # Gloo gathers no int16.
    tensors += [state["remainder"].int() for state in states if "remainder" in state]
    return [full_tensor(tensor.detach()) for tensor in tensors], optimizer.lost_counts.tolist()


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
