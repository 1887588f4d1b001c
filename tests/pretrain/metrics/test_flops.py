"""FLOPs compared with values derived by hand and with the products that torch counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from foundation.errors import InputError
from pretrain.metrics.flops import ModelFlops, flops_of_nanogpt
from tests.pretrain.plan.plan_recipe import on_meta

TINY = {
    **{"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96},
    **{"num_hidden_layers": 2, "num_attention_heads": 4},
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}


def test_weights_outside_of_recognized_products_are_listed() -> None:
    model = on_meta(GPT2)
    model.register_parameter("more", torch.nn.Parameter(torch.empty(4, 4, device="meta")))
    assert ModelFlops.of(model).uncounted == ("more",)
    experts = {"num_experts": 4, "moe_topk": [2, 2], "head_dim": 16}
    by_layer = on_meta({"model_type": "hunyuan_v1_moe", **TINY, **experts})
    uncounted = ModelFlops.of(by_layer).uncounted
    assert uncounted and all(".experts." in name for name in uncounted)


TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
COUNTED_BY_TORCH = [
    GPT2,
    TINY | TIED | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    TINY | {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": False},
    TINY | TIED | {"model_type": "qwen2", "num_key_value_heads": 1},
    TINY
    | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 16, "head_dim": 8},
    TINY | EXPERTS | {"model_type": "mixtral", "num_key_value_heads": 4},
    TINY | EXPERTS | {"model_type": "jetmoe", "kv_channels": 16, "num_key_value_heads": 2},
    TINY
    | {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "num_key_value_heads": 4}
    | {"moe_intermediate_size": 16, "moe_layer_start_index": 1, "pad_token_id": 0},
]


@pytest.mark.parametrize("values", COUNTED_BY_TORCH, ids=lambda values: values["model_type"])
def test_counts_equal_the_products_that_torch_counts(values):
    values = dict(values)
    tokens = 24
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(values.pop("model_type"), **values),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    flops = ModelFlops.of(model)
    assert not flops.uncounted
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(tokens)[None], use_cache=False).logits.sum().backward()
    aten = torch.ops.aten
    counted = counter.get_flop_counts()
    matrix = counted["Global"][aten.mm] + counted["Global"].get(aten.addmm, 0)
    assert matrix == flops.per_token_matrix * tokens
    # Some versions of transformers compute rotary angles by an outer product, which belongs to no
    # matrix of the model.
    angles = sum(
        counts.get(aten.bmm, 0) for name, counts in counted.items() if name.endswith("rotary_emb")
    )
    # Eager attention also computes the half that causality masks.
    assert counted["Global"][aten.bmm] - angles == 2 * flops.per_squared_length * tokens**2


MODELS = {
    "GPT-2 124M": {"model_type": "gpt2"},
    "Qwen3-1.7B": {
        **{"model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 28, "head_dim": 128},
        **{"hidden_size": 2048, "intermediate_size": 6144, "tie_word_embeddings": True},
        **{"num_attention_heads": 16, "num_key_value_heads": 8},
    },
    "Llama-3.1-8B": {
        **{"model_type": "llama", "vocab_size": 128256, "num_hidden_layers": 32},
        **{"hidden_size": 4096, "intermediate_size": 14336, "tie_word_embeddings": False},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
}
FORMULAS = {
    "ours": lambda model, length: model.step(length, length**2) / length,
    "nanogpt": flops_of_nanogpt,
}
LENGTHS = {"GPT-2 124M": 1024, "Qwen3-1.7B": 4096, "Llama-3.1-8B": 8192}


def test_flops_md_shows_the_values_of_the_code() -> None:
    """The page derives both definitions by hand."""
    counts = {name: ModelFlops.of(on_meta(values)) for name, values in MODELS.items()}
    page = (Path(__file__).parents[3] / "docs/developers/flops.md").read_text(encoding="utf-8")
    for key, per_token in FORMULAS.items():
        (row,) = re.findall(rf"^\| `{key}` \|(.*)\|$", page, re.MULTILINE)
        shown = [float(cell) for cell in re.findall(r"[\d.]+(?= )", row)]
        assert shown == [
            round(per_token(counts[name], length) / 1e9, 3) for name, length in LENGTHS.items()
        ], key


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [("mamba", "heads"), ("gemma3n_text", "feed_forward"), ("gemma4_text", "head_dim")],
)
def test_a_model_without_equal_attention_layers_is_refused(model_type: str, missing: str) -> None:
    message = f"does not define one value of .*{missing}.* for all layers"
    with pytest.raises(InputError, match=message):
        ModelFlops.of(on_meta({"model_type": model_type}))
