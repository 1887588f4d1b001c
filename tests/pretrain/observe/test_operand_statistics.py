"""Operand statistics agree with closed forms, torch's float8 casts and a loop over blocks.

Measuring them changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pretrain.observe.operand_statistics import (
    SAMPLED_VALUES,
    OperandStatistics,
    summary,
    warning_of,
)
from pretrain.precision.formats.definition import Role
from pretrain.precision.product import LowPrecisionLinear
from pretrain.precision.settings import PRECISIONS
from tests.pretrain.conftest import QUANTIZED, active_in, call_of, context_of, emulation_of

ROLES = ("input", "weight", "grad_output")


class SmallModel:
    """Two linears, 256 -> 128 -> 256, that compute in an emulated precision."""

    def __init__(self, recipe: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.engine = emulation_of(recipe, **options)
        self.context = context_of(self.engine)
        self.layers = nn.Sequential(
            self.linear("up", 256, 128), nn.SiLU(), self.linear("down", 128, 256)
        )
        self.x = torch.randn(128, 256).bfloat16() * torch.randn(128, 1).bfloat16().exp()

    def linear(self, name: str, inputs: int, outputs: int) -> LowPrecisionLinear:
        linear = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
        linear.weight.data *= torch.randn_like(linear.weight).exp()
        low = LowPrecisionLinear(linear, name, self.context)
        low.state.create_gemm(inputs, outputs)
        return low

    def step(self, *, recompute: bool = False) -> list[Tensor]:
        """Run forward and backward. Return the output and the gradients of the two weights."""
        self.layers.zero_grad()
        with self.context.forward(training=True):
            y = self.context.checkpoint(self.layers, self.x) if recompute else self.layers(self.x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        return [y.detach(), *(weight.grad.clone() for weight in self.layers.parameters())]

    def observed_step(
        self, *, recompute: bool = False
    ) -> tuple[list[Tensor], dict[tuple[str, str], dict]]:
        """Return the result of `step`, and the records of its operands by layer and role."""
        statistics = OperandStatistics(self.engine.precision, self.context.state())
        with self.context.probing(statistics):
            values = self.step(recompute=recompute)
        records = statistics.records()
        return values, {(record.pop("layer"), record.pop("operand")): record for record in records}

    def records(self) -> dict[tuple[str, str], dict]:
        return self.observed_step()[1]

    def state(self) -> list[Tensor]:
        return [*self.engine.state().values()]


def record_of(
    recipe: str,
    x: Tensor,
    role: Role = "input",
    *,
    parts: int = 1,
    scale: float = 1.0,
    **options: Any,
) -> dict[str, Any]:
    """Return the record of `x`, which the statistics see in `parts` parts."""
    scales = {
        "fp8/l/forward/scale": torch.full((3,), scale),
        "fp8/l/backward/scale": torch.full((2,), scale),
    }
    statistics = OperandStatistics(active_in(recipe, **options).quantized_precision, scales)
    for part in x.chunk(parts):
        statistics.operand("l", role, lambda part=part: part, call_of("l"))
    (record,) = statistics.records()
    return {key: value for key, value in record.items() if key not in ("layer", "operand")}


def test_nvfp4_loses_blocks_whose_scale_is_zero():
    x = torch.full((16, 32), 6.0)
    x[:, 16:] = 6.0 * 2.0**-20
    record = record_of("nvfp4", x)
    assert (record["underflow"], record["saturation"]) == (0.5, 0)
    assert record["scale"] == pytest.approx(1.0)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.floats(0, 6),
    scale=st.integers(-8, 8),
    sparse=st.floats(0, 0.9),
)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_losses_equal_those_of_torchs_float8_casts(recipe, role, seed, spread, scale, sparse):
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(48, 1, generator=generator) * spread).exp()
    x = torch.randn(48, 32, generator=generator) * rows
    x = (x * (torch.rand(48, 32, generator=generator) >= sparse)).bfloat16()
    record = record_of(recipe, x, role, scale=2.0**scale)
    float8, maximum = torch.float8_e4m3fn, 448
    if role == "grad_output":
        float8, maximum = torch.float8_e5m2, 57344
    amax = x.abs().max().float()
    if recipe == "delayed":
        expected_scale = 2.0**scale
    else:
        expected_scale = (torch.full_like(amax, maximum) / amax).item() if amax else 1.0
    scaled = x.float() * expected_scale
    zeros = (scaled.clamp(-maximum, maximum).to(float8).float() == 0) & (x != 0)
    cut = scaled.abs() > maximum * (1 + 2.0**-4 / (1.75 if maximum == 448 else 0.875))
    assert record["amax"] == amax
    assert record["scale"] == (pytest.approx(expected_scale, rel=1e-6) if amax else None)
    assert record["underflow"] == zeros.sum().item() / max((x != 0).sum().item(), 1)
    assert record["saturation"] == cut.sum().item() / x.numel()


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("role", ROLES)
def test_zeros_and_nonfinite_values_are_no_loss(recipe, role):
    zeros = record_of(recipe, torch.zeros(128, 128), role)
    assert zeros == {"amax": 0, "scale": None, "underflow": 0, "saturation": 0}
    x = torch.ones(128, 128)
    x[0, 0], x[1, 1], x[2, 2] = math.inf, -math.inf, math.nan
    record = record_of(recipe, x, role)
    assert record["saturation"] == 0 and not math.isfinite(record["amax"])


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_large_operands_are_sampled_but_their_amax_is_exact(recipe, role):
    """The operand has 32 times the values of a sample.

    It is passed in one part and, as in the head, in several.
    """
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(4096, 256, generator=generator) * 8).bfloat16()
    x[1500, 3] = 4 * x.abs().max()  # neither in the first nor in the last part
    assert x.numel() == 32 * SAMPLED_VALUES
    exact = None
    if recipe in ("delayed", "block", "mxfp8"):
        exact = record_of(recipe, x, role, parts=32, scale=0.25)
    for parts in (1, 4):
        record = record_of(recipe, x, role, parts=parts, scale=0.25)
        assert record["amax"] == x.abs().max()
        if exact:
            assert record["underflow"] == pytest.approx(exact["underflow"], abs=2e-3)
            assert math.log2(record["scale"]) == pytest.approx(math.log2(exact["scale"]), abs=0.1)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_observing_changes_no_bit_and_recomputing_no_record(recipe):
    model = SmallModel(recipe)
    torch.manual_seed(5)
    kept = model.records()
    assert set(kept) == {(layer, role) for layer in ("up", "down") for role in ROLES}
    for recompute in (False, True):
        plain = SmallModel(recipe)
        observed = SmallModel(recipe)
        for number in range(2):
            torch.manual_seed(5)
            expected = plain.step(recompute=recompute)
            state = torch.get_rng_state()
            torch.manual_seed(5)
            values, records = observed.observed_step(recompute=recompute)
            assert all(map(torch.equal, expected, values))
            assert torch.equal(state, torch.get_rng_state())
            assert all(map(torch.equal, plain.state(), observed.state()))
            for operand, record in kept.items() if number == 0 else ():
                assert records[operand] == pytest.approx(record, rel=1e-12)


def test_delayed_scales_lag_a_step_and_current_scales_do_not():
    delayed = SmallModel("delayed")
    current = SmallModel("current")
    first = delayed.records()
    assert all(record["scale"] == 1.0 for record in first.values())  # no history yet
    delayed.x = delayed.x * 4
    second = delayed.records()
    tensors = current.records()
    # The delayed scale is that of the previous step, in which x was smaller.
    assert second["up", "input"]["scale"] == tensors["up", "input"]["scale"]
    assert second["up", "input"]["amax"] == 4 * tensors["up", "input"]["amax"]
    assert second["up", "input"]["saturation"] > 0 == tensors["up", "input"]["saturation"]
    assert second["down", "grad_output"]["scale"] == pytest.approx(
        57344 / second["down", "grad_output"]["amax"]
    )


def test_a_summary_has_mean_scales_and_the_worst_shares():
    def record(
        role: Role,
        scale: float | None,
        underflow: float = 0.0,
        saturation: float = 0.0,
        amax: float = 1.0,
    ) -> dict[str, Any]:
        shares = {"underflow": underflow, "saturation": saturation}
        return {"operand": role, "amax": amax, "scale": scale, **shares}

    records = [
        record("input", 2.0, 0.25),
        record("weight", 32.0, saturation=0.5),
        record("grad_output", 1024.0, 0.125),
    ]
    zeros = [record("input", 1.0, amax=0.0), record("weight", None, amax=0.0)]
    expected = {
        "fp8/fwd_scale": 8.0,
        "fp8/bwd_scale": 1024.0,
        "fp8/underflow": 0.25,
        "fp8/saturation": 0.5,
    }
    assert summary([*records, *zeros]) == pytest.approx(expected)


# ── Warnings about operands that lose many values ──


def warnings_of(recipe: str) -> Callable[[int, list[dict]], str | None]:
    """Return a function that maps a step and its records to a warning or None."""
    precision = active_in(recipe).precision
    given: set[str] = set()
    return lambda step, records: warning_of(step, precision, records, given)


def operand(role: str = "input", *, underflow: float = 0.0, saturation: float = 0.0) -> dict:
    shares = {"underflow": underflow, "saturation": saturation}
    return {"layer": "layers.3.mlp.down_proj", "operand": role, "amax": 3.5, "scale": 1.0, **shares}


@pytest.mark.parametrize(
    ("recipe", "record", "remedy"),
    [
        ("delayed", operand(saturation=0.004), "fp8_config.margin"),
        ("nvfp4", operand("grad_output", underflow=0.8), "keep_bf16_layers"),
    ],
)
def test_a_warning_names_the_operand_its_share_and_the_remedy(recipe, record, remedy):
    records = [operand(), operand("weight"), operand("grad_output"), record]
    message = warnings_of(recipe)(400, records)
    share = f"{100 * max(record['underflow'], record['saturation']):.1f} %"
    for part in ("step 400: ", f"layers.3.mlp.down_proj's {record['operand']}", share, remedy):
        assert part in message


@pytest.mark.parametrize("recipe", QUANTIZED)
@given(shares=st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_the_first_share_above_the_limit_causes_one_warning(recipe, shares):
    limit = PRECISIONS[recipe].underflow_limit
    warn = warnings_of(recipe)
    is_warned = [
        warn(step, [operand(underflow=share)]) is not None for step, share in enumerate(shares)
    ]
    above = [share > limit for share in shares]
    assert is_warned == [is_above and not any(above[:step]) for step, is_above in enumerate(above)]
