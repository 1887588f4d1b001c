"""Packed attention's CUDA kernels against the plain one, and a compiled model against its documents alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pretrain import attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTH, PACKS = 512, 3
DOCUMENTS = [200, 1, 311, 512, 17, 400, 95]  # three packs
KERNELS = [
    pytest.param(attention.packed_varlen, id="varlen"),
    pytest.param(
        attention.packed_flash_attn,
        id="flash_attn",
        marks=pytest.mark.skipif(attention.flash_attn_varlen_func is None, reason="flash-attn is not installed"),
    ),
]

attention.register()


def offsets(sizes: list[int], spare: int = 0) -> Tensor:
    ends = torch.tensor(sizes).cumsum(0)
    return torch.cat([torch.zeros(1), ends, ends[-1:].repeat(spare)]).to("cuda", torch.int32)


def attend(kernel: Any, states: list[Tensor], spare: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output [1, T, heads, D] and the gradients of q, k and v."""
    states = [s.detach().requires_grad_() for s in states]
    cu_seqlens = offsets(DOCUMENTS, spare)
    mask = attention.document_mask(cu_seqlens, LENGTH, LENGTH * PACKS)
    output, _ = kernel(None, *states, None, cu_seqlens=cu_seqlens, max_seqlen=LENGTH, document_mask=mask, scaling=0.11)
    torch.manual_seed(1)
    return output, torch.autograd.grad(output, states, torch.randn(output.shape, device="cuda").to(output.dtype))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (8, 8, 64), (12, 2, 64), (4, 1, 256)])
@pytest.mark.parametrize("spare", [0, 9])
def test_a_kernel_agrees_with_fp32_attention_for_grouped_heads_and_spare_offsets(
    kernel: Any, heads: int, kv_heads: int, head_dim: int, spare: int
) -> None:
    torch.manual_seed(0)
    states = [torch.randn(1, h, LENGTH * PACKS, head_dim, device="cuda").bfloat16() for h in (heads, kv_heads, kv_heads)]
    output, gradients = attend(kernel, states, spare)
    expected, expected_gradients = attend(attention.packed_sdpa, [s.float() for s in states], spare)
    assert output.shape == expected.shape and output.dtype == torch.bfloat16
    for ours, exact in zip((output, *gradients), (expected, *expected_gradients), strict=True):
        assert (ours.float() - exact).norm() / exact.norm() < 2**-7


def tiny_qwen3(implementation: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=97,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to("cuda", dtype)


@pytest.mark.parametrize("name", ["packed_varlen", "packed_sdpa"])
def test_compiled_layers_give_the_documents_own_logits_and_compile_once(name: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    model, plain = tiny_qwen3(name, torch.bfloat16), tiny_qwen3("eager", torch.float32)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=counter)

    compiled = []
    for sizes, spare in [(DOCUMENTS, 1), ([512, 512, 500, 12], 12), ([64] * 24, 3)]:
        ids = torch.randint(97, (1, LENGTH * PACKS), device="cuda")
        cu_seqlens = offsets(sizes, spare)
        torch._dynamo.mark_dynamic(cu_seqlens, 0)
        logits = model(
            input_ids=ids,
            position_ids=torch.cat([torch.arange(n, device="cuda") for n in sizes])[None],
            cu_seqlens=cu_seqlens,
            max_seqlen=LENGTH,
            document_mask=attention.document_mask(cu_seqlens, LENGTH, LENGTH * PACKS),
            use_cache=False,
        ).logits
        logits.float().square().mean().backward()
        expected = torch.cat([plain(document[None]).logits for document in ids[0].split(sizes)], dim=1)
        assert (logits.float() - expected).norm() / expected.norm() < 0.03
        compiled.append(counter.frame_count)
    assert compiled == [compiled[0]] * 3


def test_fp32_parameters_under_autocast_reach_the_kernel_in_bf16() -> None:
    sizes = DOCUMENTS
    model = tiny_qwen3("packed_varlen", torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(
            input_ids=torch.randint(97, (1, sum(sizes)), device="cuda"),
            position_ids=torch.cat([torch.arange(n, device="cuda") for n in sizes])[None],
            cu_seqlens=offsets(sizes),
            max_seqlen=LENGTH,
            use_cache=False,
        ).logits
    logits.float().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_auto_takes_varlen_for_bf16_and_sdpa_for_fp32() -> None:
    assert attention.choose("auto", "cuda", 128, torch.bfloat16).name == "packed_varlen"
    choice = attention.choose("auto", "cuda", 128, torch.float32)
    assert choice.name == "packed_sdpa" and "precision: bf16" in choice.reason
