"""Main gradients: exact sums over microbatches and over ranks, and the trajectories that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from packing.batch import StepBatches
from pretrain.model import gradients
from pretrain.model.gradients import (
    RankSums,
    attach_main_gradients,
    clear_main_gradients,
    gradient_of,
    was_reached,
)
from pretrain.model.huggingface import round_weights
from pretrain.model.packed import PackedLanguageModel, forward_backward
from pretrain.optimizer.adamw import (
    ExactAdamW,
    build_optimizer,
    clear_gradients,
    clip_coefficient,
    gradient_norm,
)
from pretrain.settings.recipe import OptimizerSettings
from tests.pretrain.optimizer.test_exact_adamw import master
from tests.pretrain.verify.small_runs import step_of
from tests.ranks import in_ranks

FP32, BF16 = torch.float32, torch.bfloat16
LENGTH = 16


class AddsToTheSum(torch.autograd.Function):
    """x w^T, whose backward adds the weight's gradient to its `main_grad`, in that dtype, and returns none."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.weight.main_grad.addmm_(
            gradient.t().to(ctx.weight.main_grad.dtype), ctx.x.to(ctx.weight.main_grad.dtype)
        )
        return gradient @ ctx.weight, None


class Small(nn.Module):
    """A table, a matrix, a norm and a head tied to the table: rows that are looked up often, a parameter that is used twice."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.norm = nn.Embedding(5, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 5, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.up(self.table(ids)))))


def microbatch(seed: int) -> Tensor:
    return torch.randint(5, (64,), generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, seed: int) -> None:
    scores = model(microbatch(seed))
    scores.backward(
        torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed)).to(scores.dtype)
    )


def sums(model: nn.Module) -> dict[str, Tensor]:
    return {name: gradient_of(parameter).clone() for name, parameter in model.named_parameters()}


# ── Sums ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=9),
    st.sampled_from([FP32, BF16]),
    st.sampled_from([FP32, BF16]),
)
def test_what_microbatches_deliver_is_summed_in_the_main_gradients_dtype_whatever_the_weights(
    seeds: list[int], weights: torch.dtype, main: torch.dtype
) -> None:
    model, plain = Small(tied=False).to(weights), Small(tied=False).to(weights)
    attach_main_gradients(model, main)
    expected = {
        name: torch.zeros(p.shape, dtype=main)
        for name, p in plain.named_parameters()
        if name != "table.weight"
    }
    for seed in seeds:
        backward(model, seed)
        plain.zero_grad()
        backward(plain, seed)
        # in FP32, rounded to the sum's dtype once a microbatch
        for name, total in expected.items():
            total.copy_(total.float() + plain.get_parameter(name).grad.float())
    found = sums(model)
    for name, total in expected.items():
        assert found[name].dtype == main and torch.equal(found[name], total), name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_a_bf16_table_that_come_again_and_a_tied_head_add_up_in_fp32(tied: bool) -> None:
    model, exact = Small(tied=tied).to(BF16), Small(tied=tied).to(BF16)
    attach_main_gradients(model, FP32)
    rows: list[Tensor] = []
    exact.table.register_forward_hook(
        lambda module, args, output: output.register_hook(rows.append) and None
    )
    if tied:
        exact.head.weight = nn.Parameter(exact.table.weight.detach().clone())
    backward(model, 3)
    backward(exact, 3)
    # Autograd's own BF16 gradient of each looked-up row, and their sum in double precision.
    expected = torch.zeros(5, 8, dtype=torch.float64).index_add_(0, microbatch(3), rows[0].double())
    if tied:
        expected += exact.head.weight.grad.double()
    torch.testing.assert_close(
        gradient_of(model.table.weight).double(), expected, rtol=1e-6, atol=1e-6
    )
    assert not torch.equal(
        gradient_of(model.table.weight), gradient_of(model.table.weight).to(BF16)
    )


def test_a_product_may_add_to_the_sum_itself_and_other_uses_of_the_weight_still_deliver() -> None:
    linear, x = nn.Linear(3, 2, bias=False), torch.randn(4, 3)
    attach_main_gradients(linear, FP32)
    for uses in (1, 2):
        y = AddsToTheSum.apply(x, linear.weight)
        (y if uses == 1 else y + linear(x)).sum().backward()
    torch.testing.assert_close(gradient_of(linear.weight), 3 * x.sum(0).expand(2, 3))
    assert linear.weight.grad is None


# ── Over ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

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


def branch(model: Branching, seed: int, take: str) -> None:
    model(microbatch(seed)[:16], take).square().sum().backward()


def step(
    rank: int, takes: tuple[str, str], main: torch.dtype
) -> tuple[tuple[dict[str, Any], list[str]], int]:
    """The sums of two microbatches of each rank, which parameters they reached, and how many exchanges began within backward."""
    model, gradients.BUCKET = Branching(), MOST  # in this process alone
    attach_main_gradients(model, main)
    sums, all_reduce, exchanged = RankSums(model.parameters()), dist.all_reduce, []

    def noted(values: Tensor, **options: object) -> dist.Work:
        assert values.dtype == FP32
        exchanged.append(values.numel())
        return all_reduce(values, **options)

    dist.all_reduce = noted
    for _ in range(2):  # the second step finds everything as the first did
        exchanged.clear()
        clear_main_gradients(model.parameters())
        branch(model, rank, takes[rank])
        with sums.starting_early():
            branch(model, rank + 2, takes[rank])
        early = len(exchanged)
        sums.finish()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    reached = [name for name, each in trained.items() if was_reached(each)]
    return ({name: gradient_of(each).tolist() for name, each in trained.items()}, reached), early


@pytest.mark.parametrize(
    ("takes", "main"),
    [
        (("left", "left"), FP32),
        (("left", "left"), BF16),
        (("left", "right"), FP32),
        (("both", "both"), FP32),
    ],
)
def test_ranks_have_the_sum_of_all_microbatches(takes: tuple[str, str], main: torch.dtype) -> None:
    """Also where they reach different parameters, and the first buckets wait on one rank for a branch that it does not take."""
    (first, early), (second, _) = in_ranks(step, takes, main)
    assert first == second and (early > 3 or takes != ("both", "both"))
    alone = Branching()
    attach_main_gradients(alone, FP32)
    for seed in range(4):
        branch(alone, seed, takes[seed % 2])
    sums, reached = first
    assert reached == [
        name for name, each in alone.named_parameters() if each.requires_grad and was_reached(each)
    ]
    for name, total in sums.items():
        expected = gradient_of(alone.get_parameter(name))
        error = (torch.tensor(total) - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error < (1e-6 if main == FP32 else 2**-7), name


# ── Trajectories ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def leave_ties(adamw: ExactAdamW, model: nn.Module) -> None:
    """Masters halfway between two BF16 numbers, one in 65,536, move on by a unit in their last place: a working copy of an FP32
    weight rounds them to even and a BF16 weight with a remainder up, which is no matter of gradients."""
    for parameter in model.parameters():
        bits = master(adamw, parameter).clone().view(torch.int32)
        adamw.set_master(parameter, (bits + ((bits & 0xFFFF) == 0x8000)).view(FP32))


def trajectory(
    model: PackedLanguageModel, steps: Sequence[StepBatches], accelerator: Accelerator, exact: bool
) -> list[Tensor]:
    """Losses, gradient norms and, at the end, FP32 masters; weights that are BF16 begin as FP32 weights do."""
    masters = round_weights(model.hf, BF16) if exact else {}
    settings = OptimizerSettings(learning_rate=1e-3)
    adamw = build_optimizer(model, settings, exact=exact)
    attach_main_gradients(model, FP32)
    for name, values in masters.items():
        adamw.set_master(model.hf.get_parameter(name), values)
    leave_ties(adamw, model)
    figures = []
    for step in steps:
        figures.append(forward_backward(model, step, accelerator))
        figures.append(norm := gradient_norm(model.parameters()))
        adamw.step(clip_coefficient=clip_coefficient(norm, settings.clip))
        clear_gradients(adamw, model)
        leave_ties(adamw, model)
    return [*figures, *(master(adamw, parameter) for parameter in model.parameters())]


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("microbatches", [1, 5])
def test_exact_bf16_weights_walk_the_trajectory_of_fp32_weights_bit_for_bit(
    kind: str,
    microbatches: int,
    accelerator: Accelerator,
    build_model: Callable,
    random_packs: Callable,
) -> None:
    moe = {
        "hidden_size": 16,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    moe |= {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
    changes = {"qwen3": {}, "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0}, "qwen3_moe": moe}[kind]
    fp32, exact = build_model(kind, cast_to=BF16, **changes), build_model(kind, **changes)
    for model in (fp32, exact):
        model.hf.get_output_embeddings().chunk = 16
    steps = [
        step_of(random_packs([[5, 11], [16]] * microbatches, LENGTH, seed), 2) for seed in range(4)
    ]
    walked = (
        trajectory(fp32.train(), steps, accelerator, False),
        trajectory(exact.train(), steps, accelerator, True),
    )
    assert {parameter.dtype for parameter in exact.parameters()} == {BF16}
    for ours, theirs in zip(*walked, strict=True):
        assert torch.equal(ours, theirs)
