"""Packed attention on a CPU: a packed batch against its documents alone, masks, torch.compile, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from packing.errors import InputError
from pretrain import attention

VOCABULARY, LENGTH = 97, 24
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": SMALL | HEADS | {"head_dim": 8, "tie_word_embeddings": True},
    "llama": SMALL | HEADS,
    "qwen2": SMALL | HEADS,
    "mistral": SMALL | HEADS | {"sliding_window": LENGTH},
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0}
    | {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "scale_attn_by_inverse_layer_idx": True},
}

attention.register()


def build(model_type: str, implementation: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(CONFIGS[model_type] | changes))
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def packed(lengths: list[list[int]], spare: int) -> dict[str, Any]:
    """What the model gets for packs of documents of these lengths; every pack's rest is one more document."""
    filled = list(itertools.chain.from_iterable([*pack, LENGTH - sum(pack)] if sum(pack) < LENGTH else pack for pack in lengths))
    ends = list(itertools.accumulate(filled))
    cu_seqlens = torch.tensor([0, *ends, *[ends[-1]] * spare], dtype=torch.int32)
    return {
        "position_ids": torch.cat([torch.arange(n) for n in filled])[None],
        "cu_seqlens": cu_seqlens,
        "max_seqlen": LENGTH,
        "document_mask": attention.document_mask(cu_seqlens, LENGTH, ends[-1]),
        "use_cache": False,
    }


def documents(ids: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    sizes = cu_seqlens.diff()
    return list(ids[0].split(sizes[sizes > 0].tolist()))


pack_lengths = st.lists(st.integers(1, LENGTH), min_size=1, max_size=8).map(
    lambda lengths: [n for n, end in zip(lengths, itertools.accumulate(lengths), strict=True) if end <= LENGTH] or [LENGTH]
)


@pytest.mark.parametrize("model_type", CONFIGS)
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(pack_lengths, min_size=1, max_size=3), spare=st.integers(0, 3))
def test_a_packed_batch_gives_the_logits_and_gradients_of_its_documents_alone(
    model_type: str, lengths: list[list[int]], spare: int
) -> None:
    inputs = packed(lengths, spare)
    ids = torch.randint(VOCABULARY, (1, inputs["position_ids"].shape[1]))
    model, plain = build(model_type, "packed_sdpa"), build(model_type, "eager")

    logits = model(input_ids=ids, **inputs).logits
    expected = torch.cat([plain(document[None]).logits for document in documents(ids, inputs["cu_seqlens"])], dim=1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)

    weights = torch.randn_like(logits) / logits.shape[1]
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_wrong_positions_show_in_a_model_that_learns_them() -> None:
    inputs = packed([[10, 14]], spare=0)
    ids = torch.randint(VOCABULARY, (1, LENGTH))
    model = build("gpt2", "packed_sdpa")
    right = model(input_ids=ids, **inputs).logits
    wrong = model(input_ids=ids, **(inputs | {"position_ids": torch.arange(LENGTH)[None]})).logits
    torch.testing.assert_close(right[:, :10], wrong[:, :10])
    assert (right[:, 10:] - wrong[:, 10:]).abs().max() > 0.1


@given(lengths=st.lists(pack_lengths, min_size=1, max_size=3), spare=st.integers(0, 3))
def test_the_document_mask_is_causal_within_each_document(lengths: list[list[int]], spare: int) -> None:
    inputs = packed(lengths, spare)
    sizes = inputs["cu_seqlens"].diff().tolist()
    whole = torch.block_diag(*[torch.ones(n, n).tril() for n in sizes if n]).bool()
    expected = [whole[i : i + LENGTH, i : i + LENGTH] for i in range(0, len(whole), LENGTH)]
    assert torch.equal(inputs["document_mask"], torch.stack(expected)[:, None])


def test_autocast_with_fp32_parameters_computes_attention_in_bf16() -> None:
    inputs = packed([[10, 14]], spare=1)
    ids = torch.randint(VOCABULARY, (1, LENGTH))
    model = build("qwen3", "packed_sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        half = model(input_ids=ids, **inputs).logits
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), model(input_ids=ids, **inputs).logits, rtol=0, atol=0.05)


def test_layers_compile_whole_and_never_again_when_the_number_of_documents_changes() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, plain = build("qwen3", "packed_sdpa"), build("qwen3", "packed_sdpa")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=counter)

    compiled = []
    for lengths, spare in [([[9, 15]], 2), ([[5, 4, 3, 8]], 7), ([[24]], 3), ([[1] * 24], 1)]:
        inputs = packed(lengths, spare)
        torch._dynamo.mark_dynamic(inputs["cu_seqlens"], 0)
        ids = torch.randint(VOCABULARY, (1, LENGTH))
        logits = model(input_ids=ids, **inputs).logits
        logits.sum().backward()
        torch.testing.assert_close(logits, plain(input_ids=ids, **inputs).logits, rtol=0, atol=1e-5)
        compiled.append(counter.frame_count)
    assert compiled == [compiled[0]] * 4


def test_varlen_is_called_as_this_torch_wants_it_and_keeps_the_shape() -> None:
    query, key = (torch.empty(1, heads, 48, 16, device="meta", dtype=torch.bfloat16) for heads in (4, 2))
    cu_seqlens = torch.empty(5, device="meta", dtype=torch.int32)
    output, _ = attention.packed_varlen(None, query, key, key, None, cu_seqlens=cu_seqlens, max_seqlen=24, scaling=0.25)
    assert output.shape == (1, 48, 4, 16)


def test_a_layer_that_asks_for_what_is_not_computed_is_an_error() -> None:
    states, mask = torch.randn(1, 2, LENGTH, 8), torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    for option in ({"dropout": 0.1}, {"softcap": 30.0}, {"s_aux": torch.zeros(2)}, {"sliding_window": LENGTH - 1}):
        with pytest.raises(ValueError, match=r"packed attention (does not compute|computes no) "):
            attention.packed_sdpa(None, states, states, states, None, max_seqlen=LENGTH, document_mask=mask, **option)


def test_auto_takes_sdpa_on_a_cpu_and_says_why() -> None:
    choice = attention.choose("auto", "cpu", 64, torch.bfloat16)
    assert choice.name == "packed_sdpa"
    assert "varlen needs a CUDA device" in choice.reason


def test_a_backend_asked_for_by_name_that_cannot_run_is_an_error_with_the_remedy() -> None:
    with pytest.raises(InputError, match=r"model.attention: varlen needs a CUDA device.*set model.attention: auto"):
        attention.choose("varlen", "cpu", 64, torch.bfloat16)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mistral", {"sliding_window": LENGTH - 1}, "data.length: 24 is longer than the sliding window"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding window"),
        ("gpt2", {"attn_pdrop": 0.1}, "attn_pdrop 0.1"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
    ],
)
def test_a_model_that_would_be_trained_wrongly_is_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        attention.check(build(model_type, "packed_sdpa", **changes), LENGTH)


@pytest.mark.parametrize(
    ("model_type", "sizes", "message"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 2}, "attention registry"),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}, "attention registry|other than attention"),
        ("gemma2", SMALL | HEADS | {"head_dim": 8, "sliding_window": 64}, "attn_logit_softcapping"),
    ],
)
def test_an_architecture_that_packed_attention_cannot_serve_is_refused(model_type: str, sizes: dict, message: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **({"vocab_size": VOCABULARY} | sizes)))
    with pytest.raises(InputError, match=message):
        attention.check(model, LENGTH)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_the_models_we_train_pass_the_check(model_type: str) -> None:
    attention.check(build(model_type, "packed_sdpa"), LENGTH)
