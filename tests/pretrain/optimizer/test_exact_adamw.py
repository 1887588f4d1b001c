"""ExactAdamW against torch's AdamW, its three weight modes against each other, and what it counts as frozen."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from pretrain.model.gradients import attach_main_gradients
from pretrain.optimizer.adamw import (
    IN_CACHE,
    ExactAdamW,
    build_optimizer,
    clip_coefficient,
    gradient_norm,
)
from pretrain.optimizer.exact_weights import master_of, split
from pretrain.settings.recipe import OptimizerSettings

SHAPES = ((33, 17), (17,), (5, 3, 2))
HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters(dtype: torch.dtype = torch.float32, *more: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype))
        for shape in (*SHAPES, *more)
    ]


def loss_gradients(weights: list[Tensor], step: int) -> list[Tensor]:
    """Gradients at BF16 `weights` of a noisy bowl, computed in BF16: they depend on every bit of the weights."""
    generator = torch.Generator().manual_seed(step)
    return [
        weight.sin() + torch.randn(weight.shape, generator=generator).bfloat16()
        for weight in weights
    ]


def give(parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype)


def master(optimizer: ExactAdamW, parameter: Tensor) -> Tensor:
    return master_of(parameter.detach(), optimizer.state[parameter].get("remainder"))


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ── The update ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_fp32_and_exact_bf16_follow_torchs_adamw_on_fp32_masters_bit_for_bit_over_1000_steps() -> (
    None
):
    masters, fp32, bf16 = parameters(), parameters(), parameters(torch.bfloat16)
    reference = torch.optim.AdamW(masters, **HYPER, foreach=False, fused=False)
    plain, exact = ExactAdamW(fp32, **HYPER), ExactAdamW(bf16, **HYPER)
    for step in range(1000):
        working_copies = [split(master.detach())[0] for master in masters]
        give(masters, loss_gradients(working_copies, step))
        give(fp32, loss_gradients([split(p.detach())[0] for p in fp32], step))
        give(bf16, loss_gradients([p.detach() for p in bf16], step))
        for optimizer in (reference, plain, exact):
            optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / 1000)
            optimizer.step()
        if step % 100 == 99:
            assert equal(fp32, masters)
            assert equal([master(exact, p) for p in bf16], masters)
    for moment in ("exp_avg", "exp_avg_sq"):
        theirs = [reference.state[p][moment] for p in masters]
        assert equal([plain.state[p][moment] for p in fp32], theirs)
        assert equal([exact.state[p][moment] for p in bf16], theirs)


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_main_gradients_of_any_dtype_are_clipped_in_fp32_and_stay_as_they_are(
    weights: torch.dtype, gradients: torch.dtype
) -> None:
    ours, masters = nn.ParameterList(parameters(weights)), parameters()
    attach_main_gradients(ours, gradients)
    optimizers, coefficient = (
        (ExactAdamW(ours, **HYPER), torch.optim.AdamW(masters, **HYPER, foreach=False)),
        torch.tensor(0.3),
    )
    for step in range(5):
        for parameter, of_fp32 in zip(ours, masters, strict=True):
            drawn = torch.randn(of_fp32.shape, generator=torch.Generator().manual_seed(step))
            parameter.main_grad.copy_(drawn)
            of_fp32.grad = drawn.to(gradients).float() * coefficient
        optimizers[0].step(clip_coefficient=coefficient)
        optimizers[1].step()
        assert all(
            torch.equal(p.main_grad.float() * coefficient, m.grad)
            for p, m in zip(ours, masters, strict=True)
        )
    assert equal([master(optimizers[0], parameter) for parameter in ours], masters)


def test_plain_bf16_computes_in_fp32_and_rounds_once_as_torchs_fused_adamw_does() -> None:
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizers = (
        ExactAdamW(ours, **HYPER, exact=False),
        torch.optim.AdamW(theirs, **HYPER, fused=True),
    )
    for step in range(3):
        gradients = loss_gradients(theirs, step)
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            give(params, gradients)
            optimizer.step()
    state = optimizers[0].state[ours[0]]
    assert (
        set(state) == {"step", "exp_avg", "exp_avg_sq"} and state["exp_avg"].dtype == torch.bfloat16
    )
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0)


def test_it_follows_torchs_adamw_where_gradients_come_and_go_bit_for_bit() -> None:
    large = (2, IN_CACHE + 3)  # updated part by part
    ours, alone, theirs = (
        parameters(dtype, large) for dtype in (torch.float32, torch.bfloat16, torch.float32)
    )
    hyper = HYPER | {"weight_decay": 0.0}
    optimizers = (
        ExactAdamW(ours, **hyper),
        ExactAdamW(alone, **hyper),
        torch.optim.AdamW(theirs, **hyper, foreach=False),
    )
    for step in range(12):
        gradients = loss_gradients([split(p.detach())[0] for p in theirs], step)
        for params, optimizer in zip((ours, alone, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / 12)
            give(params, gradients)
            for index, parameter in enumerate(params):
                # so that parameters of one group count differently
                if (step + 1) % (index + 2) == 0:
                    parameter.grad = None
            optimizer.step()
        assert torch.equal(optimizers[0].frozen_counts()[1], optimizers[1].frozen_counts()[1])
    assert equal(ours, theirs) and equal([master(optimizers[1], p) for p in alone], theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert all(
            torch.equal(tensor, optimizers[2].state[other][name])
            for name, tensor in optimizers[0].state[mine].items()
        )
    assert len({state["step"].item() for state in optimizers[0].state.values()}) == len(ours)


# ── Frozen updates ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def approach(dtype: torch.dtype, exact: bool) -> tuple[float, float]:
    """From 1 towards 1.01 in 300 steps of 1e-4, far less than half of BF16's 2**-7: mean frozen updates, and what is left."""
    weight = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = ExactAdamW(
        [weight], lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, exact=exact
    )
    frozen = []
    for _ in range(300):
        give([weight], [torch.sign(master(optimizer, weight) - 1.01)])
        optimizer.step()
        lost, total = optimizer.frozen_counts().tolist()
        frozen.append(lost / total)
    return sum(frozen) / len(frozen), (master(optimizer, weight) - 1.01).abs().max().item()


def test_plain_bf16_freezes_where_exact_bf16_and_fp32_arrive() -> None:
    assert approach(torch.bfloat16, exact=False) == (1.0, pytest.approx(0.01, rel=1e-4))
    for dtype in (torch.bfloat16, torch.float32):
        frozen, distance = approach(dtype, exact=True)
        assert frozen == 0 and distance < 1e-3


@pytest.mark.parametrize("times", [1, IN_CACHE // 3], ids=["at once", "part by part"])
def test_an_update_of_zero_is_not_frozen_and_one_of_decay_alone_is(times: int) -> None:
    weight = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.bfloat16).repeat(times)
    gradient = torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(times)
    for lr, weight_decay, expected in (
        (1e-5, 0.1, [2, 4]),  # 1: decay lost, 2: update lost; 3 moves away from zero
        (1e-5, 0.0, [1, 4]),  # 2 alone: nothing moves 1
        (0.0, 0.1, [0, 4]),
    ):
        optimizer = ExactAdamW(
            [nn.Parameter(weight.clone())],
            **HYPER | {"lr": lr, "weight_decay": weight_decay},
            exact=False,
        )
        give(optimizer.param_groups[0]["params"], [gradient])
        optimizer.step()
        assert optimizer.frozen_counts().tolist() == [count * times for count in expected]


# ── Around it ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_norm_is_summed_in_fp32_and_the_coefficient_brings_it_to_the_limit(
    dtype: torch.dtype,
) -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    exact = math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in model.parameters()))
    norm = gradient_norm(model.parameters())
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact, rel=1e-6)

    assert clip_coefficient(norm, None) is None
    assert clip_coefficient(norm, limit=2 * exact) == 1
    assert norm.item() * clip_coefficient(norm, limit=exact / 4).item() == pytest.approx(
        exact / 4, rel=1e-5
    )


@pytest.mark.parametrize(
    ("moments", "exact", "expected"),
    [
        ("fp32", False, torch.float32),
        ("bf16", True, torch.bfloat16),
        (None, True, torch.float32),
        (None, False, torch.bfloat16),
    ],
)
def test_moments_have_the_dtype_that_the_recipe_names_or_that_of_the_weights(
    moments: str | None, exact: bool, expected: torch.dtype
) -> None:
    layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    adamw = build_optimizer(layer, OptimizerSettings(moments=moments), exact=exact)
    adamw.materialise()
    assert {adamw.state[layer.weight][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {
        expected
    }
