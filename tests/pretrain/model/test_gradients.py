"""Main gradients are exact sums over microbatches and ranks, and weights follow exactly."""

from __future__ import annotations

from collections.abc import Sequence
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
from transformers.pytorch_utils import Conv1D

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
from pretrain.model.wrapping import casting_parameters
from pretrain.optimizer.adamw import (
    ExactAdamW,
    build_optimizer,
    clear_gradients,
    clip_coefficient,
    gradient_norm,
)
from pretrain.precision.emulation import BothWays, EmulatedGemm, Operand
from pretrain.precision.product import LowPrecisionLinear
from pretrain.settings.recipe import OptimizerSettings
from tests.pretrain.conftest import QUANTIZED, context_of, emulation_of, to_nearest
from tests.pretrain.optimizer.test_exact_adamw import master
from tests.pretrain.small_models import build_model, random_packs
from tests.pretrain.verify.small_runs import step_of
from tests.ranks import in_ranks

FP32, BF16 = torch.float32, torch.bfloat16
LENGTH = 16


class AddsToTheSum(torch.autograd.Function):
    """x w^T, whose backward adds the weight gradient to `main_grad` in that dtype."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.x = x
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        main = ctx.weight.main_grad
        main.addmm_(gradient.t().to(main.dtype), ctx.x.to(main.dtype))
        return gradient @ ctx.weight, None


class Small(nn.Module):
    """Model with an embedding whose rows are looked up often, and a head that may be tied to it."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 8)
        self.up = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.up(self.table(ids)))))


def microbatch(seed: int) -> Tensor:
    return torch.randint(5, (64,), generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, seed: int) -> None:
    scores = model(microbatch(seed))
    generator = torch.Generator().manual_seed(seed)
    scores.backward(torch.randn(scores.shape, generator=generator).to(scores.dtype))


def sums(model: nn.Module) -> dict[str, Tensor]:
    return {name: gradient_of(parameter).clone() for name, parameter in model.named_parameters()}


# ── Over microbatches ──


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=9),
    st.sampled_from([FP32, BF16]),
    st.sampled_from([FP32, BF16]),
)
def test_gradients_are_summed_in_the_dtype_of_the_main_gradient(
    seeds: list[int], weights: torch.dtype, main: torch.dtype
) -> None:
    model, plain = (Small(tied=False).to(weights) for _ in range(2))
    attach_main_gradients(model, main)
    expected = {name: torch.zeros(p.shape, dtype=main) for name, p in plain.named_parameters()}
    del expected["table.weight"]
    for seed in seeds:
        backward(model, seed)
        plain.zero_grad()
        backward(plain, seed)
        # The sum is computed in FP32 and rounded to its dtype once a microbatch.
        for name, total in expected.items():
            total.copy_(total.float() + plain.get_parameter(name).grad.float())
    main_gradients = sums(model)
    for name, total in expected.items():
        assert main_gradients[name].dtype == main
        assert torch.equal(main_gradients[name], total), name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_repeated_rows_of_a_bf16_table_are_summed_in_fp32(tied: bool) -> None:
    """The gradient of a tied head is added in FP32 too."""
    model, exact = (Small(tied=tied).to(BF16) for _ in range(2))
    attach_main_gradients(model, FP32)
    rows: list[Tensor] = []
    exact.table.register_forward_hook(
        lambda module, args, output: output.register_hook(rows.append) and None
    )
    if tied:
        exact.head.weight = nn.Parameter(exact.table.weight.detach().clone())
    backward(model, 3)
    backward(exact, 3)
    # Sum the BF16 gradients that autograd computes for all looked-up rows in double precision.
    expected = torch.zeros(5, 8, dtype=torch.float64).index_add_(0, microbatch(3), rows[0].double())
    if tied:
        expected += exact.head.weight.grad.double()
    gradient = gradient_of(model.table.weight)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(gradient, gradient.to(BF16))


def test_a_weight_may_have_uses_with_and_without_direct_sums() -> None:
    linear = nn.Linear(3, 2, bias=False)
    x = torch.randn(4, 3)
    attach_main_gradients(linear, FP32)
    for uses in (1, 2):
        y = AddsToTheSum.apply(x, linear.weight)
        (y if uses == 1 else y + linear(x)).sum().backward()
    torch.testing.assert_close(gradient_of(linear.weight), 3 * x.sum(0).expand(2, 3))
    assert linear.weight.grad is None
    linear.weight.grad = torch.ones(2, 3)  # as a failed backward leaves it
    clear_main_gradients([linear.weight])
    assert linear.weight.grad is None and not gradient_of(linear.weight).any()


def test_a_gradient_of_zeros_reaches_its_parameter() -> None:
    reached, other = nn.Linear(3, 2), nn.Linear(3, 2)
    attach_main_gradients(nn.ModuleList([reached, other]), FP32)
    (reached(torch.randn(4, 3)) * 0).sum().backward()
    assert was_reached(reached.weight) and not was_reached(other.weight)


# ── Over ranks ──

BUCKET = 40  # values; several matrices of the model have more


class Branching(nn.Module):
    """Model with a tied head, a frozen linear, and two linears that a batch may skip.

    Two of its products return no weight gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 8)
        self.up = nn.Linear(8, 8)
        self.frozen, self.left, self.right = (nn.Linear(8, 8) for _ in range(3))
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
    """Train two steps with two microbatches on each rank.

    Return the sums over ranks and the names of the parameters that were reached in the second step,
    and the number of exchanges that started in backward.
    """
    model = Branching()
    gradients.BUCKET = BUCKET  # in this process alone
    attach_main_gradients(model, main)
    rank_sums = RankSums(model.parameters())
    original_all_reduce = dist.all_reduce
    exchanged = []

    def all_reduce(values: Tensor, **options: object) -> dist.Work:
        assert values.dtype == FP32
        exchanged.append(values.numel())
        return original_all_reduce(values, **options)

    dist.all_reduce = all_reduce
    for _ in range(2):  # the second step must not depend on the first
        exchanged.clear()
        clear_main_gradients(model.parameters())
        branch(model, rank, takes[rank])
        with rank_sums.starting_early():
            branch(model, rank + 2, takes[rank])
        early = len(exchanged)
        rank_sums.finish()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    reached = [name for name, parameter in trained.items() if was_reached(parameter)]
    return ({name: gradient_of(p).tolist() for name, p in trained.items()}, reached), early


@pytest.mark.parametrize(
    ("takes", "main"),
    [(("left", "left"), BF16), (("left", "right"), FP32), (("both", "both"), FP32)],
)
def test_ranks_have_the_sum_of_all_microbatches(takes: tuple[str, str], main: torch.dtype) -> None:
    """The ranks may reach different parameters.

    Then the first buckets wait on one rank for a branch that it does not take.
    """
    (first, early), (second, _) = in_ranks(step, takes, main)
    assert first == second
    assert early > 3 or takes != ("both", "both")
    alone = Branching()
    attach_main_gradients(alone, FP32)
    for seed in range(4):
        branch(alone, seed, takes[seed % 2])
    sums, reached = first
    trained = {name: p for name, p in alone.named_parameters() if p.requires_grad}
    assert reached == [name for name, parameter in trained.items() if was_reached(parameter)]
    for name, total in sums.items():
        expected = gradient_of(trained[name])
        error = (torch.tensor(total) - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error < (1e-6 if main == FP32 else 2**-7), name


# ── Trajectories ──


def leave_ties(adamw: ExactAdamW, model: nn.Module) -> None:
    """Add a unit in the last place to masters halfway between two BF16 numbers, one in 65,536.

    The working copy of an FP32 weight rounds such a master to even, and an exact BF16 weight rounds
    it up. This difference has nothing to do with gradients.
    """
    for parameter in model.parameters():
        bits = master(adamw, parameter).clone().view(torch.int32)
        adamw.set_master(parameter, (bits + ((bits & 0xFFFF) == 0x8000)).view(FP32))


def trajectory(
    model: PackedLanguageModel, steps: Sequence[StepBatches], accelerator: Accelerator, exact: bool
) -> list[Tensor]:
    """Return losses, gradient norms and the final FP32 masters.

    Exact BF16 weights start from the same values as FP32 weights.
    """
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
        norm = gradient_norm(model.parameters())
        figures.append(norm)
        adamw.step(clip_coefficient=clip_coefficient(norm, settings.clip))
        clear_gradients(adamw, model)
        leave_ties(adamw, model)
    return [*figures, *(master(adamw, parameter) for parameter in model.parameters())]


MOE = {"hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 2}
MOE |= {"num_attention_heads": 2, "num_key_value_heads": 1}
MOE |= {"num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "changes", "microbatches"),
    [("qwen3", {}, 5), ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}, 1), ("qwen3_moe", MOE, 5)],
)
def test_exact_bf16_weights_train_as_fp32_weights_bit_for_bit(
    kind: str, changes: dict[str, Any], microbatches: int, accelerator: Accelerator
) -> None:
    fp32 = build_model(kind, cast_to=BF16, **changes)
    exact = build_model(kind, **changes)
    for model in (fp32, exact):
        model.hf.get_output_embeddings().chunk = 16
    documents = [[5, 11], [16]] * microbatches
    steps = [step_of(random_packs(documents, LENGTH, seed), 2) for seed in range(4)]
    expected = trajectory(fp32.train(), steps, accelerator, False)
    figures = trajectory(exact.train(), steps, accelerator, True)
    assert {parameter.dtype for parameter in exact.parameters()} == {BF16}
    for actual, reference in zip(figures, expected, strict=True):
        assert torch.equal(actual, reference)


# ── Emulated weight gradients ──

TOKENS, IN, OUT, MICROBATCHES = 128, 128, 256, 8


@pytest.fixture
def wgrads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list that collects the weight gradients of the actual operands, in FP64."""
    exact: list[Tensor] = []
    original = EmulatedGemm.factors

    def record(gemm: EmulatedGemm, kind: str, *operands: BothWays) -> list[Operand]:
        left, right = original(gemm, kind, *operands)
        if kind == "wgrad":
            scale = 1.0 if left.scale is None else left.scale.double() * right.scale.double()
            exact.append(left.values.double() @ right.values.double().t() * scale)
        return [left, right]

    monkeypatch.setattr(EmulatedGemm, "factors", record)
    return exact


@pytest.mark.parametrize("precision", QUANTIZED)
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
# A square sum would accept a transposed product without an error.
@pytest.mark.parametrize("out", [OUT, IN])
def test_many_microbatches_add_up_to_one_sum_in_fp64(
    precision: str, weights: torch.dtype, kind: type[nn.Module], out: int, wgrads: list[Tensor]
) -> None:
    context = context_of(emulation_of(precision, **to_nearest(precision)))
    linear = (nn.Linear(IN, out, bias=False) if kind is nn.Linear else Conv1D(out, IN)).to(weights)
    low = LowPrecisionLinear(linear, "l", context)
    low.state.create_gemm(IN, out)
    layer = nn.Sequential(low)
    attach_main_gradients(layer, torch.float32)
    forward = (
        layer
        if weights == torch.bfloat16
        else casting_parameters(layer, layer.forward, torch.bfloat16)
    )
    torch.manual_seed(0)
    for index in range(MICROBATCHES):
        context.first_microbatch = index == 0
        with context.forward(training=True):
            y = forward(torch.randn(TOKENS, IN).bfloat16())
        y.backward(torch.randn_like(y) + 0.5)
    assert len(wgrads) == MICROBATCHES
    expected = torch.stack(wgrads).sum(0)
    total = linear.weight.main_grad if kind is nn.Linear else linear.weight.main_grad.t()
    # If every sum were rounded to BF16, the error would be 2e-3.
    assert (total.double() - expected).norm() < 1e-6 * expected.norm()
    assert linear.weight.grad is None
