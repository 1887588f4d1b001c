"""Fused layers in BF16 by kernels: the model that plain torch computes in FP32, but for BF16's roundings.

They run on a CPU too, under Triton's interpreter (TRITON_INTERPRET=1), but for products, which are torch's there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic products need, read when CUDA starts

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pretrain.model import huggingface as model
from pretrain.model.fused.arithmetic import Arithmetic, By, StackedProduct
from pretrain.model.gradients import attach_main_gradients
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import fuse, wrap_layers
from pretrain.precision import searched
from pretrain.precision.product import PrecisionContext
from pretrain.settings.recipe import LossSettings, ModelSettings
from tests.gpu.interpreted import DEVICE, GPU_OR_INTERPRETER, INTERPRETED, cuda_only
from tests.pretrain.model.fused.fused_models import ARCHITECTURES, build, inputs, losses_and_gradients, that_count

pytestmark = [
    *GPU_OR_INTERPRETER,
    pytest.mark.usefixtures("conversions_that_round"),
]
LENGTH = 32 if INTERPRETED else 256
LAYERS = 1 if INTERPRETED else 2
NAMES = ["qwen3", "llama with biases"] if INTERPRETED else [*ARCHITECTURES]
train = partial(losses_and_gradients, device=DEVICE, length=LENGTH)


def assemble(
    name: str,
    *,
    by_kernels: bool,
    dtype: torch.dtype = torch.bfloat16,
    weights: torch.dtype | None = None,
    attention: str = "packed_sdpa",
    **changes: Any,
) -> PackedLanguageModel:
    """Always the same weights, values of BF16, stored as `weights` (None: as computed with) and computed with in `dtype`;
    gradients in FP32."""
    depth = {"num_hidden_layers": LAYERS}
    hf = build(ARCHITECTURES[name] | depth | changes, torch.float32, DEVICE, attention)
    model.round_weights(hf, torch.bfloat16)
    model.round_weights(hf, weights or dtype)
    packed = PackedLanguageModel(hf, attention, LossSettings(chunk=64), PrecisionContext(None, dtype)).train()
    packed.fused = fuse(decoder_layers(hf), {}, Arithmetic(packed.context, By.KERNELS if by_kernels else By.FORMULAS))
    assert not packed.fused.left_out
    attach_main_gradients(packed, torch.float32, packed.fused.stacks)
    return packed


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative, by parameter."""
    return {name: ((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in that_count(exact)}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_as_near_to_fp32_as_plain_torch_in_bf16(name: str) -> None:
    exact_losses, exact = train(assemble(name, by_kernels=False, dtype=torch.float32))
    losses, gradients = train(assemble(name, by_kernels=True))
    _, plain = train(assemble(name, by_kernels=False))
    assert losses == pytest.approx(exact_losses, rel=2e-3)
    mine, theirs = errors(gradients, exact), errors(plain, exact)
    for parameter, error in mine.items():
        assert error < 1.3 * theirs[parameter] + 2**-8, (parameter, error, theirs[parameter])


def test_recomputed_layers_and_evaluation_compute_the_same() -> None:
    """With parameters in FP32: their working copies are kept for the microbatches of a step, and made anew in evaluation."""
    batch = inputs(seed=0, device=DEVICE, length=LENGTH)
    kept, recomputed = (assemble("qwen3", by_kernels=True, weights=torch.float32) for _ in range(2))
    wrap_layers(
        recomputed, ModelSettings(source="none", gradient_checkpointing="full"), cast_to=torch.bfloat16, compile_layers=False
    )
    wrap_layers(kept, ModelSettings(source="none", gradient_checkpointing="none"), cast_to=torch.bfloat16, compile_layers=False)
    losses, gradients = train(kept)
    again_losses, again = train(recomputed)
    assert again_losses == losses
    assert max(errors(again, gradients).values()) < 2**-8
    exact = assemble("qwen3", by_kernels=False, dtype=torch.float32)
    with torch.no_grad():
        for packed in (kept, exact):
            for weight in packed.fused.stacks[-1]:
                weight.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
        found, expected = (packed.eval()(**batch).item() / 1000 for packed in (kept, exact))
    assert abs(found - expected) < abs(expected - losses[0]) / 4


# ── On a GPU ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@cuda_only
@pytest.mark.parametrize("name", ["qwen3", "llama with biases"])
def test_the_bits_repeat(name: str, deterministic: None) -> None:
    one, other = (train(assemble(name, by_kernels=True, attention="packed_varlen")) for _ in range(2))
    assert one[0] == other[0]
    for parameter, gradient in one[1].items():
        assert torch.equal(gradient, other[1][parameter]), parameter


@cuda_only
@pytest.mark.parametrize("by_torch", [True, False])
def test_weight_gradients_of_two_microbatches_add_up_in_fp32(by_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_torch:
        monkeypatch.setattr(searched, "multiply", lambda *_, **__: None)
    linear = torch.nn.Linear(512, 768, bias=False, device="cuda", dtype=torch.bfloat16)
    linear.weight.main_grad = torch.zeros(768, 512, device="cuda")
    context = PrecisionContext(None, torch.bfloat16)
    product = StackedProduct("p", {"p": linear}, Arithmetic(context, By.KERNELS))
    generator, expected = torch.Generator("cuda").manual_seed(0), 0
    for _ in range(2):
        x, dy = (torch.randn(1024, n, device="cuda", dtype=torch.bfloat16, generator=generator) for n in (512, 768))
        assert product.weight_gradients(dy, x) == [None]
        expected = expected + dy.double().t() @ x.double()
    error = (linear.weight.main_grad.double() - expected).norm() / expected.norm()
    assert error < 1e-5, error  # rounded to BF16 on the way it would be 2e-3
