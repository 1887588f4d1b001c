"""Sums of main gradients over two real ranks: exact, begun while backward runs, in one order whatever a rank's batch reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pretrain.model import gradients
from pretrain.model.gradients import RankSums, attach_main_gradients, clear_main_gradients, gradient_of, was_reached
from tests.moments import fork_context
from tests.pretrain.model.adding_product import AddsToTheSum

FP32, BF16 = torch.float32, torch.bfloat16
MOST = 40  # values a bucket: several matrices of the model are more than one


class Branching(nn.Module):
    """A table tied to the head, a product that returns no gradient, a part that is frozen, and two that a batch may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.frozen = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def both(self, x: Tensor) -> Tensor:
        return self.left(self.right(x))

    def forward(self, ids: Tensor, take: str) -> Tensor:
        x = AddsToTheSum.apply(self.table(ids), self.up.weight) + self.up.bias
        x = checkpoint(getattr(self, take), self.frozen(x), use_reentrant=False)
        return AddsToTheSum.apply(x, self.table.weight)


def backward(model: nn.Module, rank: int, take: str) -> None:
    ids = torch.randint(5, (16,), generator=torch.Generator().manual_seed(rank))
    model(ids, take).square().sum().backward()


def in_ranks(function: Callable[..., Any], *arguments: object) -> list[Any]:
    """What `function(rank, *arguments)` returns in each of two processes that form a group."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with fork_context.Pool(2) as pool:
        return pool.starmap(_as_rank, [(function, rank, store.port, arguments) for rank in range(2)], chunksize=1)


def _as_rank(function: Callable[..., Any], rank: int, port: int, arguments: tuple[object, ...]) -> Any:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    result = function(rank, *arguments)
    dist.destroy_process_group()
    return result


def step(rank: int, takes: tuple[str, str], main: torch.dtype) -> dict[str, Any]:
    """Two microbatches of each rank, summed: the parameters' sums, and what was exchanged when."""
    model, gradients.BUCKET = Branching(), MOST  # in this process alone
    attach_main_gradients(model, main)
    sums = RankSums(model.parameters())
    exchanged, all_reduce, early = [], dist.all_reduce, 0

    def noted(tensor: Tensor, **options: object) -> dist.Work:
        exchanged.append((tensor.numel(), str(tensor.dtype)))
        return all_reduce(tensor, **options)

    dist.all_reduce = noted
    for _ in range(2):  # the second step finds everything as the first did
        exchanged.clear()
        clear_main_gradients(model.parameters())
        backward(model, rank, takes[rank])
        assert not exchanged, "only the last microbatch's backward begins to exchange"
        with sums.starting_early():
            backward(model, rank + 2, takes[rank])
        early = len(exchanged)
        sums.finish()
    found = {name: gradient_of(each).tolist() for name, each in model.named_parameters() if each.requires_grad}
    reached = sorted(name for name, each in model.named_parameters() if each.requires_grad and was_reached(each))
    return {"sums": found, "reached": reached, "exchanged": list(exchanged), "early": early}


@pytest.mark.parametrize("main", [FP32, BF16])
def test_ranks_have_the_sum_of_all_microbatches_and_exchange_it_in_fp32(main: torch.dtype) -> None:
    first, second = in_ranks(step, ("left", "left"), main)
    assert first["sums"] == second["sums"] and first["exchanged"] == second["exchanged"]
    assert len(first["exchanged"]) > 3 and {dtype for _, dtype in first["exchanged"]} == {"torch.float32"}
    alone = Branching()
    attach_main_gradients(alone, FP32)
    for seed in range(4):
        backward(alone, seed, "left")
    for name, total in first["sums"].items():
        expected = gradient_of(alone.get_parameter(name))
        error = (torch.tensor(total) - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error < (1e-6 if main == FP32 else 2**-7), name
    assert first["reached"] == sorted({"table.weight", "up.weight", "up.bias", "left.weight", "left.bias"})


def test_ranks_that_reach_different_parameters_exchange_the_same_in_the_same_order() -> None:
    """The first buckets wait on one rank for a branch that it does not take; the other rank starts them at once. Where all are
    reached, the backward starts all: also those of products that return no gradient, and of a tied table."""
    first, second = in_ranks(step, ("left", "right"), FP32)
    assert first["sums"] == second["sums"] and first["exchanged"] == second["exchanged"]
    assert first["early"] != second["early"], "they have not begun at the same time"
    assert {"left.weight", "right.weight"} <= set(first["reached"]) == set(second["reached"])
    first, second = in_ranks(step, ("both", "both"), FP32)
    assert first["early"] == second["early"] == len(first["exchanged"]) > 3
