"""Test fused layers in every precision of Transformer Engine.

Fused layers are as close to BF16 as unfused layers, repeat their bits, and evaluate as they train.
MXFP8 and NVFP4 need a B200.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# Deterministic GEMMs need this variable. It is read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.model import huggingface as model
from pretrain.model.gradients import attach_main_gradients
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import choose_arithmetic, convert, fuse, wrap_layers
from pretrain.observe.product_observer import ProductObserver
from pretrain.precision.gemm import Gemm
from pretrain.precision.product import PrecisionContext, Probe
from pretrain.precision.scope import decide, is_called
from pretrain.precision.selection import make_engines
from pretrain.precision.settings import (
    PRECISIONS,
    ActivePrecision,
    LowPrecisionSettings,
)
from pretrain.run.served import served_weights
from pretrain.settings.recipe import LossSettings, ModelSettings
from tests.gpu.conftest import needs
from tests.pretrain.model.fused.fused_models import (
    ARCHITECTURES,
    build,
    inputs,
    losses_and_gradients,
    significant_parameters,
)

ON_TE = [
    name for name, precision in PRECISIONS.items() if precision.quantized and precision.te_available
]
LENGTH = 256
LARGER = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
train = partial(losses_and_gradients, steps=2, packs=4, device="cuda", length=LENGTH)


def larger(name: str) -> dict[str, Any]:
    """Return the architecture's config with sizes that every precision supports."""
    config = ARCHITECTURES[name]
    if config["model_type"] == "gpt2":
        return config | {"n_embd": 512, "n_inner": 1024, "n_head": 8, "vocab_size": 256}
    heads = {"head_dim": 64} if "head_dim" in config else {}
    return config | LARGER | heads | {"vocab_size": 256}


def assemble(
    config: dict[str, Any],
    recipe: str,
    *,
    fused: bool,
    weights: torch.dtype = torch.bfloat16,
    main: torch.dtype = torch.float32,
    attention: str = "packed_varlen",
    recompute: bool = False,
    keep: tuple[str, ...] = (),
    scope: str = "linear",
) -> PackedLanguageModel:
    """Build a model on the GPU in one precision, with fused or unfused layers.

    Args:
        config: Config of the Hugging Face model.
        recipe: Name of the precision.
        fused: Whether layers are fused.
        weights: Dtype in which weights are stored.
        main: Dtype of the main gradients.
        attention: Name of the attention implementation.
        recompute: Whether layers are recomputed in backward.
        keep: Patterns of linears that stay in BF16.
        scope: `linear` or `linear+head`.
    """
    hf = build(config, torch.float32, "cuda", attention)
    model.round_weights(hf, weights)
    engine = "transformer_engine" if PRECISIONS[needs(recipe)].quantized else "torch"
    precision = PRECISIONS[recipe].with_options(settings_of(recipe, keep, scope))
    active = ActivePrecision(recipe, precision, engine)
    layers = decoder_layers(hf)
    decisions = decide(hf, list(layers.values()), active) if active.precision.quantized else {}
    engines = make_engines([active], torch.device("cuda"))
    context = PrecisionContext(torch.bfloat16, engines, active)
    packed = PackedLanguageModel(hf, attention, LossSettings(chunk=256), context).train()
    if fused:
        arithmetic = choose_arithmetic(active, "cuda", context)
        packed.fused = fuse(layers, {active.name: decisions}, arithmetic)
        assert not packed.fused.left_out
    convert(hf, decisions, context, packed.fused)
    attach_main_gradients(packed, main, packed.fused.stacks if fused else ())
    settings = ModelSettings(config=config, gradient_checkpointing="full" if recompute else "none")
    cast_to = torch.bfloat16 if weights == torch.float32 else None
    wrap_layers(packed, settings, cast_to=cast_to, compile_layers=False)
    return packed


def settings_of(
    recipe: str, keep: tuple[str, ...] = (), scope: str = "linear"
) -> LowPrecisionSettings:
    """Return settings that quantize every layer and round to nearest."""
    nearest = {}
    if "disable_stochastic_rounding" in PRECISIONS[recipe].options:
        nearest = {"disable_stochastic_rounding": True}
    return LowPrecisionSettings(
        keep_bf16=keep, scope=scope, keep_bf16_layers={"last": 0}, **nearest
    ).resolved(recipe)


def cosines(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the cosine similarity of two gradients for each parameter."""
    return {
        name: F.cosine_similarity(actual[name].flatten(), expected[name].flatten(), dim=0).item()
        for name in significant_parameters(expected)
    }


@pytest.fixture(autouse=True)
def needs_transformer_engine() -> None:
    pytest.importorskip("transformer_engine.pytorch")


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
    ],
)
def test_fused_layers_are_as_close_to_bf16_as_unfused_layers(
    name: str, scope: str, keep: tuple[str, ...], recipe: str
) -> None:
    """Norms and SwiGLU write FP8 if a quantized GEMM reads it, else BF16, also in backward."""
    from pretrain.observe.audit import is_expected

    exact = train(assemble(larger(name), "bf16", fused=False))
    fused, unfused = (
        train(assemble(larger(name), recipe, fused=f, keep=keep, scope=scope), steps=4)
        for f in (True, False)
    )
    assert fused[0][-1] == pytest.approx(exact[0][-1], rel=5e-3)
    unfused_cosines = cosines(unfused[1], exact[1])
    for parameter, cosine in cosines(fused[1], exact[1]).items():
        assert 1 - cosine < 1.5 * (1 - unfused_cosines[parameter]) + 0.02, parameter

    packed = assemble(larger(name), recipe, fused=True, keep=keep, scope=scope)
    precision = PRECISIONS[recipe].with_options(settings_of(recipe, scope=scope))
    active = ActivePrecision(recipe, precision, "transformer_engine")
    observer = ProductObserver()
    with observer.observing():
        train(packed, steps=1)
    assert observer.products.keys() - {"lm_head"} == packed.fused.members.keys()
    assert ("lm_head" in observer.products) == (scope == "linear+head")
    kept = {
        linear
        for linear in observer.products
        if any(is_called(linear, pattern) for pattern in keep)
    }
    assert bool(kept) == bool(keep)
    for linear, products in observer.products.items():
        assert {product.gemm for product in products} == {"forward", "dgrad", "wgrad"}
        if linear in kept:
            assert {kind for product in products for kind in (product.left, product.right)} == {
                "bfloat16"
            }, linear
        else:
            assert all(is_expected(product, active) for product in products), products


@pytest.mark.parametrize("name", ["gpt2", "starcoder2", "qwen2"])
def test_fused_bf16_layers_are_as_close_to_fp32_as_unfused_layers(name: str) -> None:
    """Covers gradients of biases and of LayerNorms, which no linear layer's product computes."""
    hf = build(larger(name), torch.float32, "cuda", "packed_sdpa")
    model.round_weights(hf, torch.bfloat16)
    context = PrecisionContext(torch.float32)
    plain = PackedLanguageModel(hf.float(), "packed_sdpa", LossSettings(chunk=256), context)
    exact = train(plain.train(), steps=1)
    fused, unfused = (
        train(assemble(larger(name), "bf16", fused=f), steps=1) for f in (True, False)
    )
    assert fused[0] == pytest.approx(exact[0], rel=2e-3)
    for parameter, gradient in exact[1].items():
        errors = [(results[1][parameter] - gradient).norm() for results in (fused, unfused)]
        assert errors[0] <= 1.2 * errors[1] + 5e-3 * gradient.norm(), parameter


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *((name, recipe) for name in ("qwen3", "gpt2") for recipe in ("bf16", *ON_TE)),
        ("qwen2", "bf16"),
    ],
)
def test_recomputed_layers_have_the_same_bits(name: str, recipe: str) -> None:
    (losses, gradients), (recomputed_losses, recomputed_gradients) = (
        train(assemble(larger(name), recipe, fused=True, recompute=recompute), steps=3)
        for recompute in (False, True)
    )
    assert losses == recomputed_losses
    for parameter, gradient in gradients.items():
        assert torch.equal(gradient, recomputed_gradients[parameter]), parameter


@pytest.mark.parametrize("recipe", ON_TE)
def test_low_precision_evaluation_equals_training_and_keeps_the_state(recipe: str) -> None:
    packed = assemble(larger("qwen3"), recipe, fused=True)
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
    packed = assemble(larger("qwen3"), recipe, fused=fused)
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
        settings_of(recipe),
        build(larger("qwen3")),
        packed.hf.get_parameter,
        packed.context.state(),
    )[0]
    assert len(products) == 14
    for members in {members for members in operands if "layers" in members[0]}:
        key = "weight_packed" if recipe == "nvfp4" else "weight"
        served = torch.cat([tensors[f"{member}.{key}"].view(torch.uint8) for member in members])
        assert torch.equal(served, operands[members].view(torch.uint8)), members
