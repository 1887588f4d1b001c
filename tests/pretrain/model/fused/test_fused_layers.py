"""Fused decoder layers compute what transformers' own do, on the same parameters under the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pretrain.model.export import export
from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.fused.layers import FusedLayers
from pretrain.model.fused.stacked import StackedProduct
from pretrain.model.gradients import attach_main_gradients
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import fuse, wrap_layers
from pretrain.precision.linear import PrecisionContext
from pretrain.settings.recipe import LossSettings, ModelSettings
from tests.pretrain.model.fused.fused_models import ARCHITECTURES, build, inputs


def packed(hf: PreTrainedModel, *, fused: bool, dtype: torch.dtype = torch.float32) -> PackedLanguageModel:
    whole = PackedLanguageModel(hf, "packed_sdpa", LossSettings(chunk=64), PrecisionContext(None, dtype)).train()
    if fused:
        whole.fused = fuse(decoder_layers(hf), {}, Arithmetic(whole.context))
        assert not whole.fused.left_out
    return whole


def loss_and_gradients(whole: PackedLanguageModel) -> tuple[float, dict[str, Tensor]]:
    loss = whole(**inputs())
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in whole.hf.named_parameters()}


def test_loss_and_every_gradient_are_the_unfused_models(config: dict[str, Any]) -> None:
    (loss, gradients), (plain_loss, plain) = (loss_and_gradients(packed(build(config), fused=f)) for f in (True, False))
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert gradients.keys() == plain.keys()
    largest = max(gradient.norm() for gradient in plain.values())
    for name, gradient in plain.items():
        assert (gradients[name] - gradient).norm() <= 2e-6 * largest + 1e-6 * gradient.norm(), name


def test_residuals_added_by_products_change_nothing(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch both ways are one addition of the same two numbers."""
    (loss, gradients) = loss_and_gradients(packed(build(config), fused=True))
    monkeypatch.setattr(StackedProduct, "adds", lambda *_: True)
    (by_products, found) = loss_and_gradients(packed(build(config), fused=True))
    assert by_products == loss and found.keys() == gradients.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())


@pytest.mark.usefixtures("cudnn_on_a_cpu")
@pytest.mark.parametrize("name", ["llama", "qwen3"])  # nothing normed; heads normed
def test_rotation_and_attention_in_one_are_what_they_are_apart(name: str) -> None:
    apart, in_one = (packed(build(ARCHITECTURES[name], backend=b), fused=True) for b in ("packed_sdpa", "packed_cudnn"))
    (loss, gradients), (whole_loss, whole) = loss_and_gradients(apart), loss_and_gradients(in_one)
    assert whole_loss == pytest.approx(loss, rel=1e-6)
    largest = max(gradient.norm() for gradient in gradients.values())
    for parameter, gradient in gradients.items():
        assert (whole[parameter] - gradient).norm() <= 2e-6 * largest + 1e-6 * gradient.norm(), parameter
    with torch.no_grad():
        assert in_one(**inputs()).item() == pytest.approx(loss, rel=1e-6)
    keeping = packed(build(ARCHITECTURES[name], backend="packed_cudnn"), fused=True)
    keeping.fused.arithmetic.keeps_rotated = True
    kept_loss, kept = loss_and_gradients(keeping)
    assert kept_loss == whole_loss and all(torch.equal(gradient, whole[parameter]) for parameter, gradient in kept.items())


def test_parameters_keep_their_names_values_and_identity(config: dict[str, Any]) -> None:
    hf, untouched = build(config), build(config)
    before = dict(hf.named_parameters())
    whole = packed(hf, fused=True)
    assert dict(hf.named_parameters()).keys() == before.keys()
    for name, parameter in hf.named_parameters():
        assert parameter is before[name]
        assert torch.equal(parameter, untouched.get_parameter(name))
    for product in whole.fused.products:
        matrix = product.weights.matrix(torch.float32)
        shares = matrix.untyped_storage().data_ptr() == product.weights.weights[0].untyped_storage().data_ptr()
        assert shares or product.weights.transposed, "a stacked matrix is a view of its parameters"


def test_an_exported_model_is_loaded_by_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    hf = build(config)
    packed(hf, fused=True)
    export(hf, hf.state_dict().__getitem__, None, tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, hf.get_parameter(name)), name


def test_without_packed_documents_a_layer_is_transformers_own(config: dict[str, Any]) -> None:
    """Generation has a cache and no packs."""
    texts = []
    for fused in (True, False):
        hf = build(config)
        packed(hf, fused=fused)
        hf.eval().set_attn_implementation("sdpa")
        texts.append(hf.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=6, do_sample=False, pad_token_id=0))
    assert torch.equal(*texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_add_their_weight_gradients_to_the_main_gradients(config: dict[str, Any], dtype: torch.dtype) -> None:
    """Two microbatches, the second on the working copies of the first: the sum of both, in FP32."""
    whole, plain = packed(build(config), fused=True, dtype=dtype), packed(build(config), fused=False)
    attach_main_gradients(whole, torch.float32, whole.fused.stacks)
    wrap_layers(whole, ModelSettings(config=config), cast_to=dtype, compile_layers=False)
    for seed in (0, 1):
        whole.context.first_microbatch = seed == 0
        plain(**inputs(seed=seed)).backward()
        whole(**inputs(seed=seed)).backward()
    assert all(parameter.grad is None for parameter in whole.parameters())
    close = 1e-5 if dtype == torch.float32 else 0.06
    largest = max(parameter.grad.norm() for parameter in plain.parameters())
    for (name, mine), theirs in zip(whole.named_parameters(), plain.parameters(), strict=True):
        assert mine.main_grad.dtype == torch.float32
        assert (mine.main_grad - theirs.grad).norm() <= close * (theirs.grad.norm() + 0.01 * largest), name


def test_working_copies_are_made_in_the_first_microbatch_and_shared_by_the_rest() -> None:
    hf = build(ARCHITECTURES["qwen3"])
    fused: FusedLayers = fuse(decoder_layers(hf), {}, Arithmetic(PrecisionContext(None, torch.bfloat16)))
    weights = fused.products[0].weights
    first = weights.cached_matrix(torch.bfloat16, refresh=True)
    assert weights.cached_matrix(torch.bfloat16, refresh=False) is first
    assert weights.cached_matrix(torch.bfloat16, refresh=True) is not first
    assert weights.cached_matrix(torch.float32, refresh=False).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "llama", "hidden_act": "gelu"}, "has an activation that is not fused"),
        ({"model_type": "olmo2"}, "no fused form of Olmo2DecoderLayer"),
    ],
)
def test_a_layer_that_cannot_be_fused_is_left_as_it_is_and_says_why(changes: dict[str, Any], reason: str) -> None:
    hf = build(ARCHITECTURES["llama"] | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0) | changes)
    before = [layer.forward for layer in decoder_layers(hf).values()]
    fused = fuse(decoder_layers(hf), {}, Arithmetic(PrecisionContext(None, torch.float32)))
    assert not fused.layers and set(fused.left_out.values()) == {reason}
    assert [layer.forward for layer in decoder_layers(hf).values()] == before
    assert fused.describe() == f"0 of 2 layers; 2 not: {reason}"
