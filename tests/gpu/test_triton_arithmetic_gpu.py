"""Compare fused BF16 layers with kernels with plain torch in FP32, within the rounding of BF16.

The tests also run on a CPU, under Triton's interpreter (TRITON_INTERPRET=1). There, torch computes
the GEMMs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import Tensor

from pretrain.model import huggingface as model
from pretrain.model.fused.arithmetic import Arithmetic, KernelArithmetic
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
    """Build a fused model with FP32 gradients. All models have the same weights, rounded to BF16.

    Args:
        name: Name of the architecture.
        by_kernels: Use the Triton kernels instead of the formulas.
        dtype: Dtype in which layers compute.
        weights: Dtype in which weights are stored. None: `dtype`.
    """
    config = ARCHITECTURES[name]
    depth = "n_layer" if "n_layer" in config else "num_hidden_layers"
    hf = build(config | {depth: LAYERS}, torch.float32, DEVICE)
    model.round_weights(hf, torch.bfloat16)
    model.round_weights(hf, weights or dtype)
    packed = PackedLanguageModel(
        hf, "packed_sdpa", LossSettings(chunk=64), PrecisionContext(dtype)
    ).train()
    implementation = KernelArithmetic if by_kernels else Arithmetic
    packed.fused = fuse(decoder_layers(hf), {}, implementation(packed.context))
    assert not packed.fused.left_out
    attach_main_gradients(packed, torch.float32, packed.fused.stacks)
    return packed


def differences(
    actual: dict[str, Tensor], exact: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the norm of each parameter's difference and the norm of its exact gradient."""
    return {
        name: ((actual[name] - exact[name]).norm(), exact[name].norm())
        for name in significant_parameters(exact)
    }


def error(parts: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the relative error of several parameters together."""
    difference, exact = (torch.stack(norms).norm() for norms in zip(*parts, strict=True))
    return (difference / exact).item()


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_as_close_to_fp32_as_plain_torch_in_bf16(name: str) -> None:
    exact_losses, exact = train(assemble(name, by_kernels=False, dtype=torch.float32))
    losses, gradients = train(assemble(name, by_kernels=True))
    _, plain = train(assemble(name, by_kernels=False))
    assert losses == pytest.approx(exact_losses, rel=2e-3)
    kernel_differences = differences(gradients, exact)
    plain_differences = differences(plain, exact)
    assert error(kernel_differences.values()) < 1.3 * error(plain_differences.values())
    # Small gradients consist of rounding noise, which differs between GEMM algorithms.
    for parameter in kernel_differences:
        kernel_error = error([kernel_differences[parameter]])
        plain_error = error([plain_differences[parameter]])
        assert kernel_error < 2 * plain_error + 2**-8, (parameter, kernel_error, plain_error)


@cuda_only
def test_recomputed_layers_and_evaluation_compute_the_same() -> None:
    """Parameters are FP32, and layers multiply BF16 copies of them.

    All microbatches of a step use the same copies. Evaluation creates new copies.
    """
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
    recomputed_losses, recomputed_gradients = train(recomputed)
    assert recomputed_losses == losses
    errors = (error([norms]) for norms in differences(recomputed_gradients, gradients).values())
    assert max(errors) < 2**-8
    exact = assemble("qwen3", by_kernels=False, dtype=torch.float32)
    with torch.no_grad():
        for packed in (kept, exact):
            for weight in packed.fused.stacks[-1]:
                weight.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
        loss, expected = (packed.eval()(**batch).item() / 1000 for packed in (kept, exact))
    assert abs(loss - expected) < abs(expected - losses[0]) / 4
