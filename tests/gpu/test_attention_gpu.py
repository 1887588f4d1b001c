"""Compare packed attention's CUDA kernels with SDPA, and compiled models with single documents.

Also test which of a kernel's results repeat bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pretrain.model import attention
from pretrain.model.fused.formulas import Heads

LENGTH = 512
PACKS = 3
DOCUMENTS = {
    "mixed": [200, 1, 311, 512, 17, 400, 95],
    "a pack each": [LENGTH] * PACKS,
    "tokens alone": [1] * 300 + [212] + [1] * 512 + [511, 1],
}
KERNELS = ["fa4", "cudnn", "triton", "varlen"]
SHAPES = [Heads(16, 8, 128), Heads(8, 8, 64), Heads(12, 2, 64), Heads(4, 2, 96), Heads(4, 1, 256)]


def kernel_of(kind: Any, heads: Heads) -> Any:
    """Return the attention function of this name. Skip the test if this machine cannot run it."""
    name = "flash_attn" if kind == "fa4" else kind
    if obstacle := attention.obstacle(name, attention.Case("cuda", heads.dim, torch.bfloat16)):
        pytest.skip(f"{name} {obstacle}")
    return AttentionInterface()[f"packed_{kind}"]


def offsets(sizes: list[int], spare: int = 0) -> Tensor:
    """Return the documents' offsets, followed by `spare` empty documents."""
    ends = torch.tensor(sizes).cumsum(0)
    return torch.cat([torch.zeros(1), ends, ends[-1:].repeat(spare)]).to("cuda", torch.int32)


def random_states(heads: Heads, tokens: int = LENGTH * PACKS) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(1, h, tokens, heads.dim, device="cuda").bfloat16()
        for h in (heads.query, heads.kv, heads.kv)
    ]


def attend(kind: str, states: list[Tensor], sizes: list[int], spare: int) -> tuple[Tensor, ...]:
    """Return the output [1, T, heads, D] and the gradients of q, k and v."""
    name = f"packed_{kind}"
    states = [state.detach().requires_grad_() for state in states]
    cu_seqlens = offsets(sizes, spare)
    documents = attention.documents_for(name, cu_seqlens, LENGTH, LENGTH * PACKS)
    output, _ = AttentionInterface()[name](
        None,
        *states,
        None,
        cu_seqlens=cu_seqlens,
        max_seqlen=LENGTH,
        documents=documents,
        scaling=0.11,
    )
    torch.manual_seed(1)
    return output, *torch.autograd.grad(
        output, states, torch.randn(output.shape, device="cuda").to(output.dtype)
    )


def errors_of(actual: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> dict[str, float]:
    """Return the relative error of each tensor by its name."""
    errors = {}
    for name, computed, expected in zip(("output", "dq", "dk", "dv"), actual, exact, strict=True):
        assert computed.shape == expected.shape, name
        assert computed.dtype == torch.bfloat16, name
        errors[name] = ((computed.float() - expected).norm() / expected.norm()).item()
    return errors


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("spare", [0, 9])
def test_kernels_agree_with_fp32_attention_for_any_documents(
    kind: str, heads: Heads, documents: str, spare: int
) -> None:
    kernel_of(kind, heads)
    sizes = DOCUMENTS[documents]
    states = random_states(heads)
    exact = attend("sdpa", [s.float() for s in states], sizes, spare)
    errors = errors_of(attend(kind, states, sizes, spare), exact)
    assert max(errors.values()) < 2**-7, errors


@pytest.mark.parametrize("kind", [*KERNELS, "sdpa"])
def test_each_document_has_the_attention_of_this_document_alone(kind: str) -> None:
    """A leak at one boundary changes only the two documents beside it, in both directions."""
    heads = Heads(4, 2, 64)
    if kind != "sdpa":
        kernel_of(kind, heads)
    sizes = [63, 1, 448, 130, 129, 253, 2, 510]
    states = random_states(heads)
    packed = attend(kind, states, sizes, 3)
    # The gradient of the output that `attend` draws.
    torch.manual_seed(1)
    d_output = torch.randn(packed[0].shape, device="cuda").to(packed[0].dtype)[0].double()
    leaves = [state[0].transpose(0, 1).double().requires_grad_() for state in states]
    outputs = []
    for q, k, v in zip(*(leaf.split(sizes) for leaf in leaves), strict=True):
        k, v = (t.repeat_interleave(heads.query // heads.kv, 1).transpose(0, 1) for t in (k, v))
        scores = 0.11 * q.transpose(0, 1) @ k.transpose(1, 2)
        is_later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        outputs.append((scores.masked_fill(is_later, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    output = torch.cat(outputs)
    exact = [output.detach(), *torch.autograd.grad(output, leaves, d_output)]
    actual = [packed[0][0], *(gradient[0].transpose(0, 1) for gradient in packed[1:])]
    for name, computed, expected in zip(("output", "dq", "dk", "dv"), actual, exact, strict=True):
        # In a document of one token, the exact gradients of the query and the key are 0. So the
        # error of each document is compared with the usual size of the values.
        usual = expected.square().mean().sqrt()
        pairs = zip(computed.double().split(sizes), expected.split(sizes), strict=True)
        for number, (of_document, alone) in enumerate(pairs):
            error = (of_document - alone).square().mean().sqrt()
            assert error < 2**-6 * usual, (name, number)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("size", [128, 4096])
def test_output_dk_and_dv_repeat_bit_for_bit_and_dq_nearly(kind: Any, size: int) -> None:
    """The kernel sums blocks of keys into dQ in an order that differs from call to call."""
    heads = SHAPES[0]
    tokens = 32_768
    kernel = kernel_of(kind, heads)
    states = [state.requires_grad_() for state in random_states(heads, tokens)]
    d_output = torch.randn(1, tokens, heads.query, heads.dim, device="cuda").bfloat16()

    cu_seqlens = offsets([size] * (tokens // size), 7)
    documents = attention.documents_for(f"packed_{kind}", cu_seqlens, 4096, tokens)

    def once() -> tuple[Tensor, ...]:
        output, _ = kernel(
            None,
            *states,
            None,
            cu_seqlens=cu_seqlens,
            max_seqlen=4096,
            documents=documents,
        )
        return output.detach(), *torch.autograd.grad(output, states, d_output)

    first, *again = (once() for _ in range(5))
    differing = {
        name: max((tensor != repeat).sum().item() for repeat in repeats)
        for name, tensor, repeats in zip(
            ("output", "dq", "dk", "dv"), first, zip(*again, strict=True), strict=True
        )
    }
    assert differing["output"] == differing["dk"] == differing["dv"] == 0
    for gradients in again:
        assert (gradients[1].float() - first[1].float()).norm() / first[1].float().norm() < 2**-9


def tiny_qwen3(implementation: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = AutoConfig.for_model(
        "qwen3", **sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=64
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(
        "cuda", dtype
    )


@pytest.mark.parametrize("kind", [*KERNELS, "sdpa"])
def test_compiled_layers_equal_single_documents_and_compile_once(kind: str) -> None:
    kernel_of(kind, Heads(4, 2, 64))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    model = tiny_qwen3(f"packed_{kind}", torch.bfloat16)
    plain = tiny_qwen3("eager", torch.float32)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=counter)

    compiled = []
    for sizes, spare in [(DOCUMENTS["mixed"], 1), ([512, 512, 500, 12], 12), ([64] * 24, 3)]:
        ids = torch.randint(97, (1, LENGTH * PACKS), device="cuda")
        cu_seqlens = offsets(sizes, spare)
        torch._dynamo.mark_dynamic(cu_seqlens, 0)
        logits = model(
            input_ids=ids,
            position_ids=torch.cat([torch.arange(n, device="cuda") for n in sizes])[None],
            cu_seqlens=cu_seqlens,
            max_seqlen=LENGTH,
            documents=attention.documents_for(f"packed_{kind}", cu_seqlens, LENGTH, LENGTH * PACKS),
            use_cache=False,
        ).logits
        expected = torch.cat(
            [plain(document[None]).logits for document in ids[0].split(sizes)], dim=1
        )
        assert (logits.float() - expected).norm() / expected.norm() < 0.03
        for trained, computed in ((model, logits), (plain, expected)):
            trained.zero_grad()
            computed.float().square().mean().backward()
        pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
        for (name, weight), plain_weight in pairs:
            if weight.dim() == 2:
                gradient = weight.grad.float().flatten()
                cosine = torch.cosine_similarity(gradient, plain_weight.grad.flatten(), dim=0)
                assert cosine > 0.99, name
        compiled.append(counter.frame_count)
    assert compiled == [compiled[0]] * 3
