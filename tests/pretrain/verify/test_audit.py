"""The audit, on models that keep their promise and on models that break it without a word.

What is broken on purpose here, for every precision: operands of another format, values that nobody rounded, scales that are not
those of the values, that lose a bit, or that no history makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from foundation.errors import InputError
from packing.batch import build_microbatch
from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.wrapping import fuse
from pretrain.precision.emulation import EmulationBackend, Operand
from pretrain.precision.observed import OPERANDS, ProductObserver
from pretrain.precision.product import PlainProduct, PrecisionContext
from pretrain.precision.quantizers import Grid
from pretrain.precision.quantizers.tensor import round_to_grid
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings
from pretrain.verify import audit

FP32, BF16 = (ActivePrecision(name, PRECISIONS[name], "torch", LowPrecisionSettings()) for name in ("fp32", "bf16"))
LINEARS = {"qwen3": 2 * 7 + 1, "gpt2": 2 * 4 + 1}  # q, k, v, o, gate, up, down; c_attn, c_proj, c_fc, c_proj; and the head


@pytest.fixture
def inputs(random_packs: Callable) -> dict:
    return inputs_of(build_microbatch(random_packs([[5, 11]], 16), mask_boundaries=True), torch.device("cpu"))


def observe(packed: PackedLanguageModel, inputs: dict, active: ActivePrecision) -> list[audit.Entry]:
    return audit.observe(packed, lambda: packed(**inputs), active, {})


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize(
    ("weights", "cast_to", "recipe", "stored"),
    [
        (torch.float32, None, FP32, "float32"),
        (torch.float32, torch.bfloat16, BF16, "float32"),
        (torch.bfloat16, None, BF16, "bfloat16"),
    ],
)
def test_every_linear_is_listed_with_what_it_stores_and_what_it_computes_in(
    kind: str, weights: torch.dtype, cast_to: torch.dtype | None, recipe: object, stored: str, build_model: Callable, inputs: dict
) -> None:
    packed = build_model(kind, weights=weights, cast_to=cast_to)
    entries = observe(packed, inputs, recipe)
    assert len(entries) == LINEARS[kind]
    expected = {name for name, module in packed.hf.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    assert {entry["name"] for entry in entries} == expected and "lm_head" in expected
    assert {entry["module"] for entry in entries} == {"LossHead", "Linear" if kind == "qwen3" else "Conv1D"}
    assert {entry["stored"] for entry in entries} == {stored}
    assert {(entry["requested"], entry["effective"]) for entry in entries} == {(recipe.requested, recipe.requested)}


def refusal(packed: PackedLanguageModel, inputs: dict, recipe: object) -> str:
    with pytest.raises(InputError) as error:
        observe(packed, inputs, recipe)
    return str(error.value)


@pytest.mark.parametrize("kind", LINEARS)
def test_a_model_in_another_precision_than_asked_for_is_refused(kind: str, build_model: Callable, inputs: dict) -> None:
    count = LINEARS[kind]
    assert f"precision 'bf16': {count} of {count} modules" in refusal(build_model(kind), inputs, BF16)
    assert f"precision 'fp32': {count} of {count}" in refusal(build_model(kind, weights=torch.bfloat16), inputs, FP32)


def test_a_layer_without_working_copies_is_found(build_model: Callable, inputs: dict) -> None:
    packed = build_model(cast_to=torch.bfloat16)
    layer = packed.hf.base_model.layers[1]
    del layer.forward  # the wrapper; the class's own forward comes back, on FP32 parameters

    def in_fp32(hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """What autocast, or a norm kept in FP32, makes of such a layer: it runs, in FP32, and nobody is told."""
        rotary = tuple(each.float() for each in kwargs.pop("position_embeddings"))
        return type(layer).forward(layer, hidden.float(), *args, position_embeddings=rotary, **kwargs).bfloat16()

    layer.forward = in_fp32
    message = refusal(packed, inputs, BF16)
    assert "7 of 15" in message
    assert "layers.1.self_attn.q_proj (fp32)" in message and "layers.0" not in message


def test_a_cast_inside_a_linear_s_forward_is_found(build_model: Callable, inputs: dict) -> None:
    packed = build_model(cast_to=torch.bfloat16)
    linear = packed.hf.base_model.layers[0].mlp.up_proj
    linear.forward = lambda x: F.linear(x.float(), linear.weight.float()).to(x.dtype)
    assert "1 of 15 modules did not run in it as they should: model.layers.0.mlp.up_proj (fp32)" in refusal(packed, inputs, BF16)


def test_a_linear_that_never_ran_is_found(build_model: Callable, inputs: dict) -> None:
    packed = build_model()
    packed.hf.base_model.layers[1].mlp.forward = lambda hidden: hidden
    message = refusal(packed, inputs, FP32)
    assert "3 of 15" in message and "layers.1.mlp.gate_proj (not run)" in message


def test_experts_that_are_stacked_are_found_dead_and_one_that_no_token_has_chosen_is_not(
    build_model: Callable, inputs: dict
) -> None:
    packed = build_model()
    mlp = packed.hf.base_model.layers[0].mlp
    mlp.experts = nn.ModuleList([nn.Module()])
    mlp.experts[0].scale = nn.Parameter(torch.ones(3))
    observe(packed, inputs, FP32)
    mlp.experts = nn.Module()
    mlp.experts.down_proj = nn.Parameter(torch.ones(8, 16, 16))
    assert "mlp.experts.down_proj among them" in refusal(packed, inputs, FP32)


def test_observing_leaves_no_forward_behind(build_model: Callable, inputs: dict) -> None:
    packed = build_model()
    before = {module: vars(module).get("forward") for module in packed.modules()}
    observe(packed, inputs, FP32)
    refusal(packed, inputs, BF16)
    assert {module: vars(module).get("forward") for module in packed.modules()} == before


# ── Fused products ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def fused(build_model: Callable, dtype: torch.dtype = torch.bfloat16) -> PackedLanguageModel:
    packed = build_model(cast_to=torch.bfloat16) if dtype == torch.bfloat16 else build_model()
    packed.context = PrecisionContext(None, dtype)
    packed.fused = fuse(decoder_layers(packed.hf), {}, Arithmetic(packed.context))
    assert not packed.fused.left_out
    return packed.train()


@pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize("honest_too", [False, True])
def test_a_fused_product_that_multiplies_in_fp32_is_found_whatever_else_it_multiplies(
    gemm: str, honest_too: bool, build_model: Callable, inputs: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, honest = fused(build_model), PlainProduct.multiply
    assert {entry["effective"] for entry in observe(packed, inputs, BF16)} == {"bf16"}

    def in_fp32(product: PlainProduct, which: str, left: torch.Tensor, right: torch.Tensor, *rest: Any) -> torch.Tensor:
        if which != gemm or honest_too:
            result = honest(product, which, left, right, *rest)
        return honest(product, which, left.float(), right.float(), torch.float32).bfloat16() if which == gemm else result

    monkeypatch.setattr(PlainProduct, "multiply", in_fp32)
    message = refusal(packed, inputs, BF16)
    assert "14 of 15 modules" in message and "layers.0.self_attn.q_proj (bfloat16 x float32)" in message


def test_a_fused_product_that_never_multiplies_is_found(
    build_model: Callable, inputs: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, honest = fused(build_model), PlainProduct.multiply

    def without_dgrad(product: PlainProduct, which: str, left: torch.Tensor, right: torch.Tensor, *rest: Any) -> torch.Tensor:
        return left.new_zeros(len(left), right.shape[1]) if which == "dgrad" else honest(product, which, left, right, *rest)

    monkeypatch.setattr(PlainProduct, "multiply", without_dgrad)
    assert "q_proj (bf16, dgrad not run)" in refusal(packed, inputs, BF16)


# ── Operands that are not what they are called ─────────────────────────────────────────────────────────────────────────────────

QUANTIZED = [name for name, precision in PRECISIONS.items() if precision.quantized]
CASES = {name: (name, {}) for name in QUANTIZED} | {
    "mxfp8 hybrid": ("mxfp8", {"fp8_format": "HYBRID"}),
    "nvfp4 plain": ("nvfp4", {"disable_rht": True, "disable_stochastic_rounding": True}),
}
Change = Callable[[Operand], Operand]


def emulated(case: str) -> ActivePrecision:
    name, options = CASES[case]
    return ActivePrecision(name, PRECISIONS[name], "emulation", LowPrecisionSettings(**options).resolved(name))


class Layer(nn.Module):
    """One emulated linear that computes as `real` says, and whatever `changed` makes of its operands."""

    SIZES = 256, 128, 384  # tokens, in, out

    def __init__(self, real: ActivePrecision) -> None:
        super().__init__()
        _, into, out = self.SIZES
        self.backend = EmulationBackend(real, torch.device("cpu"))
        self.context = PrecisionContext(self.backend, torch.bfloat16)
        self.product = self.backend.product("layer", into, out, bias=False)
        generator = torch.Generator().manual_seed(0)
        spread = torch.exp(torch.randn(out, into, generator=generator))
        self.weight = nn.Parameter((spread * torch.randn(out, into, generator=generator)).bfloat16())
        self._generator = generator

    def changed(self, change: Change, role: str) -> Layer:
        honest = self.product.quantized

        def quantized(its: str, *how: object) -> Operand:
            made = honest(its, *how)
            return change(made) if its == role else made

        self.product.quantized = quantized
        return self

    def microbatch(self, scale: float = 1.0) -> None:
        """`scale`: of the gradient."""
        tokens, into, out = self.SIZES
        x, gradient = (torch.randn(tokens, size, generator=self._generator) for size in (into, out))
        x *= torch.exp(torch.randn(tokens, into, generator=self._generator))
        with self.context.forward(training=True):
            y = self.context.multiply(self.product, x.bfloat16().requires_grad_(), self.weight, None)
        y.backward((scale * 1e-3 * gradient).bfloat16())

    def faults(self, claimed: ActivePrecision) -> list[str]:
        """After a microbatch that teaches delayed scaling its scales."""
        self.microbatch()
        observer = ProductObserver(claimed)
        with observer.looking_on():
            self.microbatch()
        assert [product.gemm for product in observer.products["layer"]] == ["forward", "dgrad", "wgrad"]
        return observer.faults().get("layer", [])


@pytest.mark.parametrize("case", CASES)
def test_what_every_precision_makes_passes(case: str) -> None:
    assert Layer(emulated(case)).faults(emulated(case)) == []


@pytest.mark.parametrize("claimed", CASES)
def test_operands_of_every_other_format_are_found(claimed: str) -> None:
    """Of as many bits, of fewer and of more."""
    formats = {"delayed", "current", "block", "mxfp8", "mxfp4", "nvfp4"} - {CASES[claimed][0]}
    if claimed == "delayed":
        formats -= {"current"}  # its operands are delayed scaling's, by a scale that the history does not make
    for real in sorted(formats):
        faults = Layer(emulated(real)).faults(emulated(claimed))
        # A delayed scale can be the one that the tensor itself would have: that of a weight that did not change.
        wrong = {fault.split(":")[0] for fault in faults}
        assert wrong if real == "delayed" else len(wrong) == 6, f"{real} passes as {claimed}: {faults}"


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("case", CASES)
def test_values_that_nobody_rounded_are_found_under_scales_that_are_right(case: str, role: str) -> None:
    def unrounded(operand: Operand) -> Operand:
        return Operand(operand.values * (1 + 2**-5 * torch.rand_like(operand.values)), operand.scale, operand.block_scale)

    faults = Layer(emulated(case)).changed(unrounded, role).faults(emulated(case))
    assert [fault.split(": ")[0] for fault in faults] == [f"{gemm} {role}" for gemm, roles in OPERANDS.items() if role in roles]
    assert all("hold values that are no E" in fault for fault in faults)


def halved(operand: Operand, grid: Grid) -> Operand:
    """By a scale of twice the size: one bit of every value is lost."""
    if operand.block_scale is None:
        return Operand(round_to_grid(operand.values / 2, grid), 2 * operand.scale)
    rows, across = operand.block_scale.shape
    high, wide = operand.values.shape[0] // rows, operand.values.shape[1] // across
    scale = 2 * operand.block_scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    codes = torch.where(scale > 0, operand.values / scale, 0.0)
    return Operand(round_to_grid(codes, grid) * scale, operand.scale, 2 * operand.block_scale)


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "delayed"])
def test_scales_twice_too_large_are_found(case: str, role: str) -> None:
    active = emulated(case)
    grid = active.precision.grid(active.settings, role)
    faults = Layer(active).changed(lambda operand: halved(operand, grid), role).faults(active)
    assert [fault.split(": ")[0] for fault in faults] == [f"{gemm} {role}" for gemm, roles in OPERANDS.items() if role in roles]
    assert all("too large for their values" in fault for fault in faults)


@pytest.mark.parametrize("case", [case for case in CASES if PRECISIONS[CASES[case][0]].block_scaled])
def test_scales_of_the_neighbouring_block_are_found(case: str) -> None:
    def shifted(operand: Operand) -> Operand:
        return Operand(operand.values, operand.scale, operand.block_scale.roll(1, 0))

    for role in ("input", "weight", "grad_output"):
        faults = Layer(emulated(case)).changed(shifted, role).faults(emulated(case))
        assert any(fault.startswith(f"forward {role}" if role != "grad_output" else "dgrad") for fault in faults), role


@pytest.mark.parametrize("values", [0.0, float("nan"), float("inf"), 1e-38])
@pytest.mark.parametrize("case", CASES)
def test_what_is_empty_tiny_or_no_number_is_left_to_the_health_check(case: str, values: float) -> None:
    layer = Layer(emulated(case))
    with torch.no_grad():
        layer.weight[:200] = values
    assert layer.faults(emulated(case)) == []
