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

from pretrain.model.fused.arithmetic import Arithmetic, KernelArithmetic
from pretrain.model.huggingface import round_weights
from pretrain.model.packed import PackedLanguageModel
from tests.gpu.conftest import DEVICE, INTERPRETED
from tests.pretrain.model.fused.fused_models import (
    ARCHITECTURES,
    build,
    inputs,
    losses_and_gradients,
    packed,
    significant_parameters,
)

LENGTH = 32 if INTERPRETED else 256
LAYERS = 1 if INTERPRETED else 2
NAMES = ["qwen3", "qwen3_5"] if INTERPRETED else [*ARCHITECTURES]
train = partial(losses_and_gradients, device=DEVICE, length=LENGTH)


def assemble(
    name: str,
    arithmetic: type[Arithmetic] = Arithmetic,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> PackedLanguageModel:
    """Build a fused model that computes in `dtype`. All have the same weights, rounded to BF16."""
    config = ARCHITECTURES[name]
    depth = "n_layer" if "n_layer" in config else "num_hidden_layers"
    hf = build(config | {depth: LAYERS}, torch.float32, DEVICE)
    round_weights(hf, torch.bfloat16)
    round_weights(hf, dtype)
    return packed(hf, dtype=dtype, arithmetic=arithmetic)


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
    exact_losses, exact = train(assemble(name, dtype=torch.float32))
    kernels = assemble(name, KernelArithmetic)
    losses, gradients = train(kernels)
    _, plain = train(assemble(name))
    assert losses == pytest.approx(exact_losses, rel=2e-3)
    batch = inputs(seed=0, device=DEVICE, length=LENGTH)
    with torch.no_grad():
        evaluated = kernels.eval()(**batch).item() / 1000
    assert evaluated == pytest.approx(losses[0], rel=1e-4)
    kernel_differences = differences(gradients, exact)
    plain_differences = differences(plain, exact)
    assert error(kernel_differences.values()) < 1.3 * error(plain_differences.values())
    # Small gradients consist of rounding noise, which differs between GEMM algorithms.
    for parameter in kernel_differences:
        kernel_error = error([kernel_differences[parameter]])
        plain_error = error([plain_differences[parameter]])
        assert kernel_error < 2 * plain_error + 2**-8, (parameter, kernel_error, plain_error)
