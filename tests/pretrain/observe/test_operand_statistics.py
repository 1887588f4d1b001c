"""What is counted, against closed forms, torch's float8 casts and a plain loop over blocks; and that counting changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.overrides import overridden
from pretrain.observe.operand_statistics import OperandStatistics, summary
from pretrain.observe.product_observer import SAMPLED_VALUES
from pretrain.precision.product import LowPrecisionLinear, PrecisionContext
from tests.pretrain.conftest import QUANTIZED, active_in, emulation_of

ROLES = ("input", "weight", "grad_output")


class Watched:
    """Two linears, 256 -> 128 -> 256, in low precision for real."""

    def __init__(self, recipe: str, **options) -> None:
        torch.manual_seed(0)
        self.backend = emulation_of(recipe, **options)
        self.context = PrecisionContext(self.backend, torch.bfloat16, backends=[self.backend])
        self.layers = nn.Sequential(
            self.linear("up", 256, 128), nn.SiLU(), self.linear("down", 128, 256)
        )
        self.x = (
            torch.randn(128, 256, dtype=torch.bfloat16)
            * torch.randn(128, 1, dtype=torch.bfloat16).exp()
        )

    def linear(self, name: str, inputs: int, outputs: int) -> LowPrecisionLinear:
        linear = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
        linear.weight.data *= torch.randn_like(linear.weight).exp()
        low = LowPrecisionLinear(linear, name, self.context)
        low.state.add(self.backend, inputs, outputs)
        return low

    def step(self, *, recompute: bool = False) -> list[Tensor]:
        """Forward and backward; the output and the gradients of the two weights."""
        self.layers.zero_grad()
        with self.context.forward(training=True):
            y = self.context.checkpoint(self.layers, self.x) if recompute else self.layers(self.x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        return [y.detach(), *(weight.grad.clone() for weight in self.layers.parameters())]

    def watched_step(self, **how) -> tuple[list[Tensor], OperandStatistics]:
        statistics = OperandStatistics(self.backend.active, self.context.state())
        with overridden(self.context, observers=[statistics]):
            return self.step(**how), statistics

    def records(self, **how) -> dict[tuple[str, str], dict]:
        return {
            (record["layer"], record["operand"]): record
            for record in self.watched_step(**how)[1].records()
        }


def record_of(
    recipe: str, x: Tensor, role: str = "input", *, parts: int = 1, scale: float = 1.0, **options
) -> dict:
    """The record of x, shown to the statistics in so many parts."""
    scales = {
        "fp8/l/forward/scale": torch.full((3,), scale),
        "fp8/l/backward/scale": torch.full((2,), scale),
    }
    statistics = OperandStatistics(active_in(recipe, **options), scales)
    for part in x.chunk(parts):
        statistics("l", role, part)
    (record,) = statistics.records()
    return {key: value for key, value in record.items() if key not in ("layer", "operand")}


def test_nvfp4_loses_blocks_whose_own_scale_is_zero():
    x = torch.full((16, 32), 6.0)
    x[:, 16:] = 6.0 * 2.0**-20
    record = record_of("nvfp4", x)
    assert (
        record["underflow"] == 0.5
        and record["saturation"] == 0
        and record["scale"] == pytest.approx(1.0)
    )


@pytest.mark.parametrize("role", ["input", "weight"])
def test_of_a_mixture_each_experts_underflow_is_told(role):
    """All share one scale, to which the first loses half of its values. As input the third has no rows."""
    x = torch.ones(64, 256)
    x[:16, 128:], x[32:48] = 1e-9, 0 if role == "weight" else 1e-9
    statistics = OperandStatistics(
        active_in("current"), {}, {"l": torch.tensor([16, 32, 32, 64], dtype=torch.int32)}
    )
    statistics("l", role, x)
    assert statistics.records()[0]["underflow_of_experts"] == (
        [0.5, 0, None, 0] if role == "weight" else [0.5, 0, None, 0.5]
    )


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.floats(0, 6),
    scale=st.integers(-8, 8),
    sparse=st.floats(0, 0.9),
)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_any_tensor_loses_what_torchs_float8_casts_lose(recipe, role, seed, spread, scale, sparse):
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(48, 32, generator=generator)
        * (torch.randn(48, 1, generator=generator) * spread).exp()
    )
    x = (x * (torch.rand(48, 32, generator=generator) >= sparse)).bfloat16()
    record = record_of(recipe, x, role, scale=2.0**scale)
    float8, maximum = (
        (torch.float8_e5m2, 57344) if role == "grad_output" else (torch.float8_e4m3fn, 448)
    )
    amax = x.abs().max().float()
    used = (
        2.0**scale
        if recipe == "delayed"
        else (torch.full_like(amax, maximum) / amax if amax else torch.tensor(1.0)).item()
    )
    scaled = x.float() * used
    zeros = (scaled.clamp(-maximum, maximum).to(float8).float() == 0) & (x != 0)
    cut = scaled.abs() > maximum * (1 + 2.0**-4 / (1.75 if maximum == 448 else 0.875))
    assert record["amax"] == amax
    assert record["scale"] == (pytest.approx(used, rel=1e-6) if amax else None)
    assert record["underflow"] == zeros.sum().item() / max((x != 0).sum().item(), 1)
    assert record["saturation"] == cut.sum().item() / x.numel()


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("role", ROLES)
def test_zeros_and_what_is_not_finite_are_no_loss(recipe, role):
    zeros = record_of(recipe, torch.zeros(128, 128), role)
    assert zeros == {"amax": 0, "scale": None, "underflow": 0, "saturation": 0}
    x = torch.ones(128, 128)
    x[0, 0], x[1, 1], x[2, 2] = math.inf, -math.inf, math.nan
    record = record_of(recipe, x, role)
    assert record["saturation"] == 0 and not math.isfinite(record["amax"])


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_sample_of_a_large_operand_tells_its_shares_and_its_amax_is_exact(recipe, role):
    """One operand of 32 samples, in one part and in parts as the LM head takes its tokens."""
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(4096, 256, generator=generator) * 8).bfloat16()
    x[3, 3] = 4 * x.abs().max()
    assert x.numel() == 32 * SAMPLED_VALUES
    exact = (
        record_of(recipe, x, role, parts=32, scale=0.25)
        if recipe in ("delayed", "block", "mxfp8")
        else None
    )
    for parts in (1, 4):
        record = record_of(recipe, x, role, parts=parts, scale=0.25)
        assert record["amax"] == x.abs().max()
        if exact:
            assert record["underflow"] == pytest.approx(exact["underflow"], abs=2e-3)
            assert math.log2(record["scale"]) == pytest.approx(math.log2(exact["scale"]), abs=0.1)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_watched_step_is_bit_for_bit_the_step_and_its_random_numbers_are_the_same(
    recipe, recompute
):
    plain, watched = Watched(recipe), Watched(recipe)
    for _ in range(3):
        torch.manual_seed(5)
        expected = plain.step(recompute=recompute)
        state = torch.get_rng_state()
        torch.manual_seed(5)
        values, _ = watched.watched_step(recompute=recompute)
        assert all(torch.equal(a, b) for a, b in zip(expected, values, strict=True))
        assert torch.equal(state, torch.get_rng_state())
        states = zip(plain.backend.state().values(), watched.backend.state().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in states)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_every_operand_of_every_product_has_a_record_and_recomputing_changes_none(recipe):
    kept, recomputed = Watched(recipe).records(), Watched(recipe).records(recompute=True)
    assert set(kept) == {(layer, role) for layer in ("up", "down") for role in ROLES}
    for operand, record in kept.items():
        figures = {key: value for key, value in record.items() if key not in ("layer", "operand")}
        assert {key: recomputed[operand][key] for key in figures} == pytest.approx(
            figures, rel=1e-12
        )


def test_delayed_scales_are_those_in_force_and_current_ones_those_of_the_tensor():
    delayed, current = Watched("delayed"), Watched("current")
    first = delayed.records()
    assert all(record["scale"] == 1.0 for record in first.values())  # no step has been seen yet
    delayed.x = delayed.x * 4
    second = delayed.records()
    tensors = current.records()
    # of the step before, in which x was smaller
    assert second["up", "input"]["scale"] == tensors["up", "input"]["scale"]
    assert second["up", "input"]["amax"] == 4 * tensors["up", "input"]["amax"]
    assert second["up", "input"]["saturation"] > 0 == tensors["up", "input"]["saturation"]
    assert second["down", "grad_output"]["scale"] == pytest.approx(
        57344 / second["down", "grad_output"]["amax"]
    )


def test_a_summary_has_geometric_means_of_the_scales_and_the_worst_shares():
    def record(role, scale, underflow=0.0, saturation=0.0, amax=1.0):
        return {
            "operand": role,
            "amax": amax,
            "scale": scale,
            "underflow": underflow,
            "saturation": saturation,
        }

    records = [
        record("input", 2.0, 0.25),
        record("weight", 32.0, saturation=0.5),
        record("grad_output", 1024.0, 0.125),
    ]
    dead = [record("input", 1.0, amax=0.0), record("weight", None, amax=0.0)]
    expected = {
        "fp8/fwd_scale": 8.0,
        "fp8/bwd_scale": 1024.0,
        "fp8/underflow": 0.25,
        "fp8/saturation": 0.5,
    }
    assert summary([*records, *dead]) == pytest.approx(expected)
