"""The audit accepts models that compute as requested and rejects models that silently do not.

The tests break models on purpose: modules compute in another precision or not at all, and operands
have the format of another precision. docs/developers/faults.md has faults of rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foundation.errors import InputError
from foundation.overrides import overridden
from pretrain.model import packed
from pretrain.model.gradients import attach_main_gradients
from pretrain.observe.audit import is_expected
from pretrain.observe.product_observer import ProductObserver
from pretrain.optimizer.adamw import clear_gradients
from pretrain.precision import gemm
from pretrain.precision.gemm import TorchGemm
from pretrain.precision.settings import WEIGHT_DTYPES
from pretrain.settings.recipe import LossSettings
from tests.pretrain.conftest import QUANTIZED, active_in
from tests.pretrain.observe.test_operand_statistics import SmallModel
from tests.pretrain.verify.faults import replace_lines
from tests.pretrain.verify.small_runs import LENGTH, SmallRun, build_run

FP32 = active_in("fp32", "torch")
BF16 = active_in("bf16", "torch")
# Linears by architecture: q, k, v, o, gate, up and down or c_attn, c_proj, c_fc and c_proj of two
# layers, and the head.
LINEARS = {"qwen3": 2 * 7 + 1, "gpt2": 2 * 4 + 1}


def refusal(observe: Callable[..., object], *arguments: object) -> str:
    """Return the message of the InputError that `observe` raises."""
    with pytest.raises(InputError) as error:
        observe(*arguments)
    return str(error.value)


# ── Without quantization ────────────────────────────────────────────────────────────────


@pytest.fixture
def small(accelerator: Accelerator) -> Callable[..., SmallRun]:
    """Return a function that builds a small run whose linears and head are emulated."""

    def build(precision: str = "current", kind: str = "qwen3", **options: Any) -> SmallRun:
        options = {"weights": "bf16", "scope": "linear+head"} | options
        return build_run(accelerator, precision, kind, **options)

    return build


@pytest.mark.parametrize(
    ("kind", "weights", "precision", "other"),
    [("qwen3", "fp32", FP32, BF16), ("gpt2", "fp32", BF16, FP32), ("qwen3", "bf16", BF16, FP32)],
)
def test_every_linear_is_listed_and_another_precision_is_rejected(
    kind, weights, precision, other, small
):
    run = small(precision.requested, kind, weights=weights)
    before = {module: vars(module).get("forward") for module in run.packed.modules()}
    entries = run.audit()
    expected = {
        name
        for name, module in run.packed.hf.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    assert {entry["name"] for entry in entries} == expected and len(entries) == LINEARS[kind]
    linear = "Linear" if kind == "qwen3" else "Conv1D"
    assert {entry["module"] for entry in entries} == {"LossHead", linear}
    stored, name = WEIGHT_DTYPES[weights], precision.requested
    assert {(entry["stored"], entry["requested"], entry["effective"]) for entry in entries} == {
        (stored, name, name)
    }
    run.packed.context.current = other
    assert f"{len(entries)} of {len(entries)} modules" in refusal(run.audit)
    assert {module: vars(module).get("forward") for module in run.packed.modules()} == before


def test_a_layer_that_computes_in_fp32_is_found(small: Callable) -> None:
    run = small("bf16", weights="fp32")
    layer = run.layers[1]
    # Deletes the wrapper. The forward of the class then multiplies with the FP32 parameters.
    del layer.forward

    def in_fp32(hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Run the layer in FP32 without an error, as autocast or an FP32 norm would."""
        rotary = tuple(table.float() for table in kwargs.pop("position_embeddings"))
        return (
            type(layer)
            .forward(layer, hidden.float(), *args, position_embeddings=rotary, **kwargs)
            .bfloat16()
        )

    layer.forward = in_fp32
    message = refusal(run.audit)
    assert "7 of 15" in message and "layers.0" not in message
    assert "layers.1.self_attn.q_proj (fp32)" in message


def test_unused_linears_and_experts_without_gradient_are_found(small: Callable) -> None:
    run = small("fp32", weights="fp32")
    mlp = run.layers[1].mlp
    scale = nn.Parameter(torch.ones(3))
    run.optimizer.param_groups[0]["params"].append(scale)
    mlp.experts = nn.ModuleList([nn.Module()])
    mlp.experts[0].scale = scale
    run.audit()  # A single expert may have no tokens.
    mlp.experts = nn.Module()
    mlp.experts.scale = scale
    assert "mlp.experts.scale, because" in refusal(run.audit)
    mlp.forward = lambda hidden: hidden
    message = refusal(run.audit)
    assert "3 of 15" in message and "layers.1.mlp.gate_proj (not run)" in message


IN_FP32 = "(bfloat16 x float32)"
DGRAD = "return (left @ right if dx is None else dx).to(dtype)"


@pytest.mark.parametrize(
    ("line", "wrong", "found"),
    [
        (
            "return cublaslt.linear(left, right, bias, residual)",
            "return cublaslt.linear(left.float(), right.float(), bias, residual).bfloat16()",
            IN_FP32,
        ),
        (DGRAD, "return (left.float() @ right.float()).bfloat16()", IN_FP32),
        (
            "cublaslt.add_product_(total, left.t(), right, overwrite=overwrite)",
            "cublaslt.add_product_(total, left.t().float(), right.float(), overwrite=overwrite)",
            IN_FP32,
        ),
        (DGRAD, "return left.new_zeros(len(left), right.shape[1])", "(bf16, dgrad not run)"),
    ],
    ids=["forward", "dgrad", "wgrad", "no dgrad"],
)
def test_a_fused_product_in_fp32_or_without_dgrad_is_found(line, wrong, found, small, monkeypatch):
    run = small("bf16", weights="fp32", fused=True)
    assert {entry["effective"] for entry in run.audit()} == {"bf16"}
    replace_lines(gemm, [(line, [wrong])], monkeypatch)
    message = refusal(run.audit)
    assert "14 of 15 modules" in message
    assert f"layers.0.self_attn.q_proj {found}" in message


# ── Quantized linears ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("precision", "kind"), [*((name, "qwen3") for name in QUANTIZED), ("current", "gpt2")]
)
def test_a_model_that_computes_as_requested_passes(precision, kind, small):
    entries = small(precision, kind).audit()
    assert len(entries) == LINEARS[kind]
    assert {(entry["requested"], entry["effective"], entry["backend"]) for entry in entries} == {
        (precision, precision, "emulation")
    }
    assert all(entry["products"].keys() == {"forward", "dgrad", "wgrad"} for entry in entries)


@pytest.mark.parametrize("main_gradients", [torch.float32, torch.bfloat16])
def test_a_replaced_linear_and_weights_that_would_not_train_are_found(main_gradients, small):
    run = small()
    attach_main_gradients(run.packed, main_gradients)
    trained = run.optimizer.param_groups[0]["params"]
    unknown = trained.pop()
    assert "1 parameters would not be trained" in refusal(run.audit)
    trained.append(unknown)
    clear_gradients(run.optimizer, run.packed)
    run.layers[0].input_layernorm.forward = lambda hidden: hidden
    assert "for example model.layers.0.input_layernorm.weight" in refusal(run.audit)
    skipped = run.layers[1].mlp.up_proj
    plain = nn.Linear(*reversed(skipped.weight.shape), bias=False, device="meta")
    plain.weight = skipped.weight
    run.packed.hf.set_submodule("model.layers.1.mlp.up_proj", plain)
    message = refusal(run.audit)
    assert "1 of 15" in message and "layers.1.mlp.up_proj (dgrad bf" in message


def test_a_backward_in_bf16_is_found(small: Callable) -> None:
    """Straight-through fake quantization has a correct forward but BF16 operands in backward."""
    run = small()
    module = run.layers[0].mlp.down_proj
    quantized = module.forward

    def quantize_forward_only(x: Tensor) -> Tensor:
        plain = F.linear(x, module.weight)
        return plain + (quantized(x) - plain).detach()

    module.forward = quantize_forward_only
    message = refusal(run.audit)
    plain = "dgrad bfloat16 x bfloat16, forward bfloat16 x bfloat16, wgrad"
    assert "1 of 15" in message and f"layers.0.mlp.down_proj ({plain}" in message


@pytest.mark.parametrize("is_quantized", [False, True])
def test_another_product_in_the_forward_of_a_linear_is_found(is_quantized, small):
    run = small(keep_bf16=() if is_quantized else ("up_proj",))
    name = "model.layers.0.mlp.up_proj"
    module = run.packed.hf.get_submodule(name)
    forward = module.forward

    def with_correction(x: Tensor) -> Tensor:
        correction = x.detach().float() @ torch.ones(x.shape[-1], 3)
        return forward(x) + correction.sum(-1, keepdim=True).to(x)

    module.forward = with_correction
    found = "forward float32 x float32" if is_quantized else "bfloat16 x float32"
    message = refusal(run.audit)
    assert "1 of 15" in message and f"{name} ({found})" in message


@pytest.fixture
def mixture(small: Callable) -> Callable:
    return partial(small, kind="qwen3_moe")


def test_experts_and_routers_are_listed_with_their_precision(mixture: Callable) -> None:
    """Both grouped products of a layer have an entry.

    The router computes in FP32 on a CPU.
    """
    run = mixture(scope="linear", keep_bf16=("1.mlp.experts.down_proj",))
    entries = {entry["name"]: entry for entry in run.audit()}
    gate_up, down, router = (
        entries[f"model.layers.1.mlp.{name}"]
        for name in ("experts.gate_up_proj", "experts.down_proj", "gate")
    )
    assert gate_up["module"] == "GroupedExperts" and gate_up["stored"] == "bfloat16"
    assert gate_up["products"]["wgrad"] == "e5m2 tensor-scaled x e4m3 tensor-scaled"
    found = {
        (entry["effective"], entry["backend"], reason in (entry["reason"] or ""))
        for entry, reason in ((down, "keep_bf16"), (entries["lm_head"], "scope"))
    }
    assert found == {("bf16", "torch", True)} and gate_up["effective"] == "current"
    assert router["effective"] == "fp32" and "not a linear" in router["reason"]
    for precision in ("bf16", "current"):  # The router of afmoe contains a linear.
        assert "fp32" in [entry["effective"] for entry in mixture(precision, kind="afmoe").audit()]


def test_experts_that_multiply_unquantized_values_are_found(mixture: Callable) -> None:
    run = mixture("delayed")
    gemms = run.packed.context.engine.gemms
    name = run.layers[0].mlp.experts.stacks["down_proj"].name
    gemms[name] = TorchGemm(name)
    assert "mlp.experts.down_proj" in refusal(run.audit)


# ── In training ─────────────────────────────────────────────────────────────────────────


LOOP = "for index, microbatch in enumerate(batches.microbatches):"


def test_a_head_that_is_unquantized_in_one_microbatch_is_found(small, monkeypatch):
    """The head multiplies in two chunks, so the other microbatches have six of its products."""
    run = small("mxfp8", layers=1, packs_a_microbatch=2, loss=LossSettings(chunk=LENGTH))
    entries = run.audit()
    run.confirm(entries)
    head = run.packed.hf.get_output_embeddings()
    forward = head.forward
    for faulty in (0, 3):
        numbers = count()

        def faulty_forward(*inputs: Tensor, numbers: Any = numbers, faulty: int = faulty) -> Tensor:
            is_low = next(numbers) != faulty
            with overridden(head.state.context, low_precision=is_low):
                return forward(*inputs)

        with overridden(head, forward=faulty_forward):
            message = refusal(run.confirm, entries)
        assert f"in microbatch {faulty + 1} of step 1: lm_head (dgrad not run" in message
    with monkeypatch.context() as patch:
        replace_lines(packed, [(LOOP, [LOOP.replace("microbatches)", "microbatches[1:])")])], patch)
        assert "in microbatch 4 of step 1: model.layers.0" in refusal(run.confirm, entries)


# ── Operands of another format ───────────────────────────────────────────────────────────

CASES = {name: (name, {}) for name in QUANTIZED} | {
    "mxfp8 hybrid": ("mxfp8", {"fp8_format": "HYBRID"}),
    "current e4m3": ("current", {"fp8_format": "E4M3"}),
}
# Both have one scale per tensor. Only parity and the check of the histories tell them apart.
ALIKE = {"delayed", "current"}


@pytest.mark.parametrize("real", CASES)
def test_operands_of_every_other_format_are_found(real: str) -> None:
    name, options = CASES[real]
    run = SmallModel(name, **options)
    observer = ProductObserver()
    with observer.observing():
        run.step()
    products = list(chain(*observer.products.values()))
    assert len(products) == 6
    for claimed, (claimed_name, claimed_options) in CASES.items():
        active = active_in(claimed_name, **claimed_options)
        is_alike = claimed == real or {claimed, real} == ALIKE
        assert all(is_expected(product, active) for product in products) == is_alike, claimed
