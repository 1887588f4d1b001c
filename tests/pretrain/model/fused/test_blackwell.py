"""Fused layers and the head in MXFP8 and NVFP4, with Transformer Engine's own Python code.

No Blackwell GPU was available. The library's kernels are replaced by emulation
(tests/te_on_a_cpu.py). tests/gpu/test_fused_gpu.py runs the same comparison on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.model.fused import activation_kernel, formulas, rotary_kernel
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import not_fused_because
from pretrain.observe.audit import audit_products
from pretrain.observe.product_observer import ProductObserver
from pretrain.precision.gemm import Gemm
from pretrain.precision.product import Probe
from pretrain.precision.scope import decide
from pretrain.precision.settings import ActivePrecision
from pretrain.run.served import served_weights
from tests.pretrain.conftest import active_everywhere
from tests.pretrain.model.fused import fused_models
from tests.pretrain.model.fused.fused_models import (
    ARCHITECTURES,
    build,
    check_products,
    inputs,
    losses_and_gradients,
    significant_parameters,
)
from tests.te_on_a_cpu import transformer_engine_on_a_cpu

SIZES = {"vocab_size": 128, "tie_word_embeddings": False, "num_key_value_heads": 4}
ON_BLACKWELL = ("mxfp8", "nvfp4")
# Our kernels need a GPU. The formulas that they are tested against replace them and report the same
# supported operands.
ACTIVATION = SimpleNamespace(**vars(formulas) | {"supports": activation_kernel.supports})
ROTARY = SimpleNamespace(**vars(formulas) | {"supports": rotary_kernel.supports})
KERNELS = SimpleNamespace(norm=formulas, rotary=ROTARY, activation=ACTIVATION)
Trained = tuple[list[float], dict[str, Tensor]]


@pytest.fixture(scope="module", autouse=True)
def b200(references: Path) -> Iterator[None]:
    with transformer_engine_on_a_cpu(references):
        yield


def assemble(
    active: ActivePrecision, *, fused: bool, kind: str = "qwen3", **changes: Any
) -> PackedLanguageModel:
    """Build a model. `changes` are changes of its configuration."""
    sizes = {"vocab_size": 128, "tie_word_embeddings": False} if kind == "gpt2" else SIZES
    if fused:
        assert not_fused_because("auto", active, "cuda", torch.bfloat16) is None
    config = ARCHITECTURES[kind] | sizes | changes
    return fused_models.assemble(config, active, fused=fused, kernels=KERNELS)


def train(packed: PackedLanguageModel) -> Trained:
    return losses_and_gradients(packed, steps=2)


@cache
def in_bf16(kind: str = "qwen3") -> Trained:
    return train(assemble(active_everywhere("bf16", "torch"), fused=False, kind=kind))


@pytest.mark.parametrize("precision", ON_BLACKWELL)
def test_linears_and_the_head_equal_the_emulation_bit_for_bit(precision: str) -> None:
    by_library, emulated = (
        train(assemble(active_everywhere(precision, engine), fused=False, num_hidden_layers=1))
        for engine in ("transformer_engine", "emulation")
    )
    assert by_library[0] == emulated[0]
    for name, gradient in emulated[1].items():
        assert torch.equal(by_library[1][name], gradient), name


KEPT: list[tuple[str, tuple[str, ...]]] = [
    ("qwen3", ()),
    ("qwen3", ("down_proj",)),
    ("qwen3", ("gate_proj", "up_proj", "lm_head")),
    ("qwen3", ("[qkv]_proj", "layers.1.*")),
    # biases with and without low precision
    ("qwen2", ("gate_proj", "up_proj", "layers.1.self_attn.[qkv]_proj")),
    ("gpt2", ()),
    ("gpt2", ("mlp.c_proj", "h.1.attn.c_attn")),
    ("gpt2", ("mlp.c_fc", "attn.c_proj")),
    # queries, keys and values with rotation, and an MLP without a gate
    ("starcoder2", ()),
    # a gated GELU with biases
    ("llama with biases", ()),
    # only the MLP is fused
    ("qwen3_5", ("in_proj_[ab]",)),
]
# One case of each precision in which all linears are quantized, and one with some in BF16.
PER_COMMIT = {("mxfp8", 4), ("mxfp8", 9), ("mxfp8", 10), ("nvfp4", 3), ("nvfp4", 5)}


@pytest.mark.parametrize(
    ("precision", "kind", "keep"),
    [
        pytest.param(
            precision, *case, marks=[] if (precision, number) in PER_COMMIT else pytest.mark.nightly
        )
        for precision in ON_BLACKWELL
        for number, case in enumerate(KEPT)
    ],
)
def test_fused_layers_err_as_the_unfused_model_does(
    precision: str, kind: str, keep: tuple[str, ...]
) -> None:
    """Fused layers round less often between products, so that some values get another code.

    Both models differ by less than the error of either.
    """
    active = active_everywhere(precision, "transformer_engine", keep)
    exact = in_bf16(kind)
    packed = assemble(active, fused=True, kind=kind)
    observer = ProductObserver()
    with observer.observing():
        fused = train(packed)
    emulated = active_everywhere(precision, "emulation", keep)
    unfused = train(assemble(emulated, fused=False, kind=kind))
    assert fused[0] == pytest.approx(exact[0], rel=2e-3) and fused[0] != exact[0]
    for name in significant_parameters(exact[1]):
        errors = [(results[1][name] - exact[1][name]).norm() for results in (fused, unfused)]
        difference = fused[1][name] - unfused[1][name]
        assert errors[0] < 1.3 * errors[1] + 0.01 * exact[1][name].norm(), name
        assert difference.norm() < errors[1] + 0.01 * exact[1][name].norm(), name

    assert observer.products.keys() >= packed.fused.members.keys()
    check_products(observer, active, keep)
    # The head is observed if it computes in low precision.
    assert ("lm_head" in observer.products) == ("lm_head" not in keep)


@pytest.mark.parametrize("precision", ON_BLACKWELL)
def test_served_weights_are_the_operands_of_stacked_products(
    precision: str, tmp_path: Path
) -> None:
    """Queries, keys and values share a tensor scale, as gate and up do."""
    active = active_everywhere(precision, "transformer_engine", ("lm_head", "layers.1.*"))
    packed = assemble(active, fused=True)
    decisions = decide(packed.hf, list(decoder_layers(packed.hf).values()), active)
    operands = {}

    class Weights(Probe):
        def weight(self, gemm: Gemm, operand: Any, matrix: Callable) -> None:
            operands[gemm.members] = operand

    packed.context.probes = (Weights(),)
    products = audit_products(
        packed, lambda: packed(**inputs()), decisions, torch.optim.SGD(packed.parameters())
    )
    audit = {"effective": precision, "products": products}
    (tmp_path / "audit.json").write_text(json.dumps(audit))
    hf = build(ARCHITECTURES["qwen3"] | SIZES)
    stored = packed.hf.get_parameter
    tensors = served_weights(tmp_path, precision, active.settings, hf, stored, {})[0]
    stacks = [members for members in operands if members[0].startswith("model.layers.0")]
    assert [len(members) for members in stacks] == [3, 1, 2, 1]
    for members in stacks:
        # The replacement of the kernels stores codes times block scales as the codes.
        operand = operands[members]
        values = operand._rowwise_data.split(
            [len(hf.get_parameter(f"{member}.weight")) for member in members]
        )
        for member, expected in zip(members, values, strict=True):
            scale = tensors[f"{member}.weight_scale"]
            if precision == "nvfp4":
                packed_codes = tensors[f"{member}.weight_packed"]
                codes = torch.stack([packed_codes & 15, packed_codes >> 4], -1).flatten(1)
                magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes.long() & 7]
                served = torch.where(codes > 7, -magnitude, magnitude)
                served *= scale.float().repeat_interleave(16, 1)
                assert tensors[f"{member}.weight_global_scale"] == 1 / operand._amax_rowwise
            else:
                exponents = scale.float() - 127
                served = tensors[f"{member}.weight"].float()
                served *= exponents.exp2().repeat_interleave(32, 1)
            assert torch.equal(served, expected)
