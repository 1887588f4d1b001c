"""Packed attention on a CPU: a packed batch against its documents alone, masks, torch.compile, and what is refused."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import sys
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.generic import is_flash_attention_requested

from foundation.errors import InputError
from pretrain.model.attention import backends as attention
from pretrain.model.attention import cudnn, flash
from pretrain.model.attention import documents as by_document
from pretrain.model.attention.heads import Heads
from pretrain.precision import transformer_engine
from tests.moments import fork_context

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

LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    "pad_token_id": None,
}
HEADS_OF_QWEN3 = Heads(16, 8, 128)

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


@pytest.mark.parametrize("name", ["packed_sdpa", "packed_documents"])
@pytest.mark.parametrize("model_type", CONFIGS)
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(pack_lengths, min_size=1, max_size=3), spare=st.integers(0, 3))
def test_a_packed_batch_gives_the_logits_and_gradients_of_its_documents_alone(
    model_type: str, name: str, lengths: list[list[int]], spare: int
) -> None:
    inputs = packed(lengths, spare)
    ids = torch.randint(VOCABULARY, (1, inputs["position_ids"].shape[1]))
    model, plain = build(model_type, name), build(model_type, "eager")

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


@pytest.mark.parametrize("name", ["packed_sdpa", "packed_documents", "packed_cudnn"])
def test_layers_compile_whole_and_never_again_when_the_number_of_documents_changes(name: str, cudnn_on_a_cpu: None) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, plain = build("qwen3", name), build("qwen3", "packed_sdpa")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=counter)

    compiled = []
    for lengths, spare in [([[9, 15]], 2), ([[5, 4, 3, 8]], 7), ([[24]], 3), ([[1] * 24], 1)]:
        inputs = packed(lengths, spare)
        torch._dynamo.mark_dynamic(inputs["cu_seqlens"], 0)
        ids = torch.randint(VOCABULARY, (1, LENGTH))
        logits, expected = (m(input_ids=ids, **inputs).logits for m in (model, plain))
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        for m, out in ((model, logits), (plain, expected)):
            m.zero_grad()
            out.square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        compiled.append(counter.frame_count)
    assert compiled == [compiled[0]] * 4


def test_the_cudnn_operator_keeps_what_an_operator_promises(cudnn_on_a_cpu: None) -> None:
    q, k, v = (torch.randn(7, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    arguments = (q, k, v, torch.tensor([0, 4, 7, 7], dtype=torch.int32), 7, 0.3)
    torch.library.opcheck(cudnn._attend, arguments)


def test_nothing_is_differentiated_where_nothing_asks_for_it(cudnn_on_a_cpu: None) -> None:
    q, k, v = (torch.randn(5, 2, 8) for _ in range(3))
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    assert not cudnn.cudnn_attention(q, k, v, offsets, 5, 0.3).requires_grad
    output = cudnn.cudnn_attention(q.requires_grad_(), k, v, offsets, 5, 0.3)
    (gradient,) = torch.autograd.grad(output.sum(), q)
    assert gradient.shape == q.shape and k.grad is None


def test_varlen_is_called_as_this_torch_wants_it_and_keeps_the_shape() -> None:
    query, key = (torch.empty(1, heads, 48, 16, device="meta", dtype=torch.bfloat16) for heads in (4, 2))
    cu_seqlens = torch.empty(5, device="meta", dtype=torch.int32)
    output, _ = attention.packed_varlen(None, query, key, key, None, cu_seqlens=cu_seqlens, max_seqlen=24, scaling=0.25)
    assert output.shape == (1, 48, 4, 16)


def test_a_layer_that_asks_for_what_is_not_computed_is_an_error() -> None:
    states, mask = torch.randn(1, 2, LENGTH, 8), torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    for option in ({"dropout": 0.1}, {"softcap": 30.0}, {"s_aux": torch.zeros(2)}):
        with pytest.raises(InputError, match=r"packed attention (does not compute|computes no) "):
            attention.packed_sdpa(None, states, states, states, None, max_seqlen=LENGTH, document_mask=mask, **option)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    heads=st.sampled_from([(4, 4, 16), (4, 2, 8), (3, 1, 24)]),
    spare=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_documents_alone_attend_as_the_formula_says(
    lengths: list[int], heads: tuple[int, int, int], spare: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    (query, kv, dim), tokens = heads, sum(lengths)
    states = [torch.randn(1, count, tokens, dim, dtype=dtype, requires_grad=True) for count in (query, kv, kv)]
    ends = torch.tensor([0, *itertools.accumulate(lengths), *[tokens] * spare], dtype=torch.int32)
    output, _ = attention.packed_documents(None, *states, None, cu_seqlens=ends, max_seqlen=tokens, scaling=0.3)
    gradient = torch.randn_like(output)
    found = [output, *torch.autograd.grad(output, states, gradient)]

    exact = [each.detach().double().requires_grad_() for each in states]
    q, k, v = (each[0].repeat_interleave(query // each.shape[1], dim=0) for each in exact)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    sees = (document[:, None] == document).tril()
    expected = ((0.3 * q @ k.mT).masked_fill(~sees, -math.inf).softmax(-1) @ v).transpose(0, 1)[None]
    formula = [expected.detach(), *torch.autograd.grad(expected, exact, gradient.double())]
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    largest = max(each.abs().max().item() for each in formula)  # of all: where a token sees itself alone, two sums leave zero
    for mine, theirs in zip(found, formula, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=rounding, atol=rounding * largest)


def test_attention_by_documents_keeps_what_an_operator_promises() -> None:
    q, k, v = (torch.randn(7, 2, 8, requires_grad=True) for _ in range(3))
    torch.library.opcheck(by_document._attend, (q, k, v, torch.tensor([0, 4, 7, 7], dtype=torch.int32), 0.3))


def test_auto_takes_a_document_at_a_time_on_a_cpu_and_says_why() -> None:
    choice = attention.choose("auto", "cpu", HEADS_OF_QWEN3, torch.bfloat16, LENGTH)
    assert choice.name == "packed_documents"
    assert "cudnn needs a CUDA device" in choice.reason and "varlen needs a CUDA device" in choice.reason


@pytest.mark.parametrize("kind", ["varlen", "cudnn"])
def test_a_backend_asked_for_by_name_that_cannot_run_is_an_error_with_the_remedy(kind: str) -> None:
    with pytest.raises(InputError, match=rf"model.attention: {kind} needs a CUDA device.*set model.attention: auto"):
        attention.choose(kind, "cpu", HEADS_OF_QWEN3, torch.bfloat16, LENGTH)


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As a process sees one that has Transformer Engine, which refuses nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(transformer_engine, "missing", lambda: None)
    monkeypatch.setattr(cudnn, "_refusal", lambda *asked: None)
    monkeypatch.setattr(flash, "installed", lambda: False)
    return monkeypatch


def test_auto_takes_flash_attention_4_where_it_is_and_cudnn_elsewhere_on_an_h200(on_an_h200: pytest.MonkeyPatch) -> None:
    def chosen(**refused: str) -> attention.Choice:
        return attention.choose("auto", "cuda", HEADS_OF_QWEN3, torch.bfloat16, 4096, refused)

    name, reason = chosen()
    assert name == "packed_cudnn" and reason.startswith("fastest that runs here: 0.71 of varlen's time on an H200; fa4 needs the")
    on_an_h200.setattr(flash, "installed", lambda: True)
    on_an_h200.setattr(flash, "obstacle", lambda dim: None)
    assert chosen() == ("packed_fa4", "fastest that runs here: steps are 1.5 % shorter than with cudnn on an H200")
    assert chosen(fa4="disagrees").name == "packed_cudnn"


def test_auto_passes_over_cudnn_for_narrow_heads_which_may_ask_for_it_by_name(on_an_h200: pytest.MonkeyPatch) -> None:
    narrow = Heads(8, 8, 32)
    choice = attention.choose("auto", "cuda", narrow, torch.bfloat16, 4096)
    passed_over = "fa4 is not measured with heads of 32; cudnn is not measured with heads of 32"
    assert choice == ("packed_varlen", f"fastest that runs here; {passed_over}")
    assert attention.choose("cudnn", "cuda", narrow, torch.bfloat16, 4096) == ("packed_cudnn", "requested")


def test_flash_attention_4_is_told_where_to_keep_its_kernels_before_anything_can_import_it() -> None:
    """Transformer Engine imports it, and is itself imported by a call, never with our modules."""
    ours, theirs = fork_context.Pipe()
    process = fork_context.Process(target=tell_what_the_launcher_imports, args=(theirs,))
    process.start()
    told, modules = ours.recv()
    process.join()
    assert told.endswith("pretrain/flash_attn_4")
    assert {"train_accelerate", flash.__name__} < modules
    assert not {"transformer_engine", "transformer_engine.pytorch", "flash_attn"} & modules


def tell_what_the_launcher_imports(connection: Connection) -> None:
    """In a process forked from one that has imported the launcher: where the kernels are kept, and all modules that there are."""
    modules = set(sys.modules)
    for key in [key for key in os.environ if key.startswith("FLASH_ATTENTION")]:
        del os.environ[key]
    importlib.reload(flash)
    connection.send((os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"], modules))


def test_flash_attn_is_version_4_where_that_runs_and_version_2_elsewhere(on_an_h200: pytest.MonkeyPatch) -> None:
    def named() -> str:
        return attention.choose("flash_attn", "cuda", HEADS_OF_QWEN3, torch.bfloat16, 4096).name

    with pytest.raises(InputError, match="flash_attn needs the package flash-attn-4, or flash-attn on GPUs before Hopper: pip"):
        named()
    on_an_h200.setattr(attention, "flash_attn_varlen_func", lambda *_: None)
    assert named() == "packed_fa2"
    on_an_h200.setattr(flash, "installed", lambda: True)
    on_an_h200.setattr(flash, "_kernels", lambda: None)
    assert named() == "packed_fa4"
    with pytest.raises(InputError, match="flash_attn 4 disagrees; name another"):
        refused = {"fa4": "disagrees"}
        attention.choose("flash_attn", "cuda", HEADS_OF_QWEN3, torch.bfloat16, 4096, refused)
    on_an_h200.setattr(transformer_engine, "missing", lambda: "Transformer Engine, which is not installed")
    assert attention.choose("auto", "cuda", HEADS_OF_QWEN3, torch.bfloat16, 4096).name == "packed_fa4"
    on_an_h200.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert named() == "packed_fa2"


def test_why_flash_attention_4_is_not_taken_names_the_version_once(on_an_h200: pytest.MonkeyPatch) -> None:
    on_an_h200.setattr(flash, "installed", lambda: True)

    def asked(setting: attention.Attention) -> attention.Choice:
        return attention.choose(setting, "cuda", HEADS_OF_QWEN3, torch.bfloat16, 4096)

    def fail() -> None:
        raise ImportError("no libcuda.so")

    on_an_h200.setattr(flash, "_kernels", fail)
    assert "; fa4 needs the package flash-attn-4, which cannot be imported: no libcuda.so" in asked("auto").reason
    on_an_h200.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    on_an_h200.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert "; fa4 needs an sm_90 or sm_100 GPU, this is NVIDIA A100" in asked("auto").reason
    with pytest.raises(InputError, match=r"^model.attention: flash_attn 4 needs an sm_90 or sm_100 GPU, this is NVIDIA A100; or"):
        asked("flash_attn")


def test_flash_attention_4_is_not_taken_on_a_b200_for_heads_that_it_has_for_hopper_alone(on_an_h200: pytest.MonkeyPatch) -> None:
    on_an_h200.setattr(flash, "installed", lambda: True)
    on_an_h200.setattr(flash, "_kernels", lambda: None)

    def chosen(dim: int) -> attention.Choice:
        return attention.choose("auto", "cuda", Heads(16, 8, dim), torch.bfloat16, 4096)

    dims = (64, 128, 136, 192, 248, 256)
    assert {chosen(dim).name for dim in dims} == {"packed_fa4"}
    on_an_h200.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert [dim for dim in dims if chosen(dim).name == "packed_fa4"] == [64, 128, 256]
    assert "fa4 has no kernel for heads of 192 on Blackwell" in chosen(192).reason and chosen(192).name == "packed_cudnn"


def test_flash_attention_4_is_taken_on_a_b200_for_heads_of_256_whose_bits_are_to_repeat(on_an_h200: pytest.MonkeyPatch) -> None:
    """The version that is pinned has a backward of its own for them, which always repeats its bits; the trial asks it again."""
    on_an_h200.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    on_an_h200.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    on_an_h200.setattr(flash, "installed", lambda: True)
    on_an_h200.setattr(flash, "_kernels", lambda: None)
    for asked in ("auto", "flash_attn"):
        assert attention.choose(asked, "cuda", Heads(16, 8, 256), torch.bfloat16, 4096).name == "packed_fa4"


@pytest.mark.parametrize("heads", [Heads(6, 2, 16), Heads(4, 1, 16), Heads(3, 3, 16)], ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "transposed", "expanded"])
def test_the_backward_of_heads_apart_is_that_of_all_in_one_call(
    flash_attention_4_on_a_cpu: SimpleNamespace, heads: Heads, kind: str
) -> None:
    """Also of a gradient that is a view, and with the last slots empty."""
    tokens, generator = 40, torch.Generator().manual_seed(0)
    ends = torch.tensor([0, 1, 17, 40, 40, 40], dtype=torch.int32)
    q, k, v = (torch.randn(tokens, n, 16, generator=generator, dtype=torch.float64) for n in (heads.query, heads.kv, heads.kv))
    d_output = {
        "contiguous": torch.randn(tokens, heads.query, 16, generator=generator, dtype=torch.float64),
        "transposed": torch.randn(heads.query, 16, tokens, generator=generator, dtype=torch.float64).permute(2, 0, 1),
        "expanded": torch.randn(1, 1, 1, generator=generator, dtype=torch.float64).expand(tokens, heads.query, 16),
    }[kind]
    output, log_sums = flash.flash_forward(q, k, v, ends, tokens, 0.25)
    states = (d_output, q, k, v, output, log_sums, ends, tokens, 0.25)
    expected, apart = (flash.flash_backward_in_parts(*states, apart=apart) for apart in (False, True))
    group = heads.query // heads.kv
    assert [part.shape for part in apart[1:]] == [(tokens, heads.kv, group, 16) if group > 1 else k.shape] * 2
    for summed in (flash.flash_backward(*states), [part.sum(2) if part.dim() == 4 else part for part in apart]):
        for one, other in zip(summed, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
            assert one.is_contiguous()


def test_heads_are_apart_where_documents_are_short_with_empty_slots_among_them(
    flash_attention_4_on_a_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "LONG", 32)
    q, k = torch.zeros(32, 2, 8), torch.zeros(32, 1, 8)
    for ends, apart in (([0, 32], False), ([0, 16, 32], True), ([0, 32, 32], True)):
        offsets = torch.tensor(ends, dtype=torch.int32)
        _, dk, dv = flash.flash_backward_in_parts(q, q, k, k, q, torch.zeros(2, 32), offsets, 32, 1.0)
        assert dk.dim() == dv.dim() == (4 if apart else 3)


def test_where_bits_are_to_repeat_flash_attention_is_asked_for_its_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(attention, "flash_attn_varlen_func", lambda q, *_, deterministic, **__: asked.append(deterministic) or q)
    states = torch.zeros(1, 2, 8, 16)
    for repeats in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda repeats=repeats: repeats)
        attention.packed_fa2(None, states, states, states, None, max_seqlen=8)
    assert asked == [False, True]


def test_where_bits_are_to_repeat_auto_takes_what_has_a_fixed_order_and_fits(on_an_h200: pytest.MonkeyPatch) -> None:
    on_an_h200.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    on_an_h200.setattr(flash, "_kernels", lambda: None)
    for there, name in ((False, "packed_varlen"), (True, "packed_fa4")):
        on_an_h200.setattr(flash, "installed", lambda there=there: there)
        choice = attention.choose("auto", "cuda", HEADS_OF_QWEN3, torch.bfloat16, 4096)
        assert choice.name == name and ("cudnn has no deterministic backward on sm_90" in choice.reason) == (not there)
    with pytest.raises(InputError, match=r"cudnn has no .* fit: set deterministic: false; or set model.attention: auto"):
        attention.choose("cudnn", "cuda", HEADS_OF_QWEN3, torch.bfloat16, 4096)


def test_transformers_does_not_take_our_names_for_kernels_of_its_own() -> None:
    attention.register()
    ours = [name for name in AttentionInterface().valid_keys() if name.startswith("packed_")]
    assert len(ours) == 6 and not any(is_flash_attention_requested(requested_attention_implementation=name) for name in ours)


def test_fp32_on_a_gpu_is_left_to_sdpa(on_an_h200: pytest.MonkeyPatch) -> None:
    choice = attention.choose("auto", "cuda", HEADS_OF_QWEN3, torch.float32, 4096)
    assert choice.name == "packed_sdpa" and "cudnn needs bf16 and the run computes in float32" in choice.reason


def test_what_stands_in_cudnns_way_is_named_and_auto_goes_on_to_varlen(on_an_h200: pytest.MonkeyPatch) -> None:
    def refused_with(message: str) -> None:
        with pytest.raises(InputError, match=rf"model.attention: cudnn {message}.*; or set model.attention: auto"):
            attention.choose("cudnn", "cuda", HEADS_OF_QWEN3, torch.bfloat16, 4096)
        choice = attention.choose("auto", "cuda", HEADS_OF_QWEN3, torch.bfloat16, 4096)
        assert choice.name == "packed_varlen" and "; cudnn " in choice.reason

    asked_of: list[Any] = []
    on_an_h200.setattr(cudnn, "_refusal", lambda *asked: asked_of.append(asked) or "head_dim_qk is odd")
    refused_with("is refused by Transformer Engine: head_dim_qk is odd")
    assert set(asked_of) == {(HEADS_OF_QWEN3, 4096, torch.bfloat16)}
    on_an_h200.setattr(transformer_engine, "missing", lambda: "Transformer Engine, which is not installed")
    refused_with("needs Transformer Engine, which is not installed")
    on_an_h200.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    refused_with("has no deterministic backward on sm_90")
    on_an_h200.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    refused_with("needs an sm_90 or sm_100 GPU, this is NVIDIA H200")


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
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
        ("gemma2", SMALL | HEADS | {"head_dim": 8, "sliding_window": 64}, "attn_logit_softcapping.*name another model"),
        ("gpt_oss", SMALL | HEADS | {"head_dim": 8, "sliding_window": 64}, "attends in a way of its own"),
        ("phi3", SMALL | HEADS | LONGROPE, "longrope, .* longer than 16, and `data.length` is 24; set it to 16 or less"),
    ],
)
def test_an_architecture_that_packed_attention_cannot_serve_is_refused(model_type: str, sizes: dict, message: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **({"vocab_size": VOCABULARY} | sizes)))
    with pytest.raises(InputError, match=message):
        attention.check(model, LENGTH)


def test_a_layer_that_hands_on_no_offsets_is_refused() -> None:
    """As Nemotron's, which gives its attention nothing beyond what it knows."""
    states = torch.zeros(1, 2, 8, 4)
    with pytest.raises(InputError, match="Linear does not tell its attention where documents end"):
        attention.packed_sdpa(torch.nn.Linear(1, 1), states, states, states, None, scaling=1.0)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_the_models_we_train_pass_the_check(model_type: str) -> None:
    attention.check(build(model_type, "packed_sdpa"), LENGTH)
