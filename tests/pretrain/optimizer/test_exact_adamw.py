"""ExactAdamW compared with torch's AdamW, its three weight modes, and its count of lost updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.errors import InputError
from pretrain import api
from pretrain.model.gradients import attach_main_gradients
from pretrain.optimizer.adamw import (
    IN_CACHE,
    ExactAdamW,
    build_optimizer,
    clip_coefficient,
    gradient_norm,
)
from pretrain.optimizer.exact_weights import join, master_of, split
from pretrain.settings.recipe import OptimizerSettings

SHAPES = ((33, 17), (17,), (5, 3, 2))
HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters(
    dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[nn.Parameter]:
    """Return random parameters with BF16 values."""
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype))
        for shape in shapes
    ]


def loss_gradients(weights: list[Tensor], step: int) -> list[Tensor]:
    """Return noisy BF16 gradients at BF16 `weights`. They depend on every bit of the weights."""
    generator = torch.Generator().manual_seed(step)
    return [
        weight.sin() + torch.randn(weight.shape, generator=generator).bfloat16()
        for weight in weights
    ]


def set_gradients(parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype)


def master(optimizer: ExactAdamW, parameter: Tensor) -> Tensor:
    return master_of(parameter.detach(), optimizer.state[parameter].get("remainder"))


def equal(tensors: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


# ── The update ──


def test_fp32_and_exact_bf16_have_the_bits_of_torchs_adamw() -> None:
    """Parameters without a gradient are skipped. The largest is updated in several chunks."""
    shapes = (*SHAPES, (2, IN_CACHE + 3))
    fp32, bf16, masters = (
        parameters(dtype, shapes) for dtype in (torch.float32, torch.bfloat16, torch.float32)
    )
    reference = torch.optim.AdamW(masters, **HYPER, foreach=False)
    plain = ExactAdamW(fp32, **HYPER)
    exact = ExactAdamW(bf16, **HYPER)
    for step in range(40):
        gradients = loss_gradients([split(p.detach())[0] for p in masters], step)
        for params, adamw in ((fp32, plain), (bf16, exact), (masters, reference)):
            adamw.zero_grad()
            adamw.param_groups[0]["lr"] = 3e-3 * (1 - step / 40)
            set_gradients(params, gradients)
            for index, parameter in enumerate(params):
                # Parameters of one group then have different numbers of updates.
                if (step + 1) % (index + 2) == 0:
                    parameter.grad = None
            adamw.step()
        assert torch.equal(plain.lost_counts[1], exact.lost_counts[1])
        assert equal(fp32, masters)
        assert equal([master(exact, p) for p in bf16], masters)
    for moment in ("step", "exp_avg", "exp_avg_sq"):
        expected = [reference.state[p][moment] for p in masters]
        assert equal([plain.state[p][moment] for p in fp32], expected)
        assert equal([exact.state[p][moment] for p in bf16], expected)
    assert len({state["step"].item() for state in plain.state.values()}) == len(fp32)


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_main_gradients_are_clipped_in_fp32_and_not_changed(weights, gradients):
    trained = nn.ParameterList(parameters(weights))
    masters = parameters()
    attach_main_gradients(trained, gradients)
    optimizer = ExactAdamW(trained, **HYPER)
    reference = torch.optim.AdamW(masters, **HYPER, foreach=False)
    coefficient = torch.tensor(0.3)
    for step in range(5):
        for parameter, fp32_parameter in zip(trained, masters, strict=True):
            generator = torch.Generator().manual_seed(step)
            gradient = torch.randn(fp32_parameter.shape, generator=generator)
            parameter.main_grad.copy_(gradient)
            fp32_parameter.grad = gradient.to(gradients).float() * coefficient
        optimizer.step(clip_coefficient=coefficient)
        reference.step()
        assert all(
            torch.equal(p.main_grad.float() * coefficient, m.grad)
            for p, m in zip(trained, masters, strict=True)
        )
    assert equal([master(optimizer, parameter) for parameter in trained], masters)


def test_plain_bf16_agrees_with_torchs_fused_adamw() -> None:
    """Both compute in FP32 and round once."""
    trained = parameters(torch.bfloat16)
    expected = parameters(torch.bfloat16)
    optimizer = ExactAdamW(trained, **HYPER, exact=False)
    reference = torch.optim.AdamW(expected, **HYPER, fused=True)
    for step in range(3):
        gradients = loss_gradients(expected, step)
        for params, adamw in ((trained, optimizer), (expected, reference)):
            set_gradients(params, gradients)
            adamw.step()
    state = optimizer.state[trained[0]]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["exp_avg"].dtype == torch.bfloat16
    torch.testing.assert_close(trained, expected, rtol=2**-7, atol=0)


# ── Lost updates ──


def approach(dtype: torch.dtype, exact: bool) -> tuple[float, float]:
    """Train weights from 1 towards 1.01 for 300 steps of 1e-4, far less than half of BF16's 2**-7.

    Return the mean share of lost updates and the final distance from 1.01.
    """
    weight = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = ExactAdamW(
        [weight], lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, exact=exact
    )
    shares = []
    for _ in range(300):
        set_gradients([weight], [torch.sign(master(optimizer, weight) - 1.01)])
        optimizer.step()
        lost, total = optimizer.lost_counts.tolist()
        shares.append(lost / total)
    return sum(shares) / len(shares), (master(optimizer, weight) - 1.01).abs().max().item()


@pytest.mark.parametrize(
    "invalid", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": -0.1}]
)
def test_invalid_hyperparameters_are_refused_as_by_torch(invalid: dict[str, Any]) -> None:
    messages = []
    for optimizer in (torch.optim.AdamW, ExactAdamW):
        with pytest.raises(ValueError, match="Invalid") as error:
            optimizer(parameters(), **invalid)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_plain_bf16_loses_all_small_updates_and_exact_bf16_none() -> None:
    assert approach(torch.bfloat16, exact=False) == (1.0, pytest.approx(0.01, rel=1e-4))
    for dtype in (torch.bfloat16, torch.float32):
        lost_share, distance = approach(dtype, exact=True)
        assert lost_share == 0 and distance < 1e-3


@pytest.mark.parametrize("times", [1, IN_CACHE // 3], ids=["one chunk", "several chunks"])
def test_zero_updates_are_not_lost_and_lost_decay_counts(times: int) -> None:
    weight = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.bfloat16).repeat(times)
    gradient = torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(times)
    for lr, weight_decay, expected in (
        # The decay of value 1 and the update of value 2 are lost. Value 3 moves away from zero.
        (1e-5, 0.1, [2, 4]),
        # Only the update of value 2 is lost. Value 1 has no update.
        (1e-5, 0.0, [1, 4]),
        (0.0, 0.1, [0, 4]),
    ):
        optimizer = ExactAdamW(
            [nn.Parameter(weight.clone())],
            **HYPER | {"lr": lr, "weight_decay": weight_decay},
            exact=False,
        )
        set_gradients(optimizer.param_groups[0]["params"], [gradient])
        optimizer.step()
        assert optimizer.lost_counts.tolist() == [count * times for count in expected]


# ── Gradient norm and moments ──


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_summed_in_fp32_and_clipped_to_the_limit(dtype):
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
def test_moments_have_the_dtype_of_the_recipe_or_of_the_weights(moments, exact, expected):
    layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    adamw = build_optimizer(layer, OptimizerSettings(moments=moments), exact=exact)
    adamw.materialise()
    assert {adamw.state[layer.weight][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {
        expected
    }


# ── In loops of others, through the public API ──


def test_exact_adamw_is_an_optimizer_of_torch_with_the_bits_of_fp32(tmp_path: Path):
    """Schedulers, groups, closures, and a resumed state, against torch's AdamW in FP32."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 3).bfloat16()), nn.Parameter(torch.randn(3).bfloat16())]
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    module = nn.ParameterList(weights)
    exact = api.exact_adamw(module, lr=1e-2, weight_decay=0.1)
    assert [group["weight_decay"] for group in exact.param_groups] == [0.1, 0.0]
    groups = [{"params": masters[:1]}, {"params": masters[1:], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, foreach=False)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(x, 0.9) for x in (exact, plain)]
    for step in range(20):
        if step == 10:
            torch.save([exact.state_dict(), schedulers[0].state_dict()], tmp_path / "saved")
            exact = api.exact_adamw(module, lr=5.0)
            state, schedule = torch.load(tmp_path / "saved")
            exact.load_state_dict(state)
            schedulers[0] = torch.optim.lr_scheduler.ExponentialLR(exact, 0.9)
            schedulers[0].load_state_dict(schedule)
            exact.load_state_dict(state)
        for weight, master in zip(weights, masters, strict=True):
            weight.grad = torch.randn(weight.shape).bfloat16()
            master.grad = weight.grad.float()
        assert exact.step(lambda: 3.0) == 3.0
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
        for weight, master in zip(weights, masters, strict=True):
            remainder = exact.state[weight]["remainder"]
            assert torch.equal(master_of(weight.detach(), remainder), master.detach())


def test_a_state_of_other_weights_is_refused():
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    plain = torch.optim.AdamW([weight])
    plain.step()
    with pytest.raises(InputError, match="remainder"):
        api.exact_adamw([weight]).load_state_dict(plain.state_dict())
    with pytest.raises(TypeError):
        api.exact_adamw([weight], amsgrad=True)
    exact = api.exact_adamw([weight])
    exact.step()
    row = nn.Parameter(torch.ones(1, 4, dtype=torch.bfloat16))
    with pytest.raises(InputError, match="dtype and shape"):
        api.exact_adamw([row]).load_state_dict(exact.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_weights_that_would_be_rounded_are_refused(dtype: torch.dtype):
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(InputError, match="FP32 and BF16"):
        api.exact_adamw([weight]).step()


# ── The encoding of FP32 masters as BF16 weights and remainders ──

NANS = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFF8000, 0xFFFFFFFF]


def floats(patterns: list[int] | Tensor) -> Tensor:
    """Return the FP32 numbers with these bits."""
    bits = torch.as_tensor(patterns, dtype=torch.int64)
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


@given(
    st.lists(
        st.integers(0, 2**32 - 1) | st.sampled_from([0x7F800000, 0xFF800000]),
        min_size=1,
        max_size=50,
    )
)
def test_join_restores_every_master_except_nan(patterns: list[int]) -> None:
    master = floats(patterns)
    master = master[~master.isnan()]
    weight, remainder = split(master)
    assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert same_bits(join(weight, remainder), master)


@pytest.mark.parametrize("sign", [0, 0x8000])
def test_weights_are_hardware_roundings_except_on_ties(sign: int) -> None:
    """Tested with all 65,536 low halves of eight high halves."""
    highs = sign | torch.tensor([0x0, 0x1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F])
    bits = (highs[:, None] * 65536 + torch.arange(65536)).flatten()
    master = floats(bits)
    tie = bits % 65536 == 0x8000
    weight, remainder = split(master)
    assert same_bits(weight[~tie], master.bfloat16()[~tie])
    assert (weight[tie].float().abs() > master[tie].abs()).all(), "ties are rounded away from zero"
    assert not remainder[bits % 65536 == 0].any(), "a BF16 number has remainder 0"
    assert same_bits(join(weight, remainder), master)


def test_every_nan_stays_a_nan_in_the_weight() -> None:
    weight, remainder = split(floats(NANS))
    assert weight.isnan().all()
    assert join(weight, remainder).isnan().all()
