"""Compare the LM head's FP8 GEMMs fused with the loss with the same GEMMs in separate layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packing.arrow import IGNORE
from pretrain.model.loss.head import LossHead
from pretrain.precision.product import LowPrecisionLinear
from pretrain.precision.transformer_engine import TransformerEngine
from pretrain.settings.recipe import LossSettings
from tests.gpu.conftest import needs, relative_error
from tests.pretrain.conftest import active_in, context_of

# Chunks of 384, 384 and 256 tokens.
TOKENS = 1024
CHUNK = 384
HIDDEN = 256
# 16 x 257: no larger power of two divides it.
VOCABULARY = 4112


class Model:
    """Linear followed by the head, both in low precision. The head is not the first layer."""

    def __init__(
        self, recipe: str, *, fused: bool, weights: torch.dtype = torch.bfloat16, **options: Any
    ) -> None:
        needs(recipe)
        torch.manual_seed(0)
        options = ({"amax_history_len": 4} if recipe == "delayed" else {}) | options
        self.engine = TransformerEngine(
            active_in(recipe, "transformer_engine", **options), torch.device("cuda")
        )
        self.context = context_of(self.engine)
        below = nn.Linear(HIDDEN, HIDDEN, bias=False, device="cuda", dtype=weights)
        self.below = LowPrecisionLinear(below, "below", self.context)
        self.below.state.add(HIDDEN, HIDDEN)
        linear = nn.Linear(HIDDEN, VOCABULARY, bias=False, device="cuda", dtype=weights)
        nn.init.normal_(linear.weight, std=0.2)
        self.head = LossHead(linear, LossSettings(chunk=CHUNK), self.context, "head")
        self.head.state.add(HIDDEN, VOCABULARY)
        gemm = self.engine.gemms["head"]
        if fused and not gemm.supports_fused_loss:
            pytest.skip("GEMMs of this GPU need no transposed operands")
        if not fused:  # Compute as all other layers do.
            gemm.__class__ = type("UnfusedGemm", (type(gemm),), {"supports_fused_loss": False})

    def microbatch(self, number: int, *, first: bool) -> dict[str, Tensor]:
        """Return the loss and the gradients of one microbatch."""
        generator = torch.Generator("cuda").manual_seed(number)
        x = (
            torch.randn(TOKENS, HIDDEN, device="cuda", generator=generator)
            .bfloat16()
            .requires_grad_()
        )
        labels = torch.randint(VOCABULARY, (TOKENS,), device="cuda", generator=generator)
        labels[::9] = IGNORE
        self.context.first_microbatch = first
        self.below.weight.grad = self.head.weight.grad = None
        with self.context.forward(training=True):
            loss = self.head(self.below(x), labels)
        (loss / TOKENS).backward()
        return {
            "loss": loss.detach(),
            "x": x.grad,
            "below": self.below.weight.grad,
            "weight": self.head.weight.grad,
        }

    def run(self) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """Train two steps of two microbatches.

        Returns the losses and gradients of the microbatches, and the state after each of them.
        """
        results = []
        states = []
        for number in range(4):
            results.append(self.microbatch(number, first=number % 2 == 0))
            states.append({name: tensor.clone() for name, tensor in self.engine.state().items()})
            if number % 2:
                with torch.no_grad():
                    self.head.weight.mul_(1.01)
        return results, states


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("delayed", {}),
        ("delayed", {"fp8_format": "E4M3", "margin": 1}),
        ("current", {}),
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
        Model(recipe, fused=fused, weights=weights, **options).run() for fused in (True, False)
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
