"""Test fused layers in every precision of Transformer Engine.

Fused layers are as close to BF16 as unfused layers, and evaluate as they train.
MXFP8 and NVFP4 need a B200.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.observe.product_observer import ProductObserver
from pretrain.precision.gemm import Gemm
from pretrain.precision.product import Probe
from pretrain.precision.scope import is_called
from pretrain.run.served import served_weights
from tests.gpu.assembled import LENGTH, active_of, assemble, larger, train
from tests.pretrain.conftest import ON_TE
from tests.pretrain.model.fused.fused_models import (
    build,
    check_products,
    inputs,
    significant_parameters,
)

pytestmark = pytest.mark.usefixtures("te")


def cosines(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the cosine similarity of two gradients for each parameter."""
    return {
        name: F.cosine_similarity(actual[name].flatten(), expected[name].flatten(), dim=0).item()
        for name in significant_parameters(expected)
    }


@pytest.mark.parametrize("recipe", ON_TE)
@pytest.mark.parametrize(
    ("name", "scope", "keep"),
    [
        ("qwen3", "linear", ()),
        ("qwen3", "linear+head", ()),
        ("qwen2", "linear", ()),
        ("qwen3", "linear", ("down_proj",)),
        ("qwen3", "linear", ("gate_proj", "up_proj")),
        ("qwen3", "linear", ("q_proj", "k_proj", "v_proj")),
        ("llama", "linear", ("o_proj", "layers.0.*")),
        ("gpt2", "linear", ()),
        ("gpt2", "linear+head", ()),
        ("gpt2", "linear", ("mlp.c_proj",)),
        ("gpt2", "linear", ("mlp.c_fc", "h.0.attn.*")),
        ("starcoder2", "linear", ()),
        ("llama with biases", "linear", ()),
        # Only the MLP is fused.
        ("qwen3_5", "linear", ("in_proj_[ab]", "down_proj")),
    ],
)
def test_fused_layers_are_as_close_to_bf16_as_unfused_layers(
    name: str, scope: str, keep: tuple[str, ...], recipe: str
) -> None:
    """Norms and SwiGLU write FP8 if a quantized GEMM reads it, else BF16, also in backward."""
    exact = train(assemble(name, "bf16", fused=False))
    fused, unfused = (
        train(assemble(name, recipe, fused=f, keep=keep, scope=scope), steps=4)
        for f in (True, False)
    )
    assert fused[0][-1] == pytest.approx(exact[0][-1], rel=5e-3)
    unfused_cosines = cosines(unfused[1], exact[1])
    for parameter, cosine in cosines(fused[1], exact[1]).items():
        assert 1 - cosine < 1.5 * (1 - unfused_cosines[parameter]) + 0.02, parameter

    packed = assemble(name, recipe, fused=True, keep=keep, scope=scope)
    active = active_of(recipe, scope=scope)
    observer = ProductObserver()
    with observer.observing():
        train(packed, steps=1)
    assert observer.products.keys() - {"lm_head"} >= packed.fused.members.keys()
    assert ("lm_head" in observer.products) == (scope == "linear+head")
    assert any(is_called(linear, k) for linear in observer.products for k in keep) == bool(keep)
    check_products(observer, active, keep)


@pytest.mark.parametrize("recipe", ON_TE)
def test_low_precision_evaluation_equals_training_and_keeps_the_state(recipe: str) -> None:
    packed = assemble("qwen3", recipe, fused=True)
    packed.context.evaluates_low = True
    train(packed)
    before = {name: tensor.clone() for name, tensor in packed.context.state().items()}
    batch = inputs(packs=4, seed=0, device="cuda", length=LENGTH)
    with torch.no_grad():
        evaluated = packed.eval()(**batch).item()
    for name, tensor in packed.context.state().items():
        assert torch.equal(tensor, before[name]), name
    # Evaluation quantized the weights with the current scales, so training quantizes them again.
    packed.context.first_microbatch = True
    assert packed.train()(**batch).item() == pytest.approx(evaluated, rel=1e-4)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("recipe", ON_TE)
def test_served_codes_are_those_of_the_forward_products(
    recipe: str, fused: bool, tmp_path: Path
) -> None:
    packed = assemble("qwen3", recipe, fused=fused)
    # Fill the histories of delayed scaling.
    train(packed)
    operands = {}

    class Weights(Probe):
        def weight(self, gemm: Gemm, operand: Any, matrix: Callable) -> None:
            operands[gemm.members] = gemm.codes(operand)

    packed.context.probes = (Weights(),)
    with torch.no_grad():
        packed(**inputs(packs=4, device="cuda", length=LENGTH))
    module = "fused Linear" if fused else "LowPrecisionLinear"
    products = [
        {"name": member, "module": module, "products": {"forward": ""}}
        for members in operands
        for member in members
        if "layers" in member
    ]
    (tmp_path / "audit.json").write_text(json.dumps({"effective": recipe, "products": products}))
    tensors = served_weights(
        tmp_path,
        recipe,
        active_of(recipe).settings,
        build(larger("qwen3")),
        packed.hf.get_parameter,
        packed.context.state(),
    )[0]
    assert len(products) == 14
    for members in {members for members in operands if "layers" in members[0]}:
        key = "weight_packed" if recipe == "nvfp4" else "weight"
        served = torch.cat([tensors[f"{member}.{key}"].view(torch.uint8) for member in members])
        assert torch.equal(served, operands[members].view(torch.uint8)), members
