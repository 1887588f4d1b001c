"""Packed attention on a CPU: compilation, the choice of a backend, and rejected architectures."""

from __future__ import annotations

import importlib
import itertools
import sys
import warnings
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AttentionInterface
from transformers.utils.generic import is_flash_attention_requested

from foundation.errors import InputError
from pretrain.model import attention, attention_backends
from pretrain.model.attention_backends import Case
from pretrain.model.configuration import load_config
from pretrain.model.huggingface import build_on_meta, check_architecture
from pretrain.precision import transformer_engine
from pretrain.settings.recipe import LossSettings, ModelSettings
from tests.pretrain.conftest import RESULTS, attend_alone
from tests.pretrain.small_models import build_model

NIGHTLY = pytest.mark.nightly
VOCABULARY, LENGTH = 61, 24
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"max_position_embeddings": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    "pad_token_id": None,
}


@pytest.mark.parametrize("name", [pytest.param("packed_sdpa", marks=NIGHTLY), "packed_fa4"])
def test_layers_compile_once_for_any_number_of_documents(
    name: str, flash_attention_4_on_a_cpu: SimpleNamespace
) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # The import takes half a second.

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, plain = (
        build_model(backend=name, initializer_range=0.02).hf for name in (name, "packed_sdpa")
    )
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=counter)

    compiled = []
    for lengths, spare in [([9, 15], 2), ([5, 4, 3, 8, 4], 7), ([24], 3), ([1] * 24, 1)]:
        ends = list(itertools.accumulate([0, *lengths]))
        inputs = {
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
            "cu_seqlens": torch.tensor([*ends, *[LENGTH] * spare], dtype=torch.int32),
            "max_seqlen": LENGTH,
            "use_cache": False,
        }
        torch._dynamo.mark_dynamic(inputs["cu_seqlens"], 0)
        ids = torch.randint(VOCABULARY, (1, LENGTH))
        logits, expected = (
            module(
                input_ids=ids,
                documents=attention.documents_for(backend, inputs["cu_seqlens"], LENGTH, LENGTH),
                **inputs,
            ).logits
            for module, backend in ((model, name), (plain, "packed_sdpa"))
        )
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        for module, outputs in ((model, logits), (plain, expected)):
            module.zero_grad()
            outputs.square().sum().backward()
        for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-4, atol=1e-5)
        compiled.append(counter.frame_count)
    assert compiled == [compiled[0]] * 4


def test_flash_attention_passes_torchs_operator_checks(
    flash_attention_4_on_a_cpu: SimpleNamespace,
) -> None:
    q, k, v = (torch.randn(7, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    torch.library.opcheck(
        torch.ops.pretrain.packed_fa4,
        (q, k, v, torch.tensor([0, 4, 7, 7], dtype=torch.int32), 7, 0.3),
    )


@given(st.lists(st.integers(1, 150), min_size=1, max_size=6), st.integers(0, 20))
def test_document_bounds_are_right_for_each_token(lengths: list[int], spare: int) -> None:
    sizes = torch.tensor(lengths)
    last = sizes.cumsum(0)
    cu_seqlens = torch.cat([torch.zeros(1), last, last[-1:].repeat(spare)]).int()
    starts, ends = attention.document_bounds(cu_seqlens, sum(lengths))
    assert torch.equal(starts, (last - sizes).repeat_interleave(sizes).int())
    assert torch.equal(ends, last.repeat_interleave(sizes).int())


def test_attention_without_document_boundaries_raises() -> None:
    states = torch.randn(1, 2, LENGTH, 8)
    with pytest.raises(InputError, match="document boundaries"):
        AttentionInterface()["packed_sdpa"](torch.nn.Linear(1, 1), states, states, states, None)


# ── Documents apart from each other ────────────────────────────────────────────────────


def varlen_attn_on_a_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """Compute torch's attention for variable lengths, which has no kernel for a CPU."""
    assert torch.equal(cu_seq_q, cu_seq_k) and cu_seq_q.diff().max() <= max_q == max_k
    is_grouped = query.shape[1] != key.shape[1]
    assert enable_gqa == (is_grouped and attention.VARLEN_HAS_GQA_FLAG) and window_size[1] == 0
    lengths = cu_seq_q.diff().tolist()
    outputs = []
    for q, k, v in zip(*(states.split(lengths) for states in (query, key, value)), strict=True):
        place = torch.arange(len(q))
        distance = place[:, None] - place
        last = len(q) if window_size[0] < 0 else window_size[0]
        mask = (distance >= 0) & (distance <= last)
        q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=is_grouped
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.usefixtures("flash_attention_4_on_a_cpu", "cudnn_on_a_cpu")
@pytest.mark.parametrize(
    "name", ["packed_sdpa", "packed_documents", "packed_varlen", "packed_fa4", "packed_cudnn"]
)
@pytest.mark.parametrize(
    "lengths", [[24], [5, 9, 1, 9, 17, 7], [3, 21, 1, 23, 22, 2], [1] * 10 + [14, 12, 12]], ids=str
)
def test_each_document_has_the_attention_of_this_document_alone(
    lengths: list[int], name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leak at one boundary changes only the two documents beside it."""
    monkeypatch.setattr(attention, "varlen_attn", varlen_attn_on_a_cpu)
    ends = list(itertools.accumulate([0, *lengths]))
    cu_seqlens = torch.tensor([*ends, ends[-1], ends[-1]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_output = (torch.randn(ends[-1], n, 8, generator=generator) for n in (4, 2, 2, 4))
    leaves = [states.transpose(0, 1)[None].requires_grad_() for states in (q, k, v)]
    output, _ = AttentionInterface()[name](
        None,
        *leaves,
        None,
        cu_seqlens=cu_seqlens,
        max_seqlen=LENGTH,
        documents=attention.documents_for(name, cu_seqlens, LENGTH, ends[-1]),
        scaling=0.4,
        sliding_window=window,
    )
    gradients = torch.autograd.grad(output, leaves, d_output[None])
    packed_results = [output[0], *(gradient[0].transpose(0, 1) for gradient in gradients)]
    results = zip(*(tensor.split(lengths) for tensor in packed_results), strict=True)
    documents = zip(*(tensor.split(lengths) for tensor in (q, k, v, d_output)), strict=True)
    for document, result in zip(documents, results, strict=True):
        alone = attend_alone(*document, 0.4, window)
        for actual, name in zip(result, RESULTS, strict=True):
            torch.testing.assert_close(actual, alone[name].float(), rtol=1e-4, atol=1e-5)


# ── Choice of a backend ────────────────────────────────────────────────────────────────


def test_warnings_of_the_compiler_of_flash_attention_are_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["flash_attn.cute"], "interface", None, raising=False)
    monkeypatch.setattr(transformer_engine, "unmet_need", lambda: None)
    modules = ("cutlass.cute.core", "flash_attn.cute.flash_fwd", "cutlasses", "train_accelerate")
    with warnings.catch_warnings(record=True, action="always") as shown:
        attention.flash_kernels.__wrapped__()
        for module in modules:
            warnings.warn_explicit(module, DeprecationWarning, "file.py", 1, module=module)
    assert [str(warning.message) for warning in shown] == ["cutlasses", "train_accelerate"]


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make the process see an H200 with Transformer Engine and FlashAttention-4."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(transformer_engine, "unmet_need", lambda: None)
    monkeypatch.setattr(attention, "flash_kernels", lambda: None)
    return monkeypatch


def chosen(
    requested: Any = "auto",
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    mean_length: float = 4096.0,
    device: str = "cuda",
) -> str:
    """Check and choose a backend as a run does. Return the name without its prefix."""
    case = Case(device, dim, dtype)
    if refusal := attention_backends.refusal_of(requested, case):
        raise InputError(refusal)
    choice = attention_backends.choose(requested, case, mean_length)
    return choice.name.removeprefix("packed_")


BLACKWELL = (torch.cuda, "get_device_capability", lambda: (10, 0))
NO_FLASH = (attention, "flash_kernels", partial(importlib.import_module, "there_is_no_such_module"))
DETERMINISTIC = (torch, "are_deterministic_algorithms_enabled", lambda: True)
NO_TE = (transformer_engine, "unmet_need", lambda: "a package")
SHORT = {"mean_length": 300.0}


@pytest.mark.parametrize(
    ("machine", "request_and_model", "expected"),
    [
        *(([], {"dim": dim}, "fa4") for dim in (64, 128, 136, 192, 248, 256)),
        ([], {"dtype": torch.float32}, "sdpa"),
        *(([NO_FLASH], {"dim": dim}, "cudnn") for dim in (64, 128)),
        *(([NO_FLASH], {"dim": dim}, "varlen") for dim in (32, 96, 136, 256)),
        ([NO_FLASH], {"requested": "flash_attn"}, r"model.attention: flash_attn.*flash-attn-4"),
        ([NO_FLASH, DETERMINISTIC], {"dim": 136}, "varlen"),
        ([DETERMINISTIC], {"requested": "cudnn"}, "model.attention: cudnn.*deterministic: false"),
        ([NO_FLASH, NO_TE, BLACKWELL], {}, "varlen"),
        ([NO_TE], {"requested": "cudnn"}, "model.attention: cudnn.*needs Transformer Engine"),
        # Our kernels, where they were measured to be faster.
        *(([], {"dim": dim} | SHORT, "triton") for dim in (64, 128)),
        *(([NO_FLASH], {"dim": dim, "mean_length": 2000.0}, "triton") for dim in (64, 128)),
        ([NO_FLASH, NO_TE], {"mean_length": 4096.0}, "triton"),
        ([NO_FLASH, NO_TE], {"mean_length": 4100.0}, "varlen"),
        ([], {"dim": 96} | SHORT, "fa4"),
        ([], {"dim": 32} | SHORT, "varlen"),
        ([], {"mean_length": 1200.0}, "fa4"),
        ([], {"dim": 64, "dtype": torch.float32} | SHORT, "sdpa"),
        ([BLACKWELL], {"dim": 64} | SHORT, "fa4"),
        *(([], {"requested": "triton", "dim": dim}, "triton") for dim in (64, 128)),
        ([], {"requested": "triton", "dim": 100}, "attention: triton.*heads of 64 or 128"),
        ([], {"device": "cpu", "dim": 64} | SHORT, "documents"),
    ],
)
def test_the_fastest_supported_backend_is_chosen(
    machine: list[tuple],
    request_and_model: dict[str, Any],
    expected: str,
    on_an_h200: pytest.MonkeyPatch,
) -> None:
    """A choice that is refused has a message with the expected words."""
    for change in machine:
        on_an_h200.setattr(*change)
    if ":" not in expected:
        assert chosen(**request_and_model) == expected
        return
    with pytest.raises(InputError, match=expected):
        chosen(**request_and_model)


def test_the_reason_of_a_choice_names_the_missing_package(on_an_h200: pytest.MonkeyPatch) -> None:
    on_an_h200.setattr(*NO_FLASH)
    choice = attention_backends.choose("auto", Case("cuda", 128, torch.bfloat16), 4096.0)
    assert "; flash_attn needs the package flash-attn-4 (pip install -r " in choice.reason


def test_transformers_does_not_mistake_our_names_for_flash_attention() -> None:
    names = [name for name in AttentionInterface().valid_keys() if name.startswith("packed_")]
    assert len(names) == 6 and not any(
        is_flash_attention_requested(requested_attention_implementation=name) for name in names
    )


# ── FlashAttention-4 ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("kind", ["contiguous", "transposed", "expanded"])
def test_the_backward_in_parts_equals_the_backward_in_one_call(
    flash_attention_4_on_a_cpu: SimpleNamespace,
    heads: tuple[int, int],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient may be a view, and the last documents may be empty.

    Documents longer than `LONGEST_IN_PARTS` use the kernel's backward.
    """
    query_heads, kv_heads = heads
    tokens = 40
    ends = torch.tensor([0, 1, 17, 40, 40, 40], dtype=torch.int32)
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k, v = (random(tokens, n, 16) for n in (query_heads, kv_heads, kv_heads))
    d_output = {
        "contiguous": random(tokens, query_heads, 16),
        "transposed": random(query_heads, 16, tokens).permute(2, 0, 1),
        "expanded": random(1, 1, 1).expand(tokens, query_heads, 16),
    }[kind]
    output, log_sums = attention.flash_forward(q, k, v, ends, tokens, 0.25)
    states = (d_output, q, k, v, output, log_sums, ends, tokens, 0.25)
    parts = attention.flash_backward_in_parts(*states)
    summed = torch.ops.pretrain.packed_fa4_backward(*states)
    monkeypatch.setattr(attention, "LONGEST_IN_PARTS", tokens * query_heads // kv_heads // 5 - 1)
    expected = attention.flash_backward_in_parts(*states)
    group = query_heads // kv_heads
    shape = (tokens, kv_heads, group, 16) if group > 1 else k.shape
    assert [part.shape for part in parts[1:]] == [shape] * 2
    for gradients in (summed, [part.sum(2) if part.dim() == 4 else part for part in parts]):
        for gradient, reference in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-12)
            assert gradient.is_contiguous()


# ── Rejected architectures ─────────────────────────────────────────────────────────────

SIZES = {"hidden_size": 32, "num_hidden_layers": 1}
SLIDING = SMALL | HEADS | {"head_dim": 8, "sliding_window": 64}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4}
MOE = SMALL | HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.mark.parametrize(
    ("model_type", "config", "words"),
    [
        ("gpt2", GPT2 | {"attn_pdrop": 0.1}, "attn_pdrop 0.1"),
        ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 2}, "attention registry"),
        ("mamba", SIZES | {"state_size": 4}, "attention registry|other than attention"),
        ("mimo_v2_flash", SLIDING, "attention sinks .*sinks.* only for the types"),
        ("deepseek_v3", SMALL | HEADS | {"num_key_value_heads": 4}, "latent keys.*kernels"),
        (
            "mamba2",
            SIZES | {"num_heads": 4, "head_dim": 16},
            "linear_attention.*kernels that reset",
        ),
        ("phi3", SMALL | HEADS | LONGROPE, "longrope.*`data.length`"),
        ("llama4_text", SMALL | HEADS, "has modules besides the base model .*: model;"),
        (
            "modernbert-decoder",
            {"vocab_size": 50_368},
            "has modules besides the base model .*: lm_head;",
        ),
        # Sizes of grouped products, and numbers of experts.
        ("qwen3_moe", MOE | {"moe_intermediate_size": 20}, "multiples of 8"),
        ("qwen3_moe", MOE | {"hidden_size": 36}, "multiples of 8"),
        ("qwen3_moe", MOE | {"num_experts_per_tok": 5}, "num_experts_per_tok: 5.*set .* 1 to 4"),
        ("qwen3_moe", MOE | {"num_experts_per_tok": 0}, "num_experts_per_tok: 0.* 4 experts"),
        ("granite", SMALL | HEADS | {"logits_scaling": 0.0}, "logits_scaling: 0.0.*positive"),
        ("cohere", SMALL | HEADS | {"logit_scale": None}, "logit_scale: null.*positive"),
        (
            "gemma2",
            SMALL | HEADS | {"final_logit_softcapping": torch.inf},
            "softcapping: inf.*positive",
        ),
        ("gemma2", SMALL | HEADS | {"attn_logit_softcapping": 0.0}, "softcapping: 0.0.*positive"),
    ],
)
def test_an_unsupported_architecture_is_rejected(
    model_type: str, config: dict[str, Any], words: str
) -> None:
    settings = ModelSettings(config={"vocab_size": 61, "model_type": model_type} | config)
    with pytest.raises(InputError, match=words):
        check_architecture(build_on_meta(load_config(settings)), LENGTH, LossSettings())
