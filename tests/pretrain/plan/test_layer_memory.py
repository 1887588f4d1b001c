"""What a layer is said to take of memory, against what autograd holds of it on a CPU, and by hand for a GPU's formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pretrain.model import huggingface as model
from pretrain.model.attention import backends as attention
from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.wrapping import fuse
from pretrain.plan.memory import LayerMemory, layers_of
from pretrain.precision.emulation import EmulationBackend
from pretrain.precision.product import PrecisionContext
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings
from pretrain.settings.recipe import ModelSettings, Recipe
from tests.pretrain.model.fused.fused_models import ARCHITECTURES, LENGTH, build, inputs

LLAMA_8B = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336} | {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
QWEN3 = {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28} | {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def on_meta(config: dict[str, Any]) -> PreTrainedModel:
    return model.build_on_meta(model.load_config(ModelSettings(config=config)))


def layers(
    config: dict[str, Any],
    precision: str,
    *,
    device: str = "cuda",
    backend: str = "packed_cudnn",
    emulated: bool = False,
    length: int = 4096,
    **changes: Any,
) -> list[LayerMemory]:
    values = {"name": "r", "model": {"source": "m"}, "data": {"packs": "p", "length": length}, "train": {"steps": 1}, **changes}
    recipe = Recipe.model_validate(values)
    computed_by = "torch" if not PRECISIONS[precision].quantized else "emulation" if emulated else "transformer_engine"
    active = ActivePrecision(precision, PRECISIONS[precision], computed_by, recipe.fp8_config.resolved(precision))
    return layers_of(on_meta(config), recipe, active, device, backend)


def bytes_held(config: dict[str, Any], dtype: torch.dtype) -> float:
    """Bytes a token that the graph of a model's first layer holds on a CPU, parameters and rotary tables not among them."""
    hf, batch = build(config, dtype), inputs(packs=2)
    decoder = model.decoder_layers(hf)
    first = next(iter(fuse(decoder, {}, Arithmetic(PrecisionContext(None, dtype))).layers.values()))
    storages: dict[int, Tensor] = {}

    def hold(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def watched(*args: Any, position_embeddings: tuple[Tensor, ...] = (), **kwargs: Any) -> Tensor:
        tables = {"position_embeddings": position_embeddings} if position_embeddings else {}
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            output = first(*args, **tables, **kwargs)
        for tensor in (*hf.parameters(), *position_embeddings):
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        return output

    next(iter(decoder.values())).forward = watched
    tokens = batch["input_ids"].shape[1]
    documents = {name: batch[name] for name in ("cu_seqlens", "max_seqlen")}
    documents["document_mask"] = attention.document_mask(batch["cu_seqlens"], LENGTH, tokens)
    output = hf.base_model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False, **documents)
    assert output.last_hidden_state.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values()) / tokens


@pytest.mark.parametrize(
    ("precision", "options", "bytes_each"),
    [
        *((each, {}, 2) for each in ("delayed", "current", "block", "nvfp4")),
        *((each, {}, 4) for each in ("mxfp8", "mxfp4")),
    ],
)
def test_an_emulated_weight_is_said_to_take_what_the_emulation_holds(
    precision: str, options: dict[str, Any], bytes_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_layer = 2048 * (2048 + 2 * 1024) + 2048 * 2048 + 3 * 2048 * 6144
    said = layers(QWEN3, precision, emulated=True, fp8_config=options)[0]
    assert said.quantized_weights == bytes_each * of_layer
    assert (
        layers(QWEN3, precision, emulated=True, device="cpu", fp8_config=options)[0].quantized_weights
        == 2 * bytes_each * of_layer
    )

    monkeypatch.setattr(EmulationBackend, "operand_dtype", torch.bfloat16)  # as on a GPU
    resolved = LowPrecisionSettings(**options).resolved(precision)
    backend = EmulationBackend(ActivePrecision(precision, PRECISIONS[precision], "emulation", resolved), torch.device("cpu"))
    product, weight = backend.product("w", 256, 256, bias=False), torch.randn(256, 256, dtype=torch.bfloat16)
    with backend.forward():
        product._quantize_weight(weight)
    values = {
        operand.values.untyped_storage().data_ptr(): operand.values.untyped_storage().nbytes() for operand in product.weight
    }
    assert sum(values.values()) == bytes_each * weight.numel()


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_layer_on_a_cpu_is_said_to_keep_what_its_graph_holds(architecture: str, precision: str, dtype: torch.dtype) -> None:
    config = ARCHITECTURES[architecture]
    on = {"model": {"source": "m", "fused": "on"}}
    said = layers(config, precision, device="cpu", backend="packed_sdpa", length=LENGTH, **on)
    assert [layer.fused for layer in said] == [True, True]
    assert {layer.kept for layer in said} == {bytes_held(config, dtype)}


def test_layers_of_the_measured_model_keep_what_their_formats_take() -> None:
    """Hidden and queries 2,048 wide, 4,096 queries, keys and values, 12,288 gates and ups, 16 heads, two RMS norms."""
    shared = 2 * 2048 * 2 + 2 * 4096 + 2 * 2048 + 4 * 16 + 2 * 12_288 + 2 * 4
    operands = 3 * 2048  # of three products; the fourth's is made again
    assert {layer.kept for layer in layers(QWEN3, "bf16")} == {shared + 2 * 2 * 2048}
    for precision in ("delayed", "current"):
        assert {layer.kept for layer in layers(QWEN3, precision)} == {shared + operands}
    assert {layer.kept for layer in layers(QWEN3, "block")} == {shared + (operands + 6144) * 33 // 32}
    assert {layer.kept for layer in layers(QWEN3, "mxfp8")} == {shared + (operands + 6144) * 33 // 32}
    assert {layer.kept for layer in layers(QWEN3, "nvfp4")} == {shared + (operands + 6144) * 9 // 16}


def test_attention_other_than_cudnns_keeps_turned_queries_and_keys_beside_what_norms_read() -> None:
    normed, plain = (
        [layers(config, "bf16", backend=backend)[0].kept for backend in ("packed_varlen", "packed_cudnn")]
        for config in (QWEN3, LLAMA_8B)
    )
    assert normed[0] - normed[1] == 2 * 4096
    assert plain[0] == plain[1]


def test_layers_that_stay_in_bf16_are_counted_in_bf16_and_hold_no_quantized_weights() -> None:
    found = layers(QWEN3, "delayed", fp8_config={"keep_bf16_layers": {"first": 1, "last": 2}})
    low, bf16 = layers(QWEN3, "delayed")[0], layers(QWEN3, "bf16")[0]
    assert found == [bf16, *[low] * 25, bf16, bf16]
    assert low.quantized_weights == 2 * 50_331_648 and bf16.quantized_weights == 0


def test_fp32_weights_are_copied_for_bf16_products_and_only_quantized_for_others() -> None:
    assert layers(QWEN3, "bf16", weights="fp32")[0].working_copies == 2 * 50_331_648
    assert layers(QWEN3, "bf16", weights="bf16_exact")[0].working_copies == 0
    assert layers(QWEN3, "delayed", weights="fp32")[0].working_copies == 0
    assert layers(QWEN3, "fp32", weights="fp32", device="cpu", backend="packed_sdpa")[0].working_copies == 0


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("bf16", {"model": {"source": "m", "fused": "off"}}),
        ("delayed", {"emulated": True}),
        ("fp32", {}),  # on a GPU
    ],
)
def test_where_nothing_is_fused_layers_are_compiled_ones(precision: str, options: dict[str, Any]) -> None:
    assert not any(layer.fused for layer in layers(QWEN3, precision, **options))


def test_a_layer_of_an_unknown_class_is_a_compiled_one() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2}
    assert [layer.fused for layer in layers(config, "bf16")] == [False, False]
