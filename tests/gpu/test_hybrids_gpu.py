"""Hybrid models on a GPU: fla-core's kernels beside transformers' functions, document by document.

With Triton 3.4 to 3.7.0, a Hopper GPU needs tilelang too: `pip install tilelang`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from pretrain.model.gradients import gradient_of
from pretrain.model.hybrids import kernels
from pretrain.model.hybrids.families import FAMILIES
from pretrain.model.hybrids.mixing import gated_delta_rule
from pretrain.model.packed import inputs_of
from tests.conftest import Finished
from tests.pretrain.model.test_all_model_types import (
    DOCUMENTS,
    LENGTH,
    assert_apart,
    packed_model,
    plain_copy,
    small_step,
)
from tests.pretrain.model.test_hybrids import recipe_of
from tests.pretrain.small_models import plain_loss, random_packs

__all__ = ["recipe_of"]
GPU = torch.device("cuda")
CPU = torch.device("cpu")
LAUNCH = ["--config_file", "accelerate_configs/bf16.yaml"]


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if reason := kernels.unavailable_because(tuple(kernels.TRIALS)):
        pytest.fail(f"a hybrid model {reason}")


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 0.01), ("bf16", 0.04)])
@pytest.mark.parametrize("kind", FAMILIES)
def test_documents_of_a_pack_are_trained_separately(
    kind: str, precision: str, tolerance: float
) -> None:
    packed = packed_model(kind, precision, GPU)
    (batch,) = small_step().microbatches
    loss = packed(**inputs_of(batch, GPU))
    loss.backward()
    assert_apart(packed)
    # Parameters whose gradients are summed directly have no `grad`.
    gradients = {
        name: gradient_of(parameter).cpu() for name, parameter in packed.hf.named_parameters()
    }
    plain = plain_copy(packed.hf.cpu(), kind)
    expected = plain_loss(plain, random_packs(DOCUMENTS, LENGTH)) * batch.valid_tokens
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    total = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    for name, parameter in plain.named_parameters():
        difference = (gradients[name] - parameter.grad).norm()
        assert difference <= tolerance * (2 * parameter.grad.norm() + 0.5 * total), name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.01), (torch.bfloat16, 0.02)])
def test_the_gated_delta_rule_equals_the_function_in_torch(
    dtype: torch.dtype, tolerance: float
) -> None:
    """The kernel multiplies FP32 values in TF32."""
    generator = torch.Generator().manual_seed(1)
    cu_seqlens = torch.tensor([0, 5, 14, 94, 103], dtype=torch.int32)
    shapes = [(103, 16, 16)] * 3 + [(103, 16)] * 2
    query, key, value, decay, beta = (torch.rand(1, *s, generator=generator) for s in shapes)
    inputs = [tensor.to(dtype) for tensor in (query, key, value)] + [-decay, beta.to(dtype)]
    d_output = torch.randn(1, 103, 16, 16, generator=generator).to(dtype)

    plain = inspect.unwrap(torch_chunk_gated_delta_rule)

    def results(device: torch.device) -> list[Tensor]:
        leaves = [tensor.to(device).requires_grad_() for tensor in inputs]
        output, _ = gated_delta_rule(plain, cu_seqlens.to(device), *leaves)
        output.backward(d_output.to(device))
        return [tensor.detach().cpu().float() for tensor in (output, *(x.grad for x in leaves))]

    for actual, expected in zip(results(GPU), results(CPU), strict=True):
        assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(
    ("kind", "precision", "compiled"),
    [
        *((kind, "delayed", "none") for kind in ("qwen3_5_text", "lfm2", "bamba")),
        *((kind, "delayed", "layer") for kind in ("qwen3_5_text", "lfm2", "bamba")),
        ("qwen3_5_text", "bf16", "layer"),
        ("olmo_hybrid", "bf16", "layer"),
    ],
)
def test_a_run_passes_parity(
    kind: str,
    precision: str,
    compiled: str,
    recipe_of: Callable[[str], dict[str, Any]],
    train: Callable[..., Finished],
) -> None:
    settings = (f"precision={precision}", f"model.compile={compiled}")
    run = train(*settings, recipe=recipe_of(kind), launch=LAUNCH)
    assert run.status == 0, run.output
    assert run.audit()["parity"]["failures"] == []
    engines = {"torch"} | ({"transformer_engine"} if precision == "delayed" else set())
    assert {row["backend"] for row in run.audit()["products"]} == engines
    assert ("only the MLP" in run.audit()["fused"]) == (kind in ("qwen3_5_text", "olmo_hybrid"))
