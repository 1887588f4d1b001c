"""Fused layers in BF16 by kernels: the model that plain torch computes in FP32, but for BF16's roundings.

They run on a CPU too, under Triton's interpreter (TRITON_INTERPRET=1), but for products, which are torch's there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import Tensor

from pretrain.model import huggingface as model
from pretrain.model.fused.arithmetic import Arithmetic, Implementation
from pretrain.model.gradients import attach_main_gradients
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import fuse, wrap_layers
from pretrain.precision.product import PrecisionContext
from pretrain.settings.recipe import LossSettings, ModelSettings
from tests.gpu.conftest import DEVICE, INTERPRETED, cuda_only
from tests.pretrain.model.fused.fused_models import (
    ARCHITECTURES,
    build,
    inputs,
    losses_and_gradients,
    significant_parameters,
)

pytestmark = pytest.mark.usefixtures("conversions_that_round")
LENGTH = 32 if INTERPRETED else 256
LAYERS = 1 if INTERPRETED else 2
NAMES = ["qwen3"] if INTERPRETED else [*ARCHITECTURES]
train = partial(losses_and_gradients, device=DEVICE, length=LENGTH)


def assemble(
    name: str,
    *,
    by_kernels: bool,
    dtype: torch.dtype = torch.bfloat16,
    weights: torch.dtype | None = None,
) -> PackedLanguageModel:
    """Always the same weights, values of BF16, stored as `weights` (None: as computed with) and computed with in `dtype`;
    gradients in FP32."""
    depth = {"num_hidden_layers": LAYERS}
    hf = build(ARCHITECTURES[name] | depth, torch.float32, DEVICE)
    model.round_weights(hf, torch.bfloat16)
    model.round_weights(hf, weights or dtype)
    packed = PackedLanguageModel(
        hf, "packed_sdpa", LossSettings(chunk=64), PrecisionContext(None, dtype)
    ).train()
    packed.fused = fuse(
        decoder_layers(hf),
        {},
        Arithmetic(
            packed.context, Implementation.KERNELS if by_kernels else Implementation.FORMULAS
        ),
    )
    assert not packed.fused.left_out
    attach_main_gradients(packed, torch.float32, packed.fused.stacks)
    return packed


def differences(
    one: dict[str, Tensor], exact: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """The norm of each parameter's difference, and its exact norm."""
    return {
        name: ((one[name] - exact[name]).norm(), exact[name].norm())
        for name in significant_parameters(exact)
    }


def error(parts: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Relative, of all these parameters together."""
    difference, exact = (torch.stack(norms).norm() for norms in zip(*parts, strict=True))
    return (difference / exact).item()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_as_near_to_fp32_as_plain_torch_in_bf16(name: str) -> None:
    exact_losses, exact = train(assemble(name, by_kernels=False, dtype=torch.float32))
    losses, gradients = train(assemble(name, by_kernels=True))
    _, plain = train(assemble(name, by_kernels=False))
    assert losses == pytest.approx(exact_losses, rel=2e-3)
    mine, theirs = differences(gradients, exact), differences(plain, exact)
    assert error(mine.values()) < 1.3 * error(theirs.values())
    # a small gradient is rounding noise, of which each algorithm of a product draws its own
    for parameter in mine:
        ours, torchs = error([mine[parameter]]), error([theirs[parameter]])
        assert ours < 2 * torchs + 2**-8, (parameter, ours, torchs)


@cuda_only
def test_recomputed_layers_and_evaluation_compute_the_same() -> None:
    """With parameters in FP32: their working copies are kept for the microbatches of a step, and made anew in evaluation."""
    batch = inputs(seed=0, device=DEVICE, length=LENGTH)
    kept, recomputed = (assemble("qwen3", by_kernels=True, weights=torch.float32) for _ in range(2))
    wrap_layers(
        recomputed,
        ModelSettings(source="none", gradient_checkpointing="full"),
        cast_to=torch.bfloat16,
        compile_layers=False,
    )
    wrap_layers(
        kept,
        ModelSettings(source="none", gradient_checkpointing="none"),
        cast_to=torch.bfloat16,
        compile_layers=False,
    )
    losses, gradients = train(kept)
    again_losses, again = train(recomputed)
    assert again_losses == losses
    assert max(error([each]) for each in differences(again, gradients).values()) < 2**-8
    exact = assemble("qwen3", by_kernels=False, dtype=torch.float32)
    with torch.no_grad():
        for packed in (kept, exact):
            for weight in packed.fused.stacks[-1]:
                weight.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
        loss, expected = (packed.eval()(**batch).item() / 1000 for packed in (kept, exact))
    assert abs(loss - expected) < abs(expected - losses[0]) / 4
