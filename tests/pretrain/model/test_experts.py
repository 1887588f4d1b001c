"""Grouped experts agree with plain transformers, and FP8 experts with a plain loop."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pretrain.model.experts import Dispatched, GroupedExperts, group_experts
from pretrain.model.gradients import attach_main_gradients, gradient_of
from pretrain.model.huggingface import build_on_meta, decoder_layers
from pretrain.model.wrapping import casting_parameters, convert
from pretrain.precision.grouped import arrange, check_experts
from pretrain.precision.product import PrecisionContext
from pretrain.precision.scope import decide
from tests.pretrain.conftest import QUANTIZED, context_of, emulation_of

EXPERTS, CHOICES, HIDDEN = 4, 2, 32
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOICES, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
SIZES |= {"initializer_range": 0.2, "experts_implementation": "eager"}
KINDS = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 48, "intermediate_size": 48},
    "olmoe": {"num_experts": EXPERTS, "intermediate_size": 48},
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 48},
}
# Two different experts for every token. Often some experts have no token.
CHOSEN = st.lists(
    st.permutations(range(EXPERTS)).map(lambda order: order[:CHOICES]), min_size=1, max_size=40
)

close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


@cache
def plain_model(kind: str) -> PreTrainedModel:
    """Return a model of transformers with its own experts."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | KINDS[kind])
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager").train()


@cache
def in_precision(
    kind: str, name: str, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PrecisionContext]:
    """Return a copy of the plain model with converted experts and linears, and its context."""
    hf = AutoModelForCausalLM.from_config(plain_model(kind).config).train()
    hf.load_state_dict(plain_model(kind).state_dict())
    engine = emulation_of(name) if name in QUANTIZED else None
    context = context_of(engine, dtype) if engine else PrecisionContext(dtype)
    decisions = {}
    if engine:
        decisions = decide(hf, [*decoder_layers(hf).values()], context.current)
    convert(hf, decisions, context)
    return hf, context


def experts_of(hf: PreTrainedModel) -> nn.Module:
    return next(iter(decoder_layers(hf).values())).mlp.experts


def problem(chosen: list[list[int]], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, chosen experts, their weights, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(len(chosen), HIDDEN, generator=generator) for _ in range(2))
    weights = torch.rand(len(chosen), CHOICES, generator=generator)
    return x.requires_grad_(), torch.tensor(chosen), weights.requires_grad_(), dy


@given(chosen=CHOSEN, aligned=st.sampled_from([1, 16, 32]))
def test_every_choice_has_a_row_and_padding_rows_are_zero(
    chosen: list[list[int]], aligned: int
) -> None:
    x, indices, _, _ = problem(chosen)
    groups = arrange(indices, EXPERTS, aligned)
    rows = Dispatched.apply(x.detach(), groups)
    ends = groups.ends.tolist()
    assert all(end % aligned == 0 for end in ends) and ends[-1] == len(rows)
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        tokens = [token for token, experts in enumerate(chosen) if expert in experts]
        assert groups.load[expert] == len(tokens)
        assert torch.equal(rows[begin : begin + len(tokens)], x[tokens])
        assert not rows[begin + len(tokens) : end].any()
    assert torch.equal(rows[groups.row_of_choice], x.repeat_interleave(CHOICES, 0))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(chosen=CHOSEN)
def test_outputs_and_gradients_equal_those_of_plain_experts(
    kind: str, chosen: list[list[int]]
) -> None:
    plain = experts_of(plain_model(kind))
    converted, _ = in_precision(kind, "fp32")
    grouped = experts_of(converted)
    results = []
    assert isinstance(grouped, GroupedExperts)
    for module in (plain, grouped):
        x, indices, weights, dy = problem(chosen)
        module.zero_grad()
        y = module(x, indices, weights)
        y.backward(dy)
        gradients = [part.grad for part in (module.gate_up_proj, module.down_proj)]
        results.append([y.detach(), x.grad, weights.grad, *gradients])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_token_may_choose_all_experts() -> None:
    config = AutoConfig.for_model("qwen3_moe", **SIZES | KINDS["qwen3_moe"])
    config.num_experts_per_tok = EXPERTS
    check_experts(build_on_meta(config))


def test_gradients_in_bf16_add_up_in_fp32_over_microbatches() -> None:
    hf, _ = in_precision("qwen3_moe", "bf16")
    experts = experts_of(hf.to(torch.bfloat16))
    parts = []
    for parameter in (experts.gate_up_proj, experts.down_proj):
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    for seed in range(2):
        x, chosen, weights, dy = (
            tensor.detach() for tensor in problem([[0, 3], [1, 0], [3, 1]] * 5, seed)
        )
        before = experts.down_proj.main_grad.clone()
        experts(x.bfloat16(), chosen, weights.bfloat16()).backward(dy.bfloat16())
        parts.append(experts.down_proj.main_grad - before)
    assert experts.down_proj.grad is None
    assert torch.equal(experts.down_proj.main_grad, parts[0] + parts[1])
    assert not experts.down_proj.main_grad[2].any() and experts.down_proj.main_grad[0].any()


def test_fp8_experts_with_fp32_weights_add_fp32_gradients() -> None:
    hf, context = in_precision("qwen3_moe", "current", torch.bfloat16)
    experts = experts_of(hf)
    attach_main_gradients(experts, torch.float32)
    (layer,) = decoder_layers(hf).values()
    forward = casting_parameters(layer, experts.forward, torch.bfloat16)
    x, chosen, weights, dy = problem([[0, 3], [1, 0], [3, 1]] * 5)
    with context.forward(training=True):
        y = forward(x.bfloat16(), chosen, weights.bfloat16())
    y.backward(dy.bfloat16())
    for parameter in experts.parameters():
        gradient = gradient_of(parameter)
        assert gradient.any() and not torch.equal(gradient, gradient.bfloat16().float())


# ── Emulated FP8 and a loop ────────────────────────────────────────────────────────────


def rounded(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Return FP32 codes of x and their decoding scale."""
    scale = (torch.finfo(dtype).max / x.abs().amax().double()).float()
    return (x * scale).to(dtype).float(), scale.double().reciprocal().float()


@settings(max_examples=40)
@given(chosen=CHOSEN)
def test_emulated_fp8_equals_a_loop_with_one_scale_per_tensor(chosen: list[list[int]]) -> None:
    hf, context = in_precision("olmoe", "current")
    experts = experts_of(hf)
    x, indices, _, _ = problem(chosen)
    stack = experts.gate_up_proj
    groups = arrange(indices, EXPERTS, 16)
    rows = Dispatched.apply(x.detach(), groups).requires_grad_()
    experts.zero_grad()
    with context.forward(training=True):
        y = experts.stacks["gate_up_proj"](rows, stack, ends=groups.ends)
    dy = torch.randn_like(y).index_fill_(0, groups.empty_rows, 0)
    y.backward(dy)

    x, x_scale = rounded(rows.detach())
    w, w_scale = rounded(stack.detach())
    g, g_scale = rounded(dy, torch.float8_e5m2)
    ends = groups.ends.tolist()
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        part = slice(begin, end)
        close(y[part], x[part] @ w[expert].t() * (x_scale * w_scale))
        close(rows.grad[part], g[part] @ w[expert] * (g_scale * w_scale))
        close(stack.grad[expert], g[part].t() @ x[part] * (g_scale * x_scale))


@settings(max_examples=20)
@given(counts=st.lists(st.integers(0, 3), min_size=EXPERTS, max_size=EXPERTS).filter(any))
def test_an_expert_computes_the_same_alone_and_in_a_group(counts: list[int]) -> None:
    """MXFP8 has no scale beyond blocks, and no block of tokens has rows of two experts."""
    gemm = emulation_of("mxfp8").gemm("experts", 64, 32)
    torch.manual_seed(0)
    ends = 32 * torch.tensor(counts).cumsum(0)
    shapes = ((ends[-1], 64), (ends[-1], 32), (EXPERTS, 32, 64))
    x, dy, stack = (torch.randn(shape) for shape in shapes)

    def products(x: Tensor, dy: Tensor, weight: Tensor, ends: Tensor | None = None) -> list[Tensor]:
        weight = gemm.quantize("weight", weight)
        gradient = gemm.quantize("grad_output", dy)
        operand = gemm.quantize("input", x)
        y = gemm.matmul("forward", operand, weight, torch.float32, ends=ends)
        dx = gemm.matmul("dgrad", gradient, weight, torch.float32, ends=ends)
        (rows,) = gemm.restore(*gemm.save(operand))
        return [y, dx, gemm.matmul("wgrad", gradient, rows, torch.float32, ends=ends)]

    together = products(x, dy, stack, ends.int())
    for expert, (begin, end) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)):
        part = [together[0][begin:end], together[1][begin:end], together[2][expert]]
        if begin == end:
            assert not part[2].any()
        else:
            assert all(map(torch.equal, part, products(x[begin:end], dy[begin:end], stack[expert])))


def test_experts_that_are_stacked_differently_are_not_replaced() -> None:
    sizes = SIZES | {"num_local_experts": EXPERTS, "intermediate_size": 48, "head_dim": 16}
    config = AutoConfig.for_model("gpt_oss", **sizes)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    group_experts(hf, PrecisionContext(torch.float32))
    assert not any(isinstance(module, GroupedExperts) for module in hf.modules())
