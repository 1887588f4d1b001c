"""Muon compared with torch.optim.Muon, its matrices, its weight modes, and its shares of work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foundation.errors import InputError
from pretrain.optimizer import muon
from pretrain.optimizer.adamw import set_learning_rate, set_updates_done
from pretrain.optimizer.exact_weights import master_of, split
from pretrain.optimizer.muon import Hidden, Muon, hidden_parameters, orthogonalize, share
from pretrain.settings.recipe import OptimizerSettings
from tests.pretrain.plan.plan_recipe import on_meta

# [outputs, inputs]: tall, wide and square, twice the same shape, and one expert stack.
SHAPES = ((48, 16), (16, 48), (24, 24), (48, 16))
RATE = 2e-3
DECAY = 0.1


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return random parameters of SHAPES with BF16 values."""
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype))
        for shape in SHAPES
    ]


def muon_of(hidden: list[Hidden], adjust: str = "original", **options: Any) -> Muon:
    """Return Muon for `hidden`, with one parameter for AdamW."""
    other = nn.Parameter(torch.zeros(3))
    group = {"params": [item.parameter for item in hidden], "momentum": 0.95, "lr_ratio": 10.0}
    groups = [{"params": [other]}, group | {"adjust_lr_fn": adjust}]
    return Muon(groups, hidden, lr=RATE, weight_decay=DECAY, betas=(0.9, 0.95), eps=1e-8, **options)


def whole(params: list[nn.Parameter]) -> list[Hidden]:
    return [Hidden(parameter, inputs=1) for parameter in params]


def set_gradients(params: list[nn.Parameter], weights: list[Tensor], step: int) -> None:
    """Set noisy gradients that depend on every bit of the BF16 `weights`."""
    generator = torch.Generator().manual_seed(step)
    for parameter, weight in zip(params, weights, strict=True):
        noise = torch.randn(weight.shape, generator=generator)
        parameter.grad = (weight.float().sin() + noise).bfloat16().to(parameter.dtype)


def close(tensor: Tensor, expected: Tensor) -> bool:
    """Return whether two weights are equal, up to the roundings of BF16 products."""
    return torch.allclose(tensor, expected, rtol=0, atol=2e-2 * RATE)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_fp32_and_exact_bf16_follow_torchs_muon(adjust: str) -> None:
    masters = parameters()
    fp32 = parameters()
    bf16 = parameters(torch.bfloat16)
    reference = torch.optim.Muon(masters, lr=RATE, weight_decay=DECAY, adjust_lr_fn=adjust)
    plain = muon_of(whole(fp32), adjust)
    exact = muon_of(whole(bf16), adjust)
    for step in range(30):
        rate = RATE * (1 - step / 30)
        reference.param_groups[0]["lr"] = rate
        for optimizer in (plain, exact):
            set_learning_rate(optimizer, rate / 10)
        for params in (masters, fp32):
            set_gradients(params, [split(p.detach())[0] for p in params], step)
        set_gradients(bf16, [p.detach() for p in bf16], step)
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


def test_singular_values_become_about_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((32, 96), (96, 32)):
        update = orthogonalize(torch.randn(3, rows, columns, generator=generator)).float()
        values = torch.linalg.svdvals(update)
        assert update.shape == (3, rows, columns)
        assert 0.6 < values.min() < values.max() < 1.25


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
    [((6, 4), 1, 2), ((4, 6), 0, 3), ((3, 6, 4), 2, 2), ((6, 4), 1, 1)],
)
def test_split_returns_a_view_of_all_values(
    shape: tuple[int, ...], inputs: int, stacked: int
) -> None:
    item = Hidden(nn.Parameter(torch.ones(shape)), inputs, stacked)
    matrices = item.split(item.parameter.detach())
    assert matrices.shape == item.shape
    assert matrices.numel() == item.parameter.numel()
    matrices.zero_()
    assert not item.parameter.any()


MIXTURE = {
    **{"model_type": "qwen3_moe", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4},
    **{"intermediate_size": 24, "moe_intermediate_size": 16},
    **{"num_experts": 4, "num_experts_per_tok": 2},
}


def hidden_by_name(hf: PreTrainedModel) -> dict[str, Hidden]:
    names = {parameter: name for name, parameter in hf.named_parameters()}
    return {names[item.parameter]: item for item in hidden_parameters(hf)}


def test_queries_keys_values_gate_and_up_are_separate_matrices() -> None:
    config = {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 8, "vocab_size": 16}
    attention = hidden_by_name(on_meta({"model_type": "gpt2", **config}))
    assert attention["transformer.h.0.attn.c_attn.weight"].shape == (3, 8, 8)
    assert attention["transformer.h.0.mlp.c_fc.weight"].shape == (1, 32, 8)
    weight = torch.arange(8 * 24).view(8, 24)
    queries = attention["transformer.h.0.attn.c_attn.weight"].split(weight)[0]
    assert torch.equal(queries, weight[:, :8].t())
    gate_up = hidden_by_name(on_meta(MIXTURE))["model.layers.0.mlp.experts.gate_up_proj"]
    assert gate_up.shape == (4 * 2, 16, 8)
    weight = torch.arange(4 * 32 * 8).view(4, 32, 8)
    assert torch.equal(gate_up.split(weight)[3], weight[1, 16:])
    single = hidden_by_name(on_meta(MIXTURE | {"num_experts": 1, "num_experts_per_tok": 1}))
    assert single["model.layers.0.mlp.experts.gate_up_proj"].shape == (2, 16, 8)


def test_embeddings_head_norms_and_routers_are_left_to_adamw() -> None:
    hf = on_meta(MIXTURE)
    names = dict(hf.named_parameters()).keys() - hidden_by_name(hf).keys()
    layer = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    others = [*("embed_tokens", "norm"), *(f"layers.0.{name}" for name in (*layer, "mlp.gate"))]
    assert names == {"lm_head.weight", *(f"model.{name}.weight" for name in others)}


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
        hidden_parameters(on_meta({"model_type": model_type, **sizes, **heads}))


# ── Shares of the work ──


def test_ranks_have_equal_shares_and_batches_of_equal_shape() -> None:
    shapes = [(64, 64)] * 12 + [(32, 64)] * 12 + [(192, 64)] * 12 + [(64, 192)] * 6
    hidden = [Hidden(nn.Parameter(torch.empty(shape, device="meta")), 1) for shape in shapes]
    of_ranks: list[list[Hidden]] = [[] for _ in range(6)]
    for batches in share(hidden, 6):
        assert len({item.shape for batch in batches for item in batch}) == 1
        for rank, batch in enumerate(batches):
            of_ranks[rank] += batch
    shared = [item for of_rank in of_ranks for item in of_rank]
    assert len(shared) == len(hidden)
    assert set(shared) == set(hidden)
    assert len({tuple(item.shape for item in of_rank) for of_rank in of_ranks}) == 1


@pytest.mark.parametrize(
    ("matrices", "ranks", "rounds"),
    [
        (2, 1, [[1], [2], [2], [1]]),
        # Rounds in which a rank has no batch, or a smaller one
        (2, 2, [[1], [2, 2], [1]]),
        (3, 4, [[1], [2, 2, 1]]),
    ],
)
def test_rounds_have_batches_of_a_limited_number_of_values(
    matrices: int, ranks: int, rounds: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "BATCH", matrices * 8 * 8)
    hidden = [Hidden(nn.Parameter(torch.empty(8, 8)), 1) for _ in range(5)]
    hidden.append(Hidden(nn.Parameter(torch.empty(64, 8)), 1))
    of_rounds = list(share(hidden, ranks))
    assert [list(map(len, batches)) for batches in of_rounds] == rounds
    shared = [item for batches in of_rounds for batch in batches for item in batch]
    assert len(shared) == len({*shared}) == len(hidden)


def test_the_rounds_of_a_shape_have_batches_of_equal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "BATCH", 3 * 8 * 8)
    hidden = [Hidden(nn.Parameter(torch.empty(8, 8)), 1) for _ in range(8)]
    assert [list(map(len, batches)) for batches in share(hidden, 2)] == [[2, 2], [2, 2]]


# ── State, settings and the built optimizer ──


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_momentum_has_its_dtype_and_its_metric(moments: torch.dtype) -> None:
    params = parameters(torch.bfloat16)
    optimizer = muon_of(whole(params), "match_rms_adamw", moments=moments)
    optimizer.materialise()
    set_learning_rate(optimizer, RATE)
    set_updates_done(optimizer, 7)
    set_gradients(params, [p.detach() for p in params], 0)
    optimizer.step()
    assert {optimizer.state[p]["momentum"].dtype for p in params} == {moments}
    assert optimizer.state[params[0]].keys() == {"step", "momentum", "remainder"}
    assert {int(optimizer.state[p]["step"]) for p in params} == {8}
    # Moonlight's factor makes updates as large as AdamW's (arXiv:2502.16982).
    assert 0.17 < optimizer.figures["muon_update_rms"] < 0.23


def test_lost_updates_are_counted_for_bf16_weights_alone() -> None:
    lost = {}
    for exact in (False, True):
        params = parameters(torch.bfloat16)
        optimizer = muon_of(whole(params), exact=exact)
        set_learning_rate(optimizer, 1e-6)
        set_gradients(params, [p.detach() for p in params], 0)
        optimizer.step()
        lost[exact], count = optimizer.frozen_counts.tolist()
        assert count == sum(p.numel() for p in params)
    assert lost[True] < 0.01 * count < 0.9 * count < lost[False]


def test_a_parameter_without_gradient_is_not_updated() -> None:
    params = parameters()
    optimizer = muon_of(whole(params))
    set_gradients(params, [p.detach() for p in params], 0)
    params[1].grad = None
    before = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"muon": {"learning_rate": 0.02}}, "set `name: muon`"),
        ({"name": "muon", "offload": "moments"}, "Muon updates a matrix as a whole"),
    ],
)
def test_settings_that_do_not_fit_the_optimizer_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerSettings(**settings)


def test_the_polynomial_is_that_of_torch() -> None:
    defaults = torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))]).defaults
    assert defaults["ns_coefficients"] == muon.COEFFICIENTS
    assert defaults["ns_steps"] == muon.STEPS
