"""FLOPs against closed forms written out by hand, and against the products that torch counts while a small model trains."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from pretrain.metrics.flops import LowPrecisionProducts, ModelFlops
from pretrain.run.doctor import QWEN3_1_7B
from tests.pretrain.metrics.meta_models import on_meta


@pytest.fixture(scope="module")
def qwen3() -> ModelFlops:
    return ModelFlops.of(on_meta(**QWEN3_1_7B))


def test_qwen3_1_7b_costs_what_the_closed_form_says(qwen3: ModelFlops) -> None:
    assert qwen3.parameters == 1_720_574_976
    assert qwen3.per_token_matrix == 10_322_706_432
    assert qwen3.by_part(1, 0)["head"] == 6 * 2048 * 151936
    assert qwen3.step(131_072, 97_000_000) == 10_322_706_432 * 131_072 + 6 * 28 * 2048 * 97_000_000
    assert qwen3.tied and not qwen3.uncounted


def test_weights_in_no_known_product_are_named() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    flops = ModelFlops.of(on_meta("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **small))
    assert any("experts" in name for name in flops.uncounted)


TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}


@pytest.mark.parametrize(
    ("values", "odd"),
    [
        ({"model_type": "hrm_text"}, "4 times the products"),  # runs its layers several times
        ({"model_type": "diffllama", "num_key_value_heads": 2}, "attention is 2 times"),  # with values twice as wide as queries
        ({"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 16}, None),
        ({"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32}, None),
    ],
    ids=lambda values: values["model_type"] if isinstance(values, dict) else "",
)
def test_a_count_that_a_forward_does_not_bear_out_is_none(values: dict, odd: str | None) -> None:
    model = on_meta(**TINY, **values)
    attention, uncounted = model.config._attn_implementation, ModelFlops.of(model).uncounted
    assert any(odd in each for each in uncounted) if odd else not uncounted
    assert model.config._attn_implementation == attention


COUNTED_BY_TORCH = [
    {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True, **TINY},
    {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": False, **TINY},
    {"model_type": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": True, **TINY},
    {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96},
]


@pytest.mark.parametrize("values", COUNTED_BY_TORCH, ids=lambda values: values["model_type"])
def test_counts_agree_with_the_products_that_torch_sees_in_forward_and_backward(values: dict) -> None:
    values, tokens = dict(values), 24
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(values.pop("model_type"), **values), attn_implementation="eager"
    )
    flops = ModelFlops.of(model)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(tokens)[None], use_cache=False).logits.sum().backward()
    mm, addmm, bmm = torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm
    seen = counter.get_flop_counts()
    # Some versions of transformers make the rotary angles by an outer product, which is none of the model's matrices.
    angles = sum(counts.get(bmm, 0) for name, counts in seen.items() if name.endswith("rotary_emb"))
    assert seen["Global"][mm] + seen["Global"].get(addmm, 0) == flops.per_token_matrix * tokens
    # Eager attention also computes the half that causality masks.
    assert seen["Global"][bmm] - angles == 2 * flops.per_squared_length * tokens**2


def test_the_time_at_peak_of_a_mixed_step_is_the_sum_over_its_parts(qwen3: ModelFlops) -> None:
    parts = qwen3.by_part(131_072, 97_000_000)
    in_fp8 = parts["attention projections"] + parts["mlp"]
    weights = sum(matrix.inputs * matrix.outputs for matrix in qwen3.matrices if matrix.part != "head")
    seconds = qwen3.seconds_at_peak(131_072, 97_000_000, 989.5, LowPrecisionProducts(weights, 1979.0))
    in_bf16 = parts["head"] + parts["attention products"]
    assert seconds == pytest.approx(in_fp8 / 1979e12 + in_bf16 / 989.5e12, rel=1e-12)


@given(share=st.floats(0, 1), speedup=st.floats(1, 8), tokens=st.integers(1, 10**6), squared=st.integers(0, 10**9))
def test_faster_products_never_take_longer_and_equal_peaks_change_nothing(
    qwen3: ModelFlops, share, speedup, tokens, squared
) -> None:
    weights = int(share * qwen3.per_token_matrix / 6)
    plain = qwen3.seconds_at_peak(tokens, squared, 989.5)
    assert plain == pytest.approx(qwen3.step(tokens, squared) / 989.5e12)
    assert qwen3.seconds_at_peak(tokens, squared, 989.5, LowPrecisionProducts(weights, 989.5)) == pytest.approx(plain)
    mixed = qwen3.seconds_at_peak(tokens, squared, 989.5, LowPrecisionProducts(weights, 989.5 * speedup))
    assert plain / speedup * (1 - 1e-9) <= mixed <= plain * (1 + 1e-9)
