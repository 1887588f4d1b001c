"""Compare losses of the head with FP64, and FP8 GEMMs fused with the loss with separate ones."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packing.arrow import IGNORE
from pretrain.model.loss.head import LossHead
from pretrain.model.loss.logit_change import UNCHANGED, LogitChange
from pretrain.precision.product import LowPrecisionLinear
from pretrain.precision.transformer_engine import TransformerEngine
from pretrain.settings.recipe import LossSettings
from tests.gpu.conftest import needs, relative_error
from tests.pretrain.conftest import active_in, context_of


def problem(
    tokens: int, hidden: int, vocabulary: int, weights: torch.dtype = torch.bfloat16
) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    states = torch.randn(1, tokens, hidden, device="cuda").bfloat16().requires_grad_()
    linear = nn.Linear(hidden, vocabulary, bias=False, device="cuda", dtype=weights)
    nn.init.normal_(linear.weight, std=0.05)
    labels = torch.randint(vocabulary, (1, tokens), device="cuda")
    labels[:, ::10] = IGNORE
    return states, linear, labels


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["chunked", "cce"])
def test_loss_and_gradients_are_exact_within_the_rounding_of_bf16(
    kind: Literal["chunked", "cce"], weights: torch.dtype
) -> None:
    if kind == "cce":
        pytest.importorskip("cut_cross_entropy")
    states, linear, labels = problem(2000, 256, 32_003, weights)
    rounded = linear.weight.detach().bfloat16().double().requires_grad_()
    exact_states = states.detach().double().requires_grad_()
    exact_loss = F.cross_entropy(
        F.linear(exact_states, rounded)[0], labels[0], ignore_index=IGNORE, reduction="sum"
    )
    (exact_loss / 131_072).backward()

    head = LossHead(linear, LossSettings(kind=kind, chunk=512))
    loss = head(states, labels)
    (loss / 131_072).backward()
    assert loss.dtype == torch.float32
    assert relative_error(loss, exact_loss.detach()) < 1e-4
    # cce skips gradients that it considers negligible. Its error on an H200 is 2.8 %.
    bound = 0.01 if kind == "chunked" else 0.05
    assert relative_error(states.grad, exact_states.grad) < bound
    assert relative_error(linear.weight.grad, rounded.grad) < bound
    with torch.no_grad():
        assert relative_error(head(states, labels), exact_loss.detach()) < 1e-4


# ── FP8 ──

# Chunks of 384, 384 and 256 tokens.
TOKENS = 1024
CHUNK = 384
HIDDEN = 256
# 16 x 257: no larger power of two divides it.
VOCABULARY = 4112


Tensors = dict[str, Tensor]


def train(
    recipe: str,
    *,
    fused: bool,
    weights: torch.dtype,
    change: LogitChange = UNCHANGED,
    **options: Any,
) -> tuple[list[Tensors], list[Tensors]]:
    """Train a linear and the head, both in low precision: two steps of two microbatches.

    The head is not the first layer. Returns the losses and gradients of the microbatches, and the
    state after each of them.
    """
    needs(recipe)
    torch.manual_seed(0)
    options = ({"amax_history_len": 4} if recipe == "delayed" else {}) | options
    active = active_in(recipe, "transformer_engine", **options)
    engine = TransformerEngine(active, torch.device("cuda"))
    context = context_of(engine)
    linear = nn.Linear(HIDDEN, HIDDEN, bias=False, device="cuda", dtype=weights)
    below = LowPrecisionLinear(linear, "below", context)
    below.state.create_gemm(HIDDEN, HIDDEN)
    linear = nn.Linear(HIDDEN, VOCABULARY, bias=False, device="cuda", dtype=weights)
    nn.init.normal_(linear.weight, std=0.2)
    head = LossHead(linear, LossSettings(chunk=CHUNK), context, "head", change)
    head.state.create_gemm(HIDDEN, VOCABULARY)
    gemm = engine.gemms["head"]
    if fused and not gemm.supports_fused_loss:
        pytest.skip("GEMMs of this GPU need no transposed operands")
    if not fused:  # Compute as all other layers do.
        gemm.__class__ = type("UnfusedGemm", (type(gemm),), {"supports_fused_loss": False})
    results = []
    states = []
    for number in range(4):
        generator = torch.Generator("cuda").manual_seed(number)
        x = torch.randn(TOKENS, HIDDEN, device="cuda", generator=generator).bfloat16()
        x.requires_grad_()
        labels = torch.randint(VOCABULARY, (TOKENS,), device="cuda", generator=generator)
        labels[::9] = IGNORE
        context.first_microbatch = number % 2 == 0
        below.weight.grad = head.weight.grad = None
        with context.forward(training=True):
            loss = head(below(x), labels)
        (loss / TOKENS).backward()
        gradients = {"x": x.grad, "below": below.weight.grad, "weight": head.weight.grad}
        results.append({"loss": loss.detach()} | gradients)
        states.append({name: tensor.clone() for name, tensor in engine.state().items()})
        if number % 2:
            with torch.no_grad():
                head.weight.mul_(1.01)
    return results, states


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("delayed", {}),
        ("delayed", {"fp8_format": "E4M3", "margin": 1}),
        ("current", {}),
        ("delayed", {"change": LogitChange(cap=2.0)}),
        ("current", {"change": LogitChange(0.5, 2.0)}),
        ("current", {"change": LogitChange(0.25)}),
    ],
)
def test_the_fused_head_equals_separate_gemms_and_loss(
    recipe: str, options: dict[str, Any], weights: torch.dtype
) -> None:
    """Operands have the same bits, and so do losses.

    The fused weight gradient sums chunks in FP32. Separate GEMMs round each chunk to BF16. The
    fused gradient of the hidden states uses one scale per row, which keeps the labels' entries.
    """
    (fused_results, fused_states), (separate_results, separate_states) = (
        train(recipe, fused=fused, weights=weights, **options) for fused in (True, False)
    )
    for fused, separate in zip(fused_results, separate_results, strict=True):
        errors = {key: relative_error(fused[key], separate[key]) for key in fused}
        assert errors["weight"] < 4e-3
        assert errors["loss"] < 1e-6
        assert max(errors["x"], errors["below"]) < 0.15, errors
    for fused, separate in zip(fused_states, separate_states, strict=True):
        differing = [name for name in fused if not torch.equal(fused[name], separate[name])]
        assert all(name.startswith("fp8/below/backward/") for name in differing)
    if recipe == "delayed":
        assert fused_states[-1]["fp8/head/backward/amax_history"][:, 0].any()
