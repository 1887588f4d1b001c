"""Muon compared with torch.optim.Muon, its matrices, its weight modes, and its shares of work."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.errors import InputError
from foundation.overrides import overridden
from pretrain.optimizer import muon
from pretrain.optimizer.adamw import set_learning_rate, set_updates_done
from pretrain.optimizer.exact_weights import master_of, split
from pretrain.optimizer.muon import (
    MatrixWeight,
    Muon,
    find_matrix_weights,
    orthogonalize,
    rounds_of,
)
from tests.pretrain.optimizer.test_exact_adamw import loss_gradients, parameters, set_gradients
from tests.pretrain.plan.plan_recipe import on_meta

# [outputs, inputs]: tall, wide and square, twice the same shape, and one expert stack.
SHAPES = ((48, 16), (16, 48), (24, 24), (48, 16))
RATE = 2e-3
DECAY = 0.1


def muon_of(hidden: list[MatrixWeight], adjust: str = "original", **options: Any) -> Muon:
    """Return Muon for `hidden`, with one parameter for AdamW."""
    other = nn.Parameter(torch.zeros(3))
    group = {"params": [item.parameter for item in hidden], "momentum": 0.95, "lr_ratio": 10.0}
    groups = [{"params": [other]}, group | {"adjust_lr_fn": adjust}]
    return Muon(groups, hidden, lr=RATE, weight_decay=DECAY, betas=(0.9, 0.95), eps=1e-8, **options)


def whole(params: list[nn.Parameter]) -> list[MatrixWeight]:
    return [MatrixWeight(parameter, inputs_dim=-1) for parameter in params]


def close(tensor: Tensor, expected: Tensor) -> bool:
    """Return whether two weights are equal, up to the roundings of BF16 products."""
    return torch.allclose(tensor, expected, rtol=0, atol=2e-2 * RATE)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_fp32_and_exact_bf16_follow_torchs_muon(adjust: str) -> None:
    masters = parameters(shapes=SHAPES)
    fp32 = parameters(shapes=SHAPES)
    bf16 = parameters(torch.bfloat16, SHAPES)
    reference = torch.optim.Muon(masters, lr=RATE, weight_decay=DECAY, adjust_lr_fn=adjust)
    plain = muon_of(whole(fp32), adjust)
    exact = muon_of(whole(bf16), adjust)
    for step in range(30):
        rate = RATE * (1 - step / 30)
        reference.param_groups[0]["lr"] = rate
        for optimizer in (plain, exact):
            set_learning_rate(optimizer, rate / 10)
        gradients = loss_gradients([split(p.detach())[0] for p in masters], step)
        for params in (masters, fp32, bf16):
            set_gradients(params, gradients)
        for optimizer in (reference, plain, exact):
            optimizer.step()
        exact_masters = [master_of(p.detach(), exact.state[p]["remainder"]) for p in bf16]
        assert all(map(torch.equal, exact_masters, fp32))
        assert all(map(close, fp32, masters))
    for parameter, expected in zip(fp32, masters, strict=True):
        assert torch.equal(
            plain.state[parameter]["momentum"], reference.state[expected]["momentum_buffer"]
        )


# ── The matrices ──


def test_matrices_of_a_batch_do_not_depend_on_each_other() -> None:
    batch = torch.randn(4, 24, 40, generator=torch.Generator().manual_seed(0))
    batch[1] = 0
    alone = torch.cat([orthogonalize(matrix[None]) for matrix in batch])
    assert torch.equal(orthogonalize(batch), alone)
    assert not alone[1].any()


@pytest.mark.parametrize("factor", [2.0**-10, 8.0])
def test_an_update_does_not_depend_on_the_size_of_the_gradient(factor: float) -> None:
    matrix = torch.randn(1, 24, 40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(orthogonalize(factor * matrix), orthogonalize(matrix))


@pytest.mark.parametrize(
    ("shape", "inputs", "stacked"),
    [((6, 4), -1, 2), ((4, 6), -2, 3), ((3, 6, 4), -1, 2), ((6, 4), -1, 1)],
)
def test_split_returns_a_view_of_all_values(shape, inputs, stacked):
    item = MatrixWeight(nn.Parameter(torch.ones(shape)), inputs, stacked)
    matrices = item.split(item.parameter.detach())
    assert matrices.shape == item.shape
    assert matrices.numel() == item.parameter.numel()
    matrices.zero_()
    assert not item.parameter.any()


def hidden_by_name(config: dict[str, Any]) -> dict[str, MatrixWeight]:
    hf = on_meta(config)
    names = {parameter: name for name, parameter in hf.named_parameters()}
    return {names[item.parameter]: item for item in find_matrix_weights(hf)}


def test_queries_keys_values_gate_and_up_are_separate_matrices() -> None:
    """test_model_types.py covers the MLPs and experts of all models."""
    config = {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 8, "vocab_size": 16}
    attention = hidden_by_name({"model_type": "gpt2", **config})
    assert attention["transformer.h.0.attn.c_attn.weight"].shape == (3, 8, 8)
    weight = torch.arange(8 * 24).view(8, 24)
    queries = attention["transformer.h.0.attn.c_attn.weight"].split(weight)[0]
    assert torch.equal(queries, weight[:, :8].t())
    sizes = {"hidden_size": 8, "moe_intermediate_size": 16, "vocab_size": 16, "head_dim": 4}
    single = {"num_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    experts = hidden_by_name({"model_type": "qwen3_moe", **sizes, **single})
    assert experts["model.layers.0.mlp.experts.gate_up_proj"].shape == (2, 16, 8)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("ctrl", "CTRLLMHeadModel has no decoder layers with matrices"),
        ("gpt_neox", "the layout of the matrices in .*query_key_value is not known"),
        ("phi3", "the layout of the matrices in .*qkv_proj is not known"),
        ("gpt_oss", "the layout of the matrices in .*gate_up_proj is not known"),
    ],
)
def test_a_model_with_unknown_or_without_matrices_is_refused(model_type: str, words: str) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    if model_type == "ctrl":
        sizes = {"n_embd": 8, "dff": 16, "n_layer": 1, "n_head": 2, "vocab_size": 16}
        heads = {}
    with pytest.raises(InputError, match=words):
        find_matrix_weights(on_meta({"model_type": model_type, **sizes, **heads}))


# ── Shares of the work ──


@given(
    st.dictionaries(st.sampled_from([(8, 8), (4, 8), (24, 8)]), st.integers(1, 12), min_size=1),
    st.integers(1, 6),
    st.integers(1, 40),
)
def test_ranks_share_all_parameters_in_rounds_of_one_shape(counts, ranks, limit):
    """Batches have a limited number of values, and the ranks about equal work in every round."""
    shapes = [shape for shape, count in counts.items() for _ in range(count)]
    hidden = [MatrixWeight(nn.Parameter(torch.empty(shape, device="meta")), -1) for shape in shapes]
    values = 16 * limit
    with overridden(muon, BATCH=values):
        rounds = list(rounds_of(hidden, ranks))
    shared = [item for batches in rounds for batch in batches for item in batch]
    assert len(shared) == len({*shared}) == len(hidden)
    of_shape = defaultdict(list)
    for batches in rounds:
        (shape,) = {item.shape for batch in batches for item in batch}
        of_shape[shape[1:]].append([len(batch) for batch in batches])
    for shape, lengths in of_shape.items():
        largest = max(lengths[0])
        assert largest == 1 or largest * math.prod(shape) <= values
        # All ranks have batches of this size, until the last round has the rest.
        full = [size for sizes in lengths for size in sizes][:-1]
        assert full == [largest] * len(full)
        assert all(len(sizes) == ranks for sizes in lengths[:-1])
        most = max(1, values // math.prod(shape))
        assert len(lengths) == math.ceil(math.ceil(counts[shape] / ranks) / most)


# ── State, settings and the built optimizer ──


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_momentum_has_its_dtype_and_its_metric(moments: torch.dtype) -> None:
    params = parameters(torch.bfloat16, SHAPES)
    optimizer = muon_of(whole(params), "match_rms_adamw", moments=moments)
    optimizer.materialise()
    set_learning_rate(optimizer, RATE)
    set_updates_done(optimizer, 7)
    set_gradients(params, loss_gradients([p.detach() for p in params], 0))
    optimizer.step()
    assert {optimizer.state[p]["momentum"].dtype for p in params} == {moments}
    assert optimizer.state[params[0]].keys() == {"step", "momentum", "remainder"}
    assert {int(optimizer.state[p]["step"]) for p in params} == {8}
    # Moonlight's factor makes updates as large as AdamW's (arXiv:2502.16982).
    assert 0.17 < optimizer.metrics["muon_update_rms"] < 0.23


def test_lost_updates_are_counted_for_bf16_weights_alone() -> None:
    lost = {}
    for exact in (False, True):
        params = parameters(torch.bfloat16, SHAPES)
        optimizer = muon_of(whole(params), exact=exact)
        set_learning_rate(optimizer, 1e-6)
        set_gradients(params, loss_gradients([p.detach() for p in params], 0))
        optimizer.step()
        lost[exact], count = optimizer.lost_counts.tolist()
        assert count == sum(p.numel() for p in params)
    assert lost[True] < 0.01 * count
    assert lost[False] > 0.9 * count


def test_a_parameter_without_gradient_is_not_updated() -> None:
    params = parameters(shapes=SHAPES)
    optimizer = muon_of(whole(params))
    set_gradients(params, loss_gradients([p.detach() for p in params], 0))
    params[1].grad = None
    before = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state
