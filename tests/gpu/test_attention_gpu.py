"""Compare packed attention with attention of single documents in FP64, and compiled models.

The tests of our Triton kernel alone also run on a CPU, under Triton's interpreter
(TRITON_INTERPRET=1).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pretrain.model import attention, attention_backends
from pretrain.model.attention_kernel import attend, attend_backward
from pretrain.model.fused.formulas import Heads
from tests.gpu.conftest import DEVICE, INTERPRETED, cuda_only, relative_error
from tests.pretrain.conftest import RESULTS, attend_alone
from tests.pretrain.model.fused.fused_models import ARCHITECTURES, build, one_pass, packed

# The interpreter cannot multiply matrices in BF16.
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
SCALE = 0.11
LENGTH = 512
TOKENS = 3 * LENGTH
DOCUMENTS = {
    "mixed": [200, 1, 311, 512, 17, 400, 95],
    "a pack each": [LENGTH] * 3,
    "tokens alone": [1] * 300 + [212] + [1] * 512 + [511, 1],
    "boundaries of blocks": [63, 1, 448, 130, 129, 253, 2, 510],
}
KERNELS = ["fa4", "cudnn", "triton", "varlen"]
SHAPES = [Heads(16, 8, 128), Heads(8, 8, 64), Heads(12, 2, 64), Heads(4, 2, 96), Heads(4, 1, 256)]


def offsets(sizes: Sequence[int], spare: int = 0) -> Tensor:
    """Return the documents' offsets. The last offset occurs `spare` more times."""
    ends = torch.tensor([0, *sizes]).cumsum(0)
    return torch.cat([ends, ends[-1:].repeat(spare)]).to(DEVICE, torch.int32)


def draw(heads: Heads, tokens: int, *, stacked: bool = False) -> list[Tensor]:
    """Return queries, keys, values and the gradient of the output [tokens, heads, dim].

    With `stacked`, queries, keys and values are views of one tensor.
    """
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, heads.width, generator=generator).to(DEVICE, DTYPE)
    d_output = torch.randn(tokens, heads.query, heads.dim, generator=generator)
    states = heads.split(qkv)
    if not stacked:
        states = tuple(state.clone() for state in states)
    return [*states, d_output.to(DEVICE, DTYPE)]


@cache
def reference(heads: Heads, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the output, the gradients, and the log-sums [heads, tokens], in FP64."""
    parts = [tensor.split(sizes) for tensor in draw(heads, sum(sizes))]
    alone = [attend_alone(*document, SCALE) for document in zip(*parts, strict=True)]
    results = {name: torch.cat([document[name] for document in alone]) for name in RESULTS}
    log_sums = torch.cat([document["log_sums"] for document in alone], dim=1)
    return results | {"log_sums": log_sums}


def check(
    results: dict[str, Tensor], heads: Heads, sizes: Sequence[int], limit: float = 2**-7
) -> None:
    """Compare output and gradients with the reference, also within each document.

    A leak at one boundary changes only the two documents beside it.
    """
    exact = reference(heads, tuple(sizes))
    for name, actual in results.items():
        assert actual.dtype == DTYPE, name
        assert (actual.double() - exact[name]).norm() < limit * exact[name].norm() + 1e-4, name
        # In a document of one token, the exact gradients of the query and the key are 0. So the
        # error of a document is compared with the usual size of the values, if that is larger.
        usual = exact[name].square().mean().sqrt() + 1e-4
        pairs = zip(actual.double().split(sizes), exact[name].split(sizes), strict=True)
        for number, (document, alone) in enumerate(pairs):
            error = (document - alone).square().mean().sqrt()
            assert error < 2**-6 * max(usual, alone.square().mean().sqrt()), (name, number)


# ── Our Triton kernel ──


def by_kernel(states: list[Tensor], sizes: Sequence[int], spare: int = 0) -> dict[str, Tensor]:
    """Return the results of the Triton kernel by name, as in `reference`."""
    q, k, v, d_output = states
    bounds = attention.document_bounds(offsets(sizes, spare), len(q))
    # New memory is filled with NaN.
    torch.use_deterministic_algorithms(True)
    output, log_sums = attend(q, k, v, bounds, SCALE)
    gradients = attend_backward(d_output, q, k, v, output, log_sums, bounds, SCALE)
    torch.use_deterministic_algorithms(False)
    results = dict(zip(RESULTS, (output, *gradients), strict=True))
    assert all(result.is_contiguous() for result in results.values())
    return results | {"log_sums": log_sums}


@pytest.mark.parametrize(
    ("sizes", "heads", "stacked"),
    [
        ([1], Heads(4, 2, 64), False),
        ([80, 1, 33, 64], Heads(4, 2, 64), True),
        ([17, 2, 70], Heads(3, 1, 64), False),
        ([1, 63, 65, 130], Heads(3, 1, 128), False),
        ([1, 63, 65, 130], Heads(4, 2, 128), False),
        ([64, 65], Heads(2, 2, 128), True),
    ],
    ids=str,
)
def test_the_triton_kernel_equals_attention_of_single_documents(
    sizes: list[int], heads: Heads, stacked: bool
) -> None:
    results = by_kernel(draw(heads, sum(sizes), stacked=stacked), sizes, spare=3)
    log_sums = results.pop("log_sums").double()
    exact = reference(heads, tuple(sizes))["log_sums"]
    torch.testing.assert_close(log_sums, exact, rtol=0, atol=1e-4)
    check(results, heads, sizes)


def test_neither_strides_nor_other_documents_change_the_bits() -> None:
    states = draw(Heads(2, 1, 64), 100)
    expected = by_kernel(states, [40, 60])
    states[3] = states[3].transpose(0, 1).contiguous().transpose(0, 1)
    strided = by_kernel(states, [40, 60])
    assert all(torch.equal(strided[name], result) for name, result in expected.items())
    for changed in states:
        changed[40:] *= 3
    changed_results = by_kernel(states, [40, 60])
    for name in RESULTS:
        assert torch.equal(changed_results[name][:40], expected[name][:40]), name


@pytest.mark.skipif(not INTERPRETED, reason="the fused layers of this test are those for a CPU")
@pytest.mark.parametrize(("name", "heads"), [("gpt2", {"n_head": 1}), ("qwen3", {"head_dim": 64})])
def test_fused_layers_have_the_gradients_of_layers_with_sdpa(
    name: str, heads: dict[str, int]
) -> None:
    """GPT-2 has no rotation and no head norms."""
    config = ARCHITECTURES[name] | heads
    loss, gradients = one_pass(packed(build(config, backend="packed_triton")))
    expected_loss, expected = one_pass(packed(build(config, backend="packed_sdpa")))
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    largest = max(gradient.norm() for gradient in expected.values())
    for parameter, gradient in expected.items():
        error = (gradients[parameter] - gradient).norm()
        assert error <= 2e-6 * largest + 1e-5 * gradient.norm(), parameter


# ── All kernels ──


def kernel_of(kind: Any, heads: Heads) -> Any:
    """Return the attention function of this name. Skip the test if this machine cannot run it."""
    name = "flash_attn" if kind == "fa4" else kind
    if obstacle := attention_backends.obstacle(
        name, attention_backends.Case("cuda", heads.dim, torch.bfloat16)
    ):
        pytest.skip(f"{name} {obstacle}")
    return AttentionInterface()[f"packed_{kind}"]


def results_of(kind: str, heads: Heads, sizes: Sequence[int], spare: int) -> dict[str, Tensor]:
    kernel = kernel_of(kind, heads)
    *states, d_output = draw(heads, sum(sizes))
    states = [state.transpose(0, 1).contiguous()[None].requires_grad_() for state in states]
    cu_seqlens = offsets(sizes, spare)
    longest = max(LENGTH, *sizes)
    documents = attention.documents_for(f"packed_{kind}", cu_seqlens, longest, sum(sizes))
    output, _ = kernel(
        None,
        *states,
        None,
        cu_seqlens=cu_seqlens,
        max_seqlen=longest,
        documents=documents,
        scaling=SCALE,
    )
    gradients = torch.autograd.grad(output, states, d_output[None])
    results = (output.detach()[0], *(gradient[0].transpose(0, 1) for gradient in gradients))
    return dict(zip(RESULTS, results, strict=True))


@cuda_only
@pytest.mark.parametrize(
    ("kind", "heads"), [*itertools.product(KERNELS, SHAPES), ("sdpa", Heads(4, 2, 64))], ids=str
)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("spare", [0, 9])
def test_kernels_equal_attention_of_single_documents(
    kind: str, heads: Heads, documents: str, spare: int
) -> None:
    sizes = DOCUMENTS[documents]
    limit = 2**-6 if kind == "sdpa" else 2**-7
    check(results_of(kind, heads, sizes, spare), heads, sizes, limit)


@cuda_only
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("size", [128, 4096])
def test_output_dk_and_dv_repeat_bit_for_bit_and_dq_nearly(kind: str, size: int) -> None:
    """The kernel sums blocks of keys into dQ in an order that differs from call to call."""
    sizes = [size] * (32_768 // size)
    first, *again = (results_of(kind, SHAPES[0], sizes, 7) for _ in range(5))
    for results in again:
        assert all(torch.equal(results[name], first[name]) for name in ("output", "dk", "dv"))
        assert relative_error(results["dq"], first["dq"]) < 2**-9


def tiny_qwen3(implementation: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = AutoConfig.for_model(
        "qwen3", **sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=64
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(
        "cuda", dtype
    )


@cuda_only
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
        ids = torch.randint(97, (1, TOKENS), device="cuda")
        cu_seqlens = offsets(sizes, spare)
        torch._dynamo.mark_dynamic(cu_seqlens, 0)
        logits = model(
            input_ids=ids,
            position_ids=torch.cat([torch.arange(n, device="cuda") for n in sizes])[None],
            cu_seqlens=cu_seqlens,
            max_seqlen=LENGTH,
            documents=attention.documents_for(f"packed_{kind}", cu_seqlens, LENGTH, TOKENS),
            use_cache=False,
        ).logits
        expected = torch.cat(
            [plain(document[None]).logits for document in ids[0].split(sizes)], dim=1
        )
        assert relative_error(logits, expected.detach()) < 0.03
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
