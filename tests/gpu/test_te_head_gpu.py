"""The LM head's FP8 products together with the loss, against the same products differentiated one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packing.arrow import IGNORE
from pretrain.model.loss.head import LossHead
from pretrain.precision.product import LowPrecisionLinear, PrecisionContext
from pretrain.precision.transformer_engine import TransformerEngine
from pretrain.settings.recipe import LossSettings
from tests.gpu.conftest import needs, relative_error
from tests.pretrain.conftest import active_in

# chunks of 384, 384 and 256; a vocabulary of no more than 16 x 257
TOKENS, HIDDEN, VOCABULARY, CHUNK = 1024, 256, 4112, 384


class Model:
    """A linear and the head, in low precision, as a model has them: what comes first is not the head."""

    def __init__(
        self, recipe: str, *, fused: bool, weights: torch.dtype = torch.bfloat16, **options: Any
    ) -> None:
        needs(recipe)
        torch.manual_seed(0)
        options = ({"amax_history_len": 4} if recipe == "delayed" else {}) | options
        self.engine = TransformerEngine(
            active_in(recipe, "transformer_engine", **options), torch.device("cuda")
        )
        self.context = PrecisionContext(self.engine, torch.bfloat16, backends=[self.engine])
        below = nn.Linear(HIDDEN, HIDDEN, bias=False, device="cuda", dtype=weights)
        self.below = LowPrecisionLinear(below, "below", self.context)
        self.below.state.add(self.engine, HIDDEN, HIDDEN)
        linear = nn.Linear(HIDDEN, VOCABULARY, bias=False, device="cuda", dtype=weights)
        nn.init.normal_(linear.weight, std=0.2)
        self.head = LossHead(linear, LossSettings(chunk=CHUNK), self.context, "head")
        self.head.state.add(self.engine, HIDDEN, VOCABULARY)
        gemm = self.head.state.gemms[self.engine]
        if fused and not gemm.supports_fused_loss:
            pytest.skip("products of this GPU read operands as they lie")
        if not fused:  # as all other layers compute
            gemm.__class__ = type("UnfusedGemm", (type(gemm),), {"supports_fused_loss": False})

    def microbatch(self, number: int, *, first: bool) -> dict[str, Tensor]:
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
        """Two steps of two microbatches: losses and gradients of each, and the state after it."""
        found, states = [], []
        for number in range(4):
            found.append(self.microbatch(number, first=number % 2 == 0))
            states.append({name: tensor.clone() for name, tensor in self.engine.state().items()})
            if number % 2:
                with torch.no_grad():
                    self.head.weight.mul_(1.01)
        return found, states


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("delayed", {}),
        ("delayed", {"fp8_format": "E4M3", "margin": 1}),
        ("current", {}),
    ],
)
def test_everything_is_that_of_the_products_one_by_one(
    recipe: str, options: dict[str, Any], weights: torch.dtype
) -> None:
    """Operands have the same bits, so losses do too. The weight's gradient adds up in FP32 from chunk to chunk, where one by one
    each is rounded to BF16. The hidden states' comes from rows that have a scale each, which keeps the labels' entries."""
    fused, one_by_one = (
        Model(recipe, fused=fused, weights=weights, **options).run() for fused in (True, False)
    )
    for ours, theirs in zip(fused[0], one_by_one[0], strict=True):
        errors = {key: relative_error(ours[key], theirs[key]) for key in ours}
        assert errors["weight"] < 4e-3 and errors["loss"] < 1e-6
        assert max(errors["x"], errors["below"]) < 0.15, errors
    for ours, theirs in zip(fused[1], one_by_one[1], strict=True):
        assert {name for name in ours if not torch.equal(ours[name], theirs[name])} <= {
            name for name in ours if name.startswith("fp8/below/backward/")
        }
    if recipe == "delayed":
        assert fused[1][-1]["fp8/head/backward/amax_history"][:, 0].any()
