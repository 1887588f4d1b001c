"""Fused decoder layers: their choice, stacked weights, and results as those of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pretrain.model.fused.arithmetic import Arithmetic, KernelArithmetic, StackedLinear
from pretrain.model.huggingface import decoder_layers
from pretrain.model.wrapping import choose_arithmetic, fuse, not_fused_because, wrap_layers
from pretrain.precision.product import PrecisionContext
from pretrain.settings.recipe import ModelSettings
from tests.pretrain.conftest import active_in
from tests.pretrain.model.fused.fused_models import (
    ARCHITECTURES,
    build,
    inputs,
    losses_and_gradients,
    one_pass,
    packed,
)


@pytest.fixture(params=ARCHITECTURES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the configuration of a small model of each fused architecture."""
    return dict(ARCHITECTURES[request.param])


# ── The choice of layers ──


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("llama", {"hidden_act": "gelu_new"}, "activation gelu_new"),
        ("gpt2", {"activation_function": "gelu"}, "activation gelu"),
        ("llama", {"model_type": "olmo2"}, "Olmo2"),
        ("gpt2", {"resid_pdrop": 0.1}, "dropout"),
    ],
)
def test_a_layer_that_cannot_be_fused_is_unchanged_and_reported(
    kind: str, changes: dict[str, Any], reason: str
) -> None:
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    hf = build(ARCHITECTURES[kind] | special | changes)
    before = [layer.forward for layer in decoder_layers(hf).values()]
    fused = fuse(decoder_layers(hf), {}, Arithmetic(PrecisionContext(torch.float32)))
    assert not fused.layers
    assert fused.describe().startswith("0 of 2 layers; 2 not completely: ")
    assert all(reason in text for text in fused.left_out.values())
    assert [layer.forward for layer in decoder_layers(hf).values()] == before


@pytest.mark.parametrize(
    ("setting", "device", "name", "implementation"),
    [
        ("auto", "cuda", "bf16", KernelArithmetic),
        ("on", "cuda", "bf16", KernelArithmetic),
        ("auto", "cuda", "fp32", None),
        ("on", "cuda", "fp32", Arithmetic),
        ("auto", "cpu", "bf16", None),
        ("on", "cpu", "bf16", Arithmetic),
    ],
)
def test_bf16_on_a_gpu_is_fused_by_kernels_and_all_else_on_demand(
    setting: Any, device: str, name: str, implementation: type[Arithmetic] | None
) -> None:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
    active = active_in(name, "torch")
    reason = not_fused_because(setting, active, device, dtype)
    arithmetic = choose_arithmetic(active, device, PrecisionContext(dtype), keeps_rotated=False)
    assert (None if reason else type(arithmetic)) == implementation


# ── Losses and gradients ──


def assert_close(
    gradients: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, share: float
) -> None:
    """Compare gradients by their norms. `share` is a part of the largest norm."""
    largest = max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        error = (gradients[name] - gradient).norm()
        assert error <= tolerance * (gradient.norm() + share * largest), name


@pytest.mark.usefixtures("flash_attention_4_on_a_cpu", "cudnn_on_a_cpu")
@pytest.mark.parametrize("backend", ["packed_fa4", "packed_cudnn"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])  # without and with head norms
def test_rotation_and_attention_may_be_one_node(name: str, backend: str) -> None:
    """Results are those of separate nodes, whether queries and keys are saved or recomputed."""
    separate = packed(build(ARCHITECTURES[name], backend="packed_sdpa"))
    one_node = packed(build(ARCHITECTURES[name], backend=backend))
    expected_loss, expected = one_pass(separate)
    loss, gradients = one_pass(one_node)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_close(gradients, expected, 1e-6, 2.0)
    with torch.no_grad():
        assert one_node(**inputs()).item() / 1000 == pytest.approx(expected_loss, rel=1e-6)
    saving = packed(build(ARCHITECTURES[name], backend=backend))
    next(iter(saving.fused.layers.values())).arithmetic.keeps_rotated = True
    saving_loss, saving_gradients = one_pass(saving)
    assert saving_loss == loss
    for parameter, gradient in saving_gradients.items():
        assert torch.equal(gradient, gradients[parameter]), parameter


@pytest.mark.parametrize(
    ("dtype", "compile_layers"), [(torch.float32, True), (torch.bfloat16, False)]
)
def test_losses_and_main_gradients_are_those_of_the_unfused_model(
    config: dict[str, Any],
    dtype: torch.dtype,
    compile_layers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Main gradients are FP32 sums of two microbatches, which share working copies.

    With `compile_layers`, only the first half of hybrid layers is compiled. In the other models, a
    kernel of torch computes the final norm.
    """
    model = packed(build(config), dtype=dtype)
    plain = packed(build(config), fused=False)
    # Trace forward and backward as on a GPU, but generate no C++, which would take long.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    wrap_layers(model, ModelSettings(config=config), cast_to=dtype, compile_layers=compile_layers)
    losses, gradients = losses_and_gradients(model)
    expected_losses, expected = losses_and_gradients(plain)
    tolerance = 1e-5 if dtype == torch.float32 else 0.06
    assert losses == pytest.approx(expected_losses, rel=tolerance)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_close(gradients, expected, tolerance, 0.01)


# ── Generation ──


def test_generation_uses_the_original_layers(config: dict[str, Any]) -> None:
    """Generation has a cache and no packed documents."""
    texts = []
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for fused in (True, False):
        hf = build(config)
        packed(hf, fused=fused)
        hf.eval().set_attn_implementation("sdpa")
        texts.append(hf.generate(torch.tensor([[3, 5, 7]]), **options))
    assert torch.equal(*texts)


# ── Stacked weights ──

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@st.composite
def stacks(draw: st.DrawFn) -> StackedLinear:
    """Draw one to four linears of different widths, with or without biases."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    columns = draw(st.integers(1, 9))
    stored, computed = draw(DTYPES), draw(DTYPES)
    bias = draw(st.booleans())
    linears = [
        nn.Linear(columns, rows, bias=bias)
        for rows in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    ]
    named = {str(index): linear.to(stored) for index, linear in enumerate(linears)}
    return StackedLinear("all", named, PrecisionContext(computed))


@given(stacks())
def test_the_matrix_has_the_rows_of_all_linears_in_order(stack: StackedLinear) -> None:
    dtype = stack.context.compute_dtype
    stored = stack.weights[0].dtype
    parameters = [*stack.weights, *stack.biases]
    expected = torch.cat([weight.detach() for weight in stack.weights])
    before = [p.detach().clone() for p in parameters]
    separate = stack.matrix()
    stack.lay_together()
    for matrix in (separate, stack.matrix()):
        assert matrix.dtype == dtype and matrix.is_contiguous() and not matrix.requires_grad
        assert torch.equal(matrix, expected.to(dtype))
    assert (stack.matrix().data_ptr() == stack.weights[0].data_ptr()) == (dtype == stored)
    for parameter, same, value in zip(
        [*stack.weights, *stack.biases], parameters, before, strict=True
    ):
        assert parameter is same and torch.equal(parameter, value)
