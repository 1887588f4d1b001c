"""The audit, on models that keep their promise and on models that break it without a word."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from foundation.errors import InputError
from packing.batch import build_microbatch
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.precision.registry import PRECISIONS
from pretrain.precision.settings import ActivePrecision, LowPrecisionSettings
from pretrain.verify import audit

FP32, BF16 = (ActivePrecision(name, PRECISIONS[name], "torch", LowPrecisionSettings()) for name in ("fp32", "bf16"))
LINEARS = {"qwen3": 2 * 7 + 1, "gpt2": 2 * 4 + 1}  # q, k, v, o, gate, up, down; c_attn, c_proj, c_fc, c_proj; and the head


@pytest.fixture
def inputs(random_packs: Callable) -> dict:
    return inputs_of(build_microbatch(random_packs([[5, 11]], 16), mask_boundaries=True), torch.device("cpu"))


def observe(packed: PackedLanguageModel, inputs: dict, active: ActivePrecision) -> list[audit.Entry]:
    return audit.observe(packed, lambda: packed(**inputs), active)


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize(
    ("weights", "cast_to", "recipe", "stored"),
    [
        (torch.float32, None, FP32, "float32"),
        (torch.float32, torch.bfloat16, BF16, "float32"),
        (torch.bfloat16, None, BF16, "bfloat16"),
    ],
)
def test_every_linear_is_listed_with_what_it_stores_and_what_it_computes_in(
    kind: str, weights: torch.dtype, cast_to: torch.dtype | None, recipe: object, stored: str, build_model: Callable, inputs: dict
) -> None:
    packed = build_model(kind, weights=weights, cast_to=cast_to)
    entries = observe(packed, inputs, recipe)
    assert len(entries) == LINEARS[kind]
    expected = {name for name, module in packed.hf.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    assert {entry["name"] for entry in entries} == expected and "lm_head" in expected
    assert {entry["module"] for entry in entries} == {"LossHead", "Linear" if kind == "qwen3" else "Conv1D"}
    assert {entry["stored"] for entry in entries} == {stored}
    assert {(entry["requested"], entry["effective"]) for entry in entries} == {(recipe.requested, recipe.requested)}


def refusal(packed: PackedLanguageModel, inputs: dict, recipe: object) -> str:
    with pytest.raises(InputError) as error:
        observe(packed, inputs, recipe)
    return str(error.value)


@pytest.mark.parametrize("kind", LINEARS)
def test_a_model_in_another_precision_than_asked_for_is_refused(kind: str, build_model: Callable, inputs: dict) -> None:
    count = LINEARS[kind]
    assert f"precision 'bf16': {count} of {count} modules" in refusal(build_model(kind), inputs, BF16)
    assert f"precision 'fp32': {count} of {count}" in refusal(build_model(kind, weights=torch.bfloat16), inputs, FP32)


def test_a_layer_without_working_copies_is_found(build_model: Callable, inputs: dict) -> None:
    packed = build_model(cast_to=torch.bfloat16)
    layer = packed.hf.base_model.layers[1]
    del layer.forward  # the wrapper; the class's own forward comes back, on FP32 parameters

    def in_fp32(hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """What autocast, or a norm kept in FP32, makes of such a layer: it runs, in FP32, and nobody is told."""
        rotary = tuple(each.float() for each in kwargs.pop("position_embeddings"))
        return type(layer).forward(layer, hidden.float(), *args, position_embeddings=rotary, **kwargs).bfloat16()

    layer.forward = in_fp32
    message = refusal(packed, inputs, BF16)
    assert "7 of 15" in message
    assert "layers.1.self_attn.q_proj (fp32)" in message and "layers.0" not in message


def test_a_cast_inside_a_linear_s_forward_is_found(build_model: Callable, inputs: dict) -> None:
    packed = build_model(cast_to=torch.bfloat16)
    linear = packed.hf.base_model.layers[0].mlp.up_proj
    linear.forward = lambda x: F.linear(x.float(), linear.weight.float()).to(x.dtype)
    assert "1 of 15 modules did not run in it as they should: model.layers.0.mlp.up_proj (bfloat16 x float32)" in refusal(
        packed, inputs, BF16
    )


def test_a_head_that_gets_fp32_is_found(build_model: Callable, inputs: dict) -> None:
    packed = build_model(cast_to=torch.bfloat16)
    norm = packed.hf.base_model.norm
    cast = norm.forward
    norm.forward = lambda hidden: cast(hidden).float()
    assert "1 of 15 modules did not run in it as they should: lm_head (fp32)" in refusal(packed, inputs, BF16)


def test_a_linear_that_never_ran_is_found(build_model: Callable, inputs: dict) -> None:
    packed = build_model()
    packed.hf.base_model.layers[1].mlp.forward = lambda hidden: hidden
    message = refusal(packed, inputs, FP32)
    assert "3 of 15" in message and "layers.1.mlp.gate_proj (not run)" in message


def test_observing_leaves_no_hook_and_no_gradient(build_model: Callable, inputs: dict) -> None:
    packed = build_model()
    observe(packed, inputs, FP32)
    refusal(packed, inputs, BF16)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in packed.modules())
    assert all(parameter.grad is None for parameter in packed.parameters())


def test_compiled_layers_are_observed_without_being_compiled(build_model: Callable, inputs: dict) -> None:
    packed = build_model(cast_to=torch.bfloat16)
    for layer in packed.hf.base_model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    assert len(observe(packed, inputs, BF16)) == 15
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_people_read_a_row_a_kind_of_linear(build_model: Callable, inputs: dict) -> None:
    products = observe(build_model(cast_to=torch.bfloat16), inputs, BF16)
    products[0] = products[0] | {"stored": "bfloat16"}  # q_proj of layer 0
    loss, attention = {"kind": "chunked", "chunk": 4096}, {"kind": "packed_sdpa", "reason": "requested"}
    whole = {"gradients": "fp32", "fused": "nothing: model.fused is off", "compiled": "nothing"}
    rows = audit.rows({"products": products, "attention": attention, "loss": loss, **whole})
    assert rows | whole == rows
    assert rows["up_proj"] == "2 x Linear, weights float32, products bf16"
    assert rows["lm_head"] == "1 x LossHead, weights float32, products bf16"
    assert rows["q_proj"] == "1 x Linear, weights bfloat16, products bf16; 1 x Linear, weights float32, products bf16"
    assert (rows["attention"], rows["loss"]) == ("kind packed_sdpa, reason requested", "kind chunked, chunk 4096")
